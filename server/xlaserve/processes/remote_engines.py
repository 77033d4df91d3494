"""The engines of a front, in other processes, as one backend of its protocols."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial, reduce
from itertools import chain
from pathlib import Path
from typing import Final, cast

from xlaserve.admission.shared_counts import Kind, SharedCounts, Upgrade
from xlaserve.errors import EngineLost, ModelNotFound, XlaserveError
from xlaserve.models.version import Served, Version
from xlaserve.processes.link.front_end import engine_link as link
from xlaserve.processes.merged_catalogue import CatalogueMerger, EngineModels
from xlaserve.processes.mirror import Mirror
from xlaserve.processes.passed_changes import PassOn, refuse
from xlaserve.processes.remote_engine import RemoteEngine
from xlaserve.programs.tf.device import Device
from xlaserve.programs.tf.profiler import Recording
from xlaserve.programs.watch.xla_log import XlaCompilation
from xlaserve.telemetry import tally
from xlaserve.telemetry.failures import Failure, Failures
from xlaserve.telemetry.findings import Findings, Pair
from xlaserve.telemetry.metrics import Metrics
from xlaserve.telemetry.tally import Counted, ShadowKey
from xlaserve.telemetry.version_metrics import Statistics
from xlaserve.wire.shared.call import Calls

UPGRADE_LOOK_S: Final = 0.05
"""Interval between looks whether an upgrade, which a change of models waits for, has ended."""

log = logging.getLogger(__name__)


class RemoteEngines:
    """Engines in other processes that all have the same models. Implements `wire.shared.backend.Backend`.

    Changes of models are made in each engine, one after the other. While another server starts to take this one's
    place, as `usage` says, changes wait, since that server would miss them; once it serves, `pass_on` has it make them.
    `directory` shows the models of all engines together. On the event loop.
    """

    def __init__(
        self,
        addresses: Sequence[Path],
        directory: Mirror,
        metrics: Metrics,
        usage: SharedCounts | None = None,
        pass_on: PassOn = refuse,
    ) -> None:
        self.directory = directory
        self._pass_on = pass_on
        self._usage = usage or SharedCounts()
        self._changes_under_way = self._usage.amount(Kind.CHANGES)
        self._metrics = metrics
        self._calls: Calls | None = None
        """The calls of this front, in flight and failed; None until the front is built, which needs this backend."""
        self._own_in_flight = 0
        """Requests in flight at this front when its counts were last taken."""
        self._tally: tally.Json = tally.NOTHING
        """Counts of all processes, as of the last `count`."""
        self._engines = [
            RemoteEngine(
                address,
                on_models=partial(self._take, number),
                on_lost=self._show_together,
                tally=partial(self._own_tally, number),
            )
            for number, address in enumerate(addresses)
        ]
        self._merger = CatalogueMerger()
        self._leaving: dict[asyncio.Task[None], link.EngineLink] = {}
        """Links to engines that others have replaced, until their requests are answered."""
        self._changing: set[asyncio.Task[list[XlaserveError]]] = set()
        """Changes that one engine has made, and the others not yet."""
        self._known = asyncio.Event()

    @property
    def device(self) -> Device:
        """The device of the first engine, with the lanes and GPUs of all engines; an unknown CPU without an engine."""
        devices = [engine.report.device for engine in self._engines_there.values()]
        if not devices:
            return Device("cpu", "unknown", 0, 0)
        gpus = chain.from_iterable(device.gpus for device in devices)
        return replace(devices[0], lanes=sum(device.lanes for device in devices), gpus=(*gpus,))

    @property
    def unexpected(self) -> Collection[XlaCompilation]:
        """Compilations of XLA that nothing asked for, in any engine."""
        return [*chain.from_iterable(engine.report.unexpected for engine in self._engines_there.values())]

    @property
    def is_watched(self) -> bool | None:
        """Whether XLA's compilations are seen in all engines that watch for them; None if no engine watches."""
        watched = [engine.report.is_watched for engine in self._engines_there.values()]
        return None if all(one is None for one in watched) else False not in watched

    @property
    def lane_busy_s(self) -> float:
        """Time for which lanes were in use, all together, up to a second ago."""
        return sum(cast(float, engine.linked.about or 0.0) for engine in self._engines_there.values())

    @property
    def spare_bytes(self) -> int:
        """Bytes of memory that are shared with engines and not in use, kept for the next requests."""
        links = chain((engine.linked for engine in self._engines_there.values()), self._leaving.values())
        return sum(linked.arena.spare_bytes for linked in links)

    def serve(self, calls: Calls) -> None:
        """Counts the calls of this front, and changes of models among those in flight, from now on."""
        self._calls = calls

    async def known(self) -> None:
        """Returns once an engine has published its models."""
        await self._known.wait()

    async def follow(self) -> None:
        """Keeps links to all engines. Never returns."""
        following = [asyncio.create_task(engine.follow()) for engine in self._engines]
        try:
            await asyncio.gather(*following)
        finally:
            for task in (*self._leaving, *self._changing, *following):
                task.cancel()
            await asyncio.wait(following)

    @property
    def _engines_there(self) -> dict[int, RemoteEngine]:
        return {number: engine for number, engine in enumerate(self._engines) if engine.is_known}

    def _take(self, number: int, before: link.EngineLink | None) -> None:
        in_use = self.directory.in_use()
        self._show_together()
        self._known.set()
        if before is not None:
            if not before.is_lost:
                still = self.directory.in_use()
                leaving = asyncio.create_task(_leave(before, [served for served in in_use if served not in still]))
                self._leaving[leaving] = before
                leaving.add_done_callback(self._leaving.pop)
            before.move()

    def _show_together(self) -> None:
        """Has the directory show the models that all engines have together, or that all engines are lost."""
        there = self._engines_there.items()
        models_of = {number: EngineModels(one.report.catalogue, one.linked.models) for number, one in there}
        catalogue, models = self._merger.merge(models_of)
        if models_of:
            self.directory.take(catalogue, models)
        else:
            self.directory.lose()

    @property
    def counted(self) -> Counted:
        """Counts of the models in all processes, as of the last `count`."""
        return Counted.read(self._tally)

    @property
    def in_flight_elsewhere(self) -> int:
        """Requests that other processes had accepted and not answered at the time of the last `count`."""
        return int(self._tally["in_flight"]) - self._own_in_flight

    def statistics(self, version: Version) -> Statistics:
        """Returns the counts of a version in all processes since it was loaded, as of the last `count`."""
        number = self.directory.number(version)
        return Statistics() if number is None else tally.statistics_of(self._tally, number)

    def shadows(self, version: Version) -> Mapping[Pair, Findings]:
        """Returns the comparisons of a version with its shadows at all fronts, as of the last `count`."""
        number = self.directory.number(version)
        versions = {number: one.settings.version for number, one in self.directory.numbered().items()}
        return {} if number is None else tally.findings_of(self._tally, number, versions)

    def failures(self, here: Failures) -> Iterable[Failure]:
        """Returns the last requests that failed: here, and at all fronts as of the last `count`, the newest first."""
        failures = {*tally.failures_of(self._tally), *here}
        return sorted(failures, key=lambda failure: failure.at_s, reverse=True)

    async def count(self) -> None:
        """Adds up the counts of all processes. Without an engine, the counts stay as they were."""
        there = [*self._engines_there]
        # Each engine can ask all fronts, whose counts are to be added once.
        counts = await asyncio.gather(*(self._count(number, of_fronts=number == there[0]) for number in there))
        if found := [count for count in counts if count is not None]:
            self._tally = reduce(tally.added, found)

    async def _count(self, number: int, *, of_fronts: bool) -> tally.Json | None:
        with suppress(EngineLost):
            counted = await self._engines[number].linked.ask("count", of_fronts=of_fronts)
            return tally.renumbered(counted, self._merger.numbers.get(number, {}))
        return None

    def _own_tally(self, number: int) -> object:
        """Returns the counts of this front as plain data, with the numbers that an engine gives to loadings."""
        calls = self._calls
        self._own_in_flight = 0 if calls is None else calls.in_flight
        numbered, numbers = self.directory.numbered(), self._merger.numbers.get(number, {})
        here = {there: numbered[shown] for there, shown in numbers.items() if shown in numbered}
        statistics = {there: version.telemetry.statistics for there, version in here.items()}
        failures = None if calls is None else calls.failures
        counted = Counted.here(self._metrics)
        return tally.tally(counted, statistics, self._own_in_flight, failures, self._shadows_of(here))

    def _shadows_of(self, here: Mapping[int, Version]) -> dict[int, dict[ShadowKey, Findings]]:
        """Returns the comparisons of loadings with their shadows at this front, by the numbers of the loadings."""
        found: defaultdict[int, dict[ShadowKey, Findings]] = defaultdict(dict)
        numbers = {version: number for number, version in here.items()}
        for number, version in here.items():
            for pair, findings in version.shadows.items():
                with suppress(ModelNotFound):
                    other = self.directory.find(version.name, pair.shadow_version)
                    if other in numbers:
                        found[number][ShadowKey(pair.mode, numbers[other], pair.shadow_mode)] = findings
        return found

    async def load(self, name: str) -> None:
        """Loads all configured versions of a model in each engine; see `Repository.load`."""
        await self._change(name, "load")

    async def update(self, name: str, labels: Mapping[str, str], versions: Collection[str]) -> None:
        """Loads the versions of a model that changed in each engine, and moves labels; see `Repository.update`."""
        await self._change(name, "update", labels=dict(labels), versions=[*versions])

    async def unload(self, name: str) -> None:
        """Unloads a model in each engine; see `Repository.unload`."""
        self.directory.find(name)
        await self._change(name, "unload")

    async def profile(self, seconds: float) -> Recording:
        """Records a profile of the first engine that is there; see `Profiler.record`."""
        engine = next(iter(self._engines_there.values()), self._engines[0])
        return Recording(*await engine.linked.ask("profile", seconds=seconds))

    async def _change(self, name: str, question: str, **arguments: object) -> None:
        """Makes a change in the engines, or has the server make it that has taken this one's place.

        Waits while that server starts. Raises any error of the change, and ShuttingDown if the other server can't be
        reached.
        """
        under_way = self._changes_under_way
        while True:
            under_way.own += 1  # before the look: the supervisor looks at the number after it has begun an upgrade
            try:
                if (stage := self._usage.upgrade) is Upgrade.NONE:
                    await self._change_all(name, question, **arguments)
                    return
            finally:
                under_way.own -= 1
            if stage is Upgrade.DONE:
                break
            await asyncio.sleep(UPGRADE_LOOK_S)
        with nullcontext() if self._calls is None else self._calls.awaited():
            await self._pass_on(question, {"name": name, **arguments})

    async def _change_all(self, name: str, question: str, **arguments: object) -> None:
        """Makes a change in all engines, or in none if the first one that is there can't make it.

        An engine that is not there will begin with the models of the others. Raises the error of the first engine that
        fails. If it is cancelled once one engine has changed, the others still do.
        """
        lost = EngineLost("the process that runs the models is starting")
        others = iter(self._engines)
        for engine in others:
            try:
                await engine.change(name, question, **arguments)
            except EngineLost as error:
                lost = error
            else:
                break
        else:
            raise lost
        changing = asyncio.create_task(_change_others([*others], name, question, arguments))
        self._changing.add(changing)
        changing.add_done_callback(self._changing.discard)
        if failed := await asyncio.shield(changing):
            raise failed[0]


async def _change_others(
    engines: Iterable[RemoteEngine], name: str, question: str, arguments: Mapping[str, object]
) -> list[XlaserveError]:
    """Makes a change in all of these engines that are there, and returns their errors."""
    failed = []
    for engine in engines:
        try:
            await engine.change(name, question, **arguments)
        except EngineLost:
            pass
        except XlaserveError as error:
            failed.append(error)
    return failed


async def _leave(linked: link.EngineLink, gone: Collection[Served]) -> None:
    """Ends the link to a replaced engine once its requests of this front are answered, those of `gone` models first."""
    try:
        await asyncio.gather(*(served.left() for served in gone))
        await asyncio.gather(*(model.drained() for model in [*linked.models.values()]))
        await linked.answered()
    finally:
        linked.close()
