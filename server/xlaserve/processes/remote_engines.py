"""The engines of a front, in processes of their own."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
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
from xlaserve.processes.merged_catalogue import Merging, Shown
from xlaserve.processes.mirror import Mirror
from xlaserve.processes.passed_changes import PassOn, refuse
from xlaserve.processes.published import EngineReport
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

RETRY_S: Final = 0.05
"""Between attempts to reach an engine that is not there."""
FAILED_RETRY_S: Final = 1.0
"""Between attempts where something else is wrong: no file descriptors are left, say."""
UPGRADE_LOOK_S: Final = 0.05
"""How often a change of models that waits looks what has become of an upgrade."""

log = logging.getLogger(__name__)


class RemoteEngine:
    """One of them, which may end and be followed by another.

    `on_models` is called with the link before, where there was one, whenever the engine says what it has; `on_lost`
    once it has ended.
    """

    def __init__(
        self,
        address: Path,
        *,
        on_models: Callable[[link.EngineLink | None], object],
        on_lost: Callable[[], object],
        tally: Callable[[], object],
    ) -> None:
        self.link: link.EngineLink | None = None
        """To the engine that requests are brought to, or were last."""
        self.is_known = False
        """Whether it is there and has said what it has."""
        self._address = address
        self._title = address.name if " " in address.name else f"the {address.name}"
        self._on_models = on_models
        self._on_lost = on_lost
        self._tally = tally

    @property
    def about(self) -> EngineReport:
        """What it has said of itself."""
        return cast(EngineReport, self.linked.details)

    @property
    def linked(self) -> link.EngineLink:
        """The link. Raises EngineLost where there was none yet."""
        if self.link is None:
            raise EngineLost("the process that runs the models is starting")
        return self.link

    async def follow(self) -> None:
        """Links to the engine, to one that takes its place, and to the next one when it has ended, for ever."""
        try:
            while True:
                linked = await self._reached()
                if not await linked.superseded():
                    log.warning("%s is lost: %s", self._title, await linked.lost())
                    self._lose()
        finally:
            if self.link is not None:
                self.link.close()
            self._lose()

    async def change(self, name: str, question: str, **arguments: object) -> None:
        """Has it make a change of a model, or the one that takes its place meanwhile."""
        while True:
            linked = self.linked
            try:
                await linked.ask(question, name=name, **arguments)
            except ModelNotFound:
                # The engine's own words list models, of which this caller may know only some.
                raise ModelNotFound(f"no model {name[:128]!r} is configured") from None
            except EngineLost:
                if not linked.is_superseded:
                    raise
                await linked.moved()  # the one in its place does it
            else:
                return

    async def _reached(self) -> link.EngineLink:
        """Returns a new link to the engine, once there is one."""
        while True:
            try:
                linked = await link.connect(self._address, on_models=self._take, tally=self._tally)
            except (EngineLost, ConnectionError) as error:
                log.debug("no link to %s: %r", self._title, error)
                if self.link is None or self.link.is_lost:
                    self._lose()  # it may have ended right after it had said what it has
                await asyncio.sleep(RETRY_S)
            except TimeoutError:
                log.info("%s does not answer yet", self._title)  # importing libraries may take it long
                await asyncio.sleep(RETRY_S)
            except OSError as error:
                log.warning("%s can't be reached, next attempt in %g s: %s", self._title, FAILED_RETRY_S, error)
                await asyncio.sleep(FAILED_RETRY_S)
            else:
                log.debug("linked to %s", self._title)
                return linked

    def _take(self, linked: link.EngineLink) -> None:
        before, self.link, self.is_known = self.link, linked, True
        self._on_models(None if before is linked else before)

    def _lose(self) -> None:
        if self.is_known:
            self.is_known = False
            self._on_lost()


class RemoteEngines:
    """Engines in other processes that all have the same models. They are a `wire.shared.backend.Backend`.

    Changes are made in each of them, one after the other. While another server starts to take this one's place, by
    `usage`, they wait: it would not have them. Once it serves, it makes them: `pass_on` has it do so.
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
        self.calls: Calls | None = None
        """What is under way here and has failed, once this front takes calls."""
        self._own_in_flight = 0
        """At the time when this front was last counted."""
        self._tally: tally.Json = tally.NOTHING
        """Of all processes."""
        self._engines = [
            RemoteEngine(
                address,
                on_models=partial(self._take, number),
                on_lost=self._show,
                tally=partial(self._own_tally, number),
            )
            for number, address in enumerate(addresses)
        ]
        self._merging = Merging()
        self._leaving: dict[asyncio.Task[None], link.EngineLink] = {}
        """Of engines that another has taken the place of, until what they have is answered."""
        self._changing: set[asyncio.Task[list[XlaserveError]]] = set()
        """Changes that one of them has made, and the others not yet."""
        self._known = asyncio.Event()

    @property
    def device(self) -> Device:
        """That of the first engine, with the lanes and GPUs of all."""
        devices = [engine.about.device for engine in self._there.values()]
        if not devices:
            return Device("cpu", "unknown", 0, 0)
        gpus = chain.from_iterable(device.gpus for device in devices)
        return replace(devices[0], lanes=sum(device.lanes for device in devices), gpus=(*gpus,))

    @property
    def unexpected(self) -> Collection[XlaCompilation]:
        """What XLA compiled in any of them although nothing asked for it."""
        return [*chain.from_iterable(engine.about.unexpected for engine in self._there.values())]

    @property
    def is_watched(self) -> bool | None:
        """Whether XLA's compilations are seen in all of them that watch; None where none does."""
        watched = [engine.about.is_watched for engine in self._there.values()]
        return None if all(one is None for one in watched) else False not in watched

    @property
    def lane_busy_s(self) -> float:
        """Time for which lanes were in use, all together, up to a second ago."""
        return sum(cast(float, engine.linked.about or 0.0) for engine in self._there.values())

    @property
    def spare_bytes(self) -> int:
        """Bytes of memory that are shared with them and not in use: kept for the requests that come next."""
        links = chain((engine.linked for engine in self._there.values()), self._leaving.values())
        return sum(linked.arena.spare_bytes for linked in links)

    async def known(self) -> None:
        """Returns once an engine has said what it is."""
        await self._known.wait()

    async def follow(self) -> None:
        """Follows all of them for ever."""
        following = [asyncio.create_task(engine.follow()) for engine in self._engines]
        try:
            await asyncio.gather(*following)
        finally:
            for task in (*self._leaving, *self._changing, *following):
                task.cancel()
            await asyncio.wait(following)

    @property
    def _there(self) -> dict[int, RemoteEngine]:
        return {number: engine for number, engine in enumerate(self._engines) if engine.is_known}

    def _take(self, number: int, before: link.EngineLink | None) -> None:
        in_use = self.directory.in_use()
        self._show()
        self._known.set()
        if before is not None:
            if not before.is_lost:
                still = self.directory.in_use()
                leaving = asyncio.create_task(_leave(before, [served for served in in_use if served not in still]))
                self._leaving[leaving] = before
                leaving.add_done_callback(self._leaving.pop)
            before.move()

    def _show(self) -> None:
        """Shows what those that are there have together."""
        shown = {number: Shown(engine.about.catalogue, engine.linked.models) for number, engine in self._there.items()}
        catalogue, models = self._merging.merge(shown)
        if shown:
            self.directory.take(catalogue, models)
        else:
            self.directory.lose()

    @property
    def counted(self) -> Counted:
        """What all processes have counted of the models, as of the last `count`."""
        return Counted.read(self._tally)

    @property
    def in_flight_elsewhere(self) -> int:
        """Requests that other processes had accepted and not answered at that time."""
        return int(self._tally["in_flight"]) - self._own_in_flight

    def statistics(self, version: Version) -> Statistics:
        """Returns what all processes have counted of a version since it was loaded, as of the last `count`."""
        number = self.directory.number(version)
        return Statistics() if number is None else tally.statistics_of(self._tally, number)

    def shadows(self, version: Version) -> Mapping[Pair, Findings]:
        """Returns what all fronts have found of a version's shadows, as of the last `count`."""
        number = self.directory.number(version)
        versions = {number: one.settings.version for number, one in self.directory.numbered().items()}
        return {} if number is None else tally.findings_of(self._tally, number, versions)

    def failures(self, here: Failures) -> Iterable[Failure]:
        """Returns the last requests that failed here, and as of the last `count` at all fronts, the newest first."""
        failures = {*tally.failures_of(self._tally), *here}
        return sorted(failures, key=lambda failure: failure.at_s, reverse=True)

    async def count(self) -> None:
        """Adds up what all processes have counted until now. Without an engine, nothing changes."""
        there = [*self._there]
        # Each has asked all fronts: they are to count once.
        counts = await asyncio.gather(*(self._count(number, of_fronts=number == there[0]) for number in there))
        if found := [count for count in counts if count is not None]:
            self._tally = reduce(tally.added, found)

    async def _count(self, number: int, *, of_fronts: bool) -> tally.Json | None:
        with suppress(EngineLost):
            counted = await self._engines[number].linked.ask("count", of_fronts=of_fronts)
            return tally.renumbered(counted, self._merging.numbers.get(number, {}))
        return None

    def _own_tally(self, number: int) -> object:
        """Returns what is counted here, with the numbers that an engine gives to loadings."""
        calls = self.calls
        self._own_in_flight = 0 if calls is None else calls.in_flight
        numbered, numbers = self.directory.numbered(), self._merging.numbers.get(number, {})
        here = {there: numbered[shown] for there, shown in numbers.items() if shown in numbered}
        statistics = {there: version.telemetry.statistics for there, version in here.items()}
        failures = None if calls is None else calls.failures
        counted = Counted.here(self._metrics)
        return tally.tally(counted, statistics, self._own_in_flight, failures, self._shadows_of(here))

    def _shadows_of(self, here: Mapping[int, Version]) -> dict[int, dict[ShadowKey, Findings]]:
        """Returns what this front has found of the shadows of loadings, by their numbers."""
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
        """Does as `Repository.load`."""
        await self._change(name, "load")

    async def update(self, name: str, labels: Mapping[str, str], versions: Collection[str]) -> None:
        """Does as `Repository.update`."""
        await self._change(name, "update", labels=dict(labels), versions=[*versions])

    async def unload(self, name: str) -> None:
        """Does as `Repository.unload`."""
        self.directory.find(name)
        await self._change(name, "unload")

    async def profile(self, seconds: float) -> Recording:
        """Does as `Profiler.record`, in the first of them."""
        engine = next(iter(self._there.values()), self._engines[0])
        return Recording(*await engine.linked.ask("profile", seconds=seconds))

    async def _change(self, name: str, question: str, **arguments: object) -> None:
        """Makes a change here, or has another server make it that has taken this one's place.

        Waits while that starts. Raises any error of the change, and ShuttingDown where the other server can't be
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
        with nullcontext() if self.calls is None else self.calls.awaited():
            await self._pass_on(question, {"name": name, **arguments})

    async def _change_all(self, name: str, question: str, **arguments: object) -> None:
        """Makes a change in all of them, or in none if the first that is there can't make it.

        One that is not there begins with the models of the others. Raises the error of the first one that fails. Where
        it is cancelled once one of them has changed, the others still do.
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
    """Makes a change in all of these, and returns what became of those that can't make it."""
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
    """Ends the link to an engine once what it has of this front is answered; `gone` nobody finds any more."""
    try:
        await asyncio.gather(*(served.left() for served in gone))
        await asyncio.gather(*(model.drained() for model in [*linked.models.values()]))
        await linked.answered()
    finally:
        linked.close()
