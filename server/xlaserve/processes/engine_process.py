"""The process of an engine: it runs the models for fronts that are processes of their own."""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import pickle
import signal
import socket
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import ExitStack, suppress
from functools import partial, reduce
from itertools import count
from typing import Any, Final

from xlaserve.config.versions import grouped
from xlaserve.engine.niceness import LowPriority
from xlaserve.engine.under_way import UnderWay, key_of
from xlaserve.errors import ModelFailed, UnsupportedFeature
from xlaserve.models import catalog
from xlaserve.models.version import Served, State
from xlaserve.processes.configuration import ConfigurationFollower
from xlaserve.processes.engine import Engine
from xlaserve.processes.engine_orders import EngineOrders
from xlaserve.processes.engine_replacement import EngineReplacement, InitialModels, Outcome, check_room
from xlaserve.processes.event_loop import Stopping, end_at_once, in_background, run_loop
from xlaserve.processes.link.engine_end.host import Host
from xlaserve.processes.link.engine_end.hosted_models import Hosted
from xlaserve.processes.published import EngineReport, Publisher
from xlaserve.processes.spans import Tracing
from xlaserve.processes.supervision.child import Child
from xlaserve.processes.supervision.parent import SILENCED
from xlaserve.programs.watch.stderr_tap import StderrTap
from xlaserve.telemetry import console, tally
from xlaserve.telemetry.http import on_loop
from xlaserve.telemetry.metrics import Metrics

FRONTS: Final = "fronts"
"""Name of the descriptor of the socket that fronts connect to."""
UNDER_WAY: Final = "under way"
"""Name of the descriptor of the file that says which models are loaded or run now; see `engine.under_way`."""
LAST_WORDS: Final = "last words"
"""Name of the descriptor of the file that faulthandler writes to in a crash."""
CRASHED: Final = 1
LOOK_S: Final = 0.5
"""Interval between looks for changes that call no callback, such as new programs, which fronts are to be told of."""
COUNT_LOOKS: Final = 10
"""Fronts are asked for their counts at every tenth look: counts since then are lost if a front is killed."""

log = logging.getLogger(__name__)


def run(child: Child) -> int:
    """Serves fronts until a signal, and returns the exit status."""
    faulthandler.enable(child.descriptors[LAST_WORDS])
    faulthandler.register(SILENCED, child.descriptors[LAST_WORDS], chain=True)
    received: EngineOrders = pickle.loads(child.payload)
    orders = received.current()

    async def serve() -> int:
        with ExitStack() as stack:
            tap: StderrTap | None = None
            if orders.settings.watch_compilations and any(map(catalog.uses_tensorflow, orders.settings.models)):
                tap = stack.enter_context(StderrTap())
            return await EngineProcess(child, orders, tap).run()

    return run_loop(serve())


class EngineProcess:
    """An engine, the host that fronts link to, and what this process tells its supervisor. On the event loop."""

    def __init__(self, child: Child, orders: EngineOrders, xla_events: StderrTap | None) -> None:
        self._child = child
        self._settings = orders.settings
        self._is_beside = orders.is_beside
        self._priority = LowPriority()
        if orders.is_beside or orders.taken_over is not None:
            self._priority.begin()
        self._stopping = Stopping(child.close)
        self._metrics = Metrics()
        self._tracing = Tracing.of(orders.settings)
        self._is_publication_due = False
        self._leaving: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._published: object = None
        """Fingerprint of the state that fronts were told last."""
        self._told: Mapping[str, object] | None = None
        """The readiness that the supervisor was told last; None while it is to be told of no changes."""
        self._counts_of_ended = tally.NOTHING
        """Counts of fronts that have ended."""
        self._has_started = False
        self._kept = b""
        """Pickled `InitialModels` that the supervisor keeps for an engine that follows this one."""
        initial, configured = orders.read_initial_models(), grouped(orders.settings.models)
        listings = None if initial is None else initial.listings
        required: Collection[str] = initial.required if initial is not None and orders.is_beside else ()
        if initial is None and orders.taken_over is not None:
            listings = orders.taken_over.listings(configured)
            required = listings.keys() & orders.taken_over.serving
        # Beside an engine that serves, versions that were set aside may be tried again: a crash ends only this process.
        tried = _to_load(initial) if initial is not None and orders.is_beside else frozenset()
        progress = console.WarmUpProgress(orders.settings)
        self._on_loaded = progress.end
        self._engine = Engine(
            orders.settings,
            self._metrics,
            read_settings=orders.read,
            on_record=progress.record,
            on_change=self._publish_soon,
            on_crash=self._stopping.crash,
            tracing=self._tracing,
            xla_events=xla_events,
            listings=listings,
            required=required,
            set_aside={key: reason for key, reason in orders.set_aside.items() if key not in tried},
            under_way=UnderWay(child.descriptors[UNDER_WAY]),
            on_endless=partial(end_at_once, CRASHED),  # without a word to the supervisor, which takes it for a crash
        )
        repository = self._engine.repository
        self._publisher = Publisher(repository, orders.first_loading)
        self._host = Host(
            self._answer,
            lambda: self._engine.lane_busy_s,
            self._add_counts_of_ended,
            on_linked=self._priority.end if orders.is_beside else lambda: None,
        )
        self._replacement = EngineReplacement(
            repository=repository,
            configured=configured,
            begin=self._begin_successor,
            succeeded=self._move_fronts,
            check_room=partial(check_room, orders.settings.max_resident_bytes, self._engine.device, self._engine.gpus),
            pass_news=child.pass_reload,
            always_in_place=orders.settings.swap == "in_place" or orders.settings.version_order == "unload_first",
            changed_ns=0 if initial is None else initial.changed_ns,
            on_changed=self._keep,
        )
        self._configuration = ConfigurationFollower(orders.settings, orders.read, self._replacement.reconfigure)
        self._questions: Mapping[str, Callable[..., Awaitable[object]]] = {
            "count": self._count,
            "load": self._replacement.load,
            "update": self._replacement.update,
            "unload": self._replacement.unload,
            "profile": self._profile,
            "open": self._host.open,
        }

    async def run(self) -> int:
        """Serves until a signal, and returns the exit status. Raises ConfigError and ModelFailed."""
        loop = asyncio.get_running_loop()
        self._child.beat()
        self._stopping.listen()
        loop.add_signal_handler(signal.SIGHUP, self._configuration.request)
        log.info("device: %s", self._engine.device)
        self._engine.repository.announce()  # else fronts take these models for unknown ones
        self._publish()
        self._host.listen(socket.socket(fileno=self._child.descriptors[FRONTS]))
        self._child.show_metrics(self._metrics.registry, partial(on_loop, loop, self._take_snapshot))
        watching = in_background(self._watch_changes(), self._stopping.crash)
        try:
            if await self._start():
                self._on_loaded()
                self._priority.end()
                self._has_started = True
                self._publish()
                self._tell_ready()
                await self._configuration.follow(
                    self._stopping.begun, on_reload=self._withhold_readiness, on_reloaded=self._tell_ready
                )
        finally:
            watching.cancel()
            self._leaving.cancel()
            await self._stop()
        return CRASHED if self._stopping.has_crashed else 0

    async def _start(self) -> bool:
        """Loads the models; returns False if the end has begun before all are loaded.

        If a required model fails, an engine that is alone raises ModelFailed; one that is to replace another tells the
        reason to the supervisor, which ends it.
        """
        try:
            return await self._engine.start(self._stopping.begun)
        except ModelFailed as error:
            if not self._is_beside:
                raise
            # Not ready, even if other models serve: the engine that was to be replaced goes on.
            self._child.tell_ready({**self._readiness(), "is_ready": False, "reason": str(error)})
            await self._stopping.begun.wait()
            return False

    async def _begin_successor(self, initial: InitialModels) -> Outcome:
        """Has the supervisor start another engine, and returns once that has taken this one's place or failed to."""
        loop = asyncio.get_running_loop()
        told: asyncio.Future[Outcome] = loop.create_future()

        def take(outcome: Outcome) -> None:
            if not told.done():
                told.set_result(outcome)

        def tell(outcome: Mapping[str, Any]) -> None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(take, Outcome(**outcome))

        self._child.ask_for_successor(pickle.dumps(initial), tell)
        return await told

    async def _move_fronts(self) -> None:
        """Has all fronts link to the engine that takes this one's place, then ends once they need this one no more."""
        await self._host.succeed()
        self._leaving = asyncio.create_task(self._leave())

    async def _leave(self) -> None:
        """Begins the end of this process once no front is linked to it, after `drain_timeout_s` at the latest."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._settings.drain_timeout_s):
                await self._host.drained()
        self._stopping.begun.set()

    def _keep(self) -> None:
        """Tells the supervisor the initial models of an engine that follows this one, if they have changed.

        Not before this one has loaded its models, and not while it ends, which unloads them.
        """
        if not self._has_started or self._stopping.begun.is_set():
            return
        if (kept := pickle.dumps(self._replacement.initial_models())) != self._kept:
            self._kept = kept
            self._child.keep(kept)

    def _tell_ready(self) -> None:
        self._told = self._readiness()
        self._child.tell_ready(self._told)

    def _withhold_readiness(self) -> None:
        """Tells the supervisor nothing until `_tell_ready`, which it takes for the end of a reload."""
        self._told = None

    def _readiness(self) -> Mapping[str, object]:
        repository = self._engine.repository
        return {
            "serving": self._engine.serving,
            "is_ready": repository.is_ready,
            "failed": self._failed(),
            "images_per_s": self._engine.images_per_s,
        }

    def _failed(self) -> list[tuple[str, str, str]]:
        """Returns the model's name, the version's number and the reason for each version that failed."""
        index = self._engine.repository.index()
        return [(one.name, one.settings.version, one.reason) for one in index if one.state is State.FAILED]

    async def _stop(self) -> None:
        """Ends the models and the links. In an orderly end, fronts and so their requests have ended before."""
        repository = self._engine.repository
        repository.stop_loading()
        await self._replacement.cancel()
        await repository.drain(timeout_s=0)
        self._publish()
        await self._host.close()
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.close)
        log.info("stopped")

    async def _answer(self, question: str, arguments: Mapping[str, Any]) -> object:
        ask = self._questions.get(question)
        if ask is None:
            raise UnsupportedFeature(f"expected one of {', '.join(self._questions)}, got {question[:64]!r}")
        answer = await ask(**arguments)
        if self._is_publication_due:
            self._publish()  # before the answer, so that the front that asked finds a model that was loaded
        return answer

    async def _count(self, *, of_fronts: bool) -> object:
        """Returns the counts of this process as plain data, with `of_fronts` added to the counts of all fronts."""
        here = {number: one.telemetry.statistics for number, one in self._publisher.numbered().items()}
        total = tally.tally(self._engine.counted, here, in_flight=0)
        if not of_fronts:
            return total
        return reduce(tally.added, await self._host.count(), tally.added(total, self._counts_of_ended))

    def _add_counts_of_ended(self, last: Any) -> None:
        """Adds the last counts of a front that has ended to those of the fronts that ended before."""
        versions = self._publisher.numbered()
        there = {(version.name, version.settings.version) for version in versions.values()}
        counts = tally.added(self._counts_of_ended, tally.lasting(last))
        self._counts_of_ended = tally.select(counts, versions, there)

    async def _profile(self, seconds: float) -> object:
        recording = await self._engine.profile(seconds)
        return [recording.name, recording.size_bytes]

    def _publish_soon(self) -> None:
        """Has `_publish` called once for all changes of this turn of the event loop."""
        if not self._is_publication_due:
            self._is_publication_due = True
            asyncio.get_running_loop().call_soon(self._publish)

    async def _watch_changes(self) -> None:
        for look in count(1):
            await asyncio.sleep(LOOK_S)
            if look % COUNT_LOOKS == 0:
                await self._host.count()
            if self._fingerprint() != self._published:
                self._publish()

    def _fingerprint(self) -> object:
        return self._publisher.fingerprint(), len(self._engine.unexpected)

    def _publish(self) -> None:
        """Tells fronts the models and the state of the engine, and the supervisor if that matters to it."""
        self._is_publication_due = False
        self._published = self._fingerprint()
        engine = self._engine
        report = EngineReport(self._publisher.catalogue(), engine.device, (*engine.unexpected,), engine.is_watched)
        serving = self._publisher.serving()
        self._host.publish(
            [Hosted(snapshot, served.engine, partial(_enter, served), served.leave) for snapshot, served in serving],
            report,
        )
        self._keep()
        if self._told is not None and self._told != self._readiness():
            self._tell_ready()

    def _take_snapshot(self) -> None:
        self._engine.see_versions()
        self._metrics.read_gauges()


def _to_load(initial: InitialModels) -> frozenset[bytes]:
    """Returns the keys of the versions that an engine loads which begins with these models."""
    return frozenset(
        key_of(settings)
        for model, ended in initial.listings.values()
        for number, settings in model.versions.items()
        if number not in ended
    )


def _enter(served: Served) -> None:
    """Counts a front as a request, so that a version ends only after each front has answered its requests."""
    served.calls += 1
