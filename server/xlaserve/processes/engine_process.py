"""The process that runs the models, for fronts that are processes of their own."""

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
from itertools import chain, count
from typing import Any, Final, NamedTuple

from xlaserve.config import Settings
from xlaserve.config.versions import grouped
from xlaserve.engine.memory import available_memory_bytes, own_bytes
from xlaserve.engine.niceness import LowPriority
from xlaserve.engine.under_way import UnderWay, key_of
from xlaserve.errors import ConfigError, ModelFailed, UnsupportedFeature
from xlaserve.models import catalog
from xlaserve.models.version import Served, State
from xlaserve.processes.configuration import ConfigurationFollower
from xlaserve.processes.engine import Engine
from xlaserve.processes.engine_replacement import EngineReplacement, Outcome, Start
from xlaserve.processes.event_loop import Stopping, in_background, run_loop
from xlaserve.processes.handover import ClientOverrides
from xlaserve.processes.link.engine_end.host import Host
from xlaserve.processes.link.engine_end.hosted_models import Hosted
from xlaserve.processes.published import About, Publisher
from xlaserve.processes.spans import Tracing
from xlaserve.processes.supervision.child import Child
from xlaserve.programs.watch.stderr_tap import StderrTap
from xlaserve.telemetry import console, tally
from xlaserve.telemetry.http import on_loop
from xlaserve.telemetry.metrics import Metrics

FRONTS: Final = "fronts"
"""The descriptor of the socket where fronts are taken in."""
UNDER_WAY: Final = "under way"
"""The descriptor of the file where it is noted what is loaded and run, see `engine.under_way`."""
LAST_WORDS: Final = "last words"
"""The descriptor of the file where it is written which thread a crash was in."""
CRASHED: Final = 1
LOOK_S: Final = 0.5
"""How often it is seen whether fronts are to be told of more than changes of state: of programs, say."""

LOADINGS: Final = 2**20
"""Of an engine, at most: their numbers don't reach those of the next one."""
ENGINES: Final = 2**12 - 1
"""After as many, numbers begin again."""
COUNT_LOOKS: Final = 10
"""How many looks there are for each time that fronts are asked what they have counted: what one has since is lost if it
is killed."""

log = logging.getLogger(__name__)


class Orders(NamedTuple):
    """What an engine is started with."""

    settings: Settings
    read_settings: Callable[[], Settings]
    number: int = 0
    """How many engines were started before."""
    start: bytes = b""
    """What to begin with, a pickled `Start`, if another one has said so; else an engine that follows one begins with
    the models that are configured now."""
    taken_over: ClientOverrides | None = None
    """How the models of another server are whose place this one takes, other than configured."""
    is_beside: bool = False
    """Whether it is started beside one that serves, to take its place."""
    set_aside: Mapping[bytes, str] = {}
    """Versions that have ended engines, by their keys, and how."""
    own: Mapping[str, object] = {}
    """Settings of this engine, whatever the configuration says."""

    def read(self) -> Settings:
        """Reads the configuration again. Raises ConfigError."""
        # What only this engine does, such as where a model fails, is no change of the configuration.
        failure = {"exit_on_model_failure": self.settings.exit_on_model_failure}
        return self.read_settings().model_copy(update={**self.own, **failure})

    def current(self) -> Orders:
        """Returns these with the models to begin with."""
        if (start := self.begins_with) is not None:
            models = tuple(chain.from_iterable(model.entries for model in start.configured.values()))
            return self._replace(settings=self.settings.model_copy(update={"models": models}))
        if not self.number:
            return self
        try:
            models = self.read().models
        except ConfigError as error:
            log.error("the models are those that were configured when the server started: %s", error)
            return self
        return self._replace(settings=self.settings.model_copy(update={"models": models}))

    @property
    def begins_with(self) -> Start | None:
        """What another engine has said."""
        if not self.start:
            return None
        start: Start = pickle.loads(self.start)
        return start

    @property
    def first_loading(self) -> int:
        """What the first loading is numbered: no engine has numbers of the one before it or after it."""
        return self.number % ENGINES * LOADINGS + 1


def run(child: Child) -> int:
    """Serves fronts until a signal, and returns the exit status."""
    faulthandler.enable(child.descriptors[LAST_WORDS])
    told: Orders = pickle.loads(child.payload)
    orders = told.current()

    async def serve() -> int:
        with ExitStack() as stack:
            tap: StderrTap | None = None
            if orders.settings.watch_compilations and any(map(catalog.uses_tensorflow, orders.settings.models)):
                tap = stack.enter_context(StderrTap())
            return await EngineProcess(child, orders, tap).run()

    return run_loop(serve())


class EngineProcess:
    """An engine and its fronts."""

    def __init__(self, child: Child, orders: Orders, xla_events: StderrTap | None) -> None:
        self._child = child
        self._settings = orders.settings
        self._is_beside = orders.is_beside
        self._priority = LowPriority()
        if orders.is_beside or orders.taken_over is not None:
            self._priority.begin()
        self._stopping = Stopping()
        self._metrics = Metrics()
        self._tracing = Tracing.of(orders.settings)
        self._is_due = False
        self._leaving: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._signs: object = None
        self._told: Mapping[str, object] | None = None
        """What the supervisor knows; None until it is to be told of changes."""
        self._gone = tally.NOTHING
        """What fronts that have gone had counted."""
        self._has_started = False
        self._kept = b""
        """What the supervisor has for an engine that follows this one."""
        start, configured = orders.begins_with, grouped(orders.settings.models)
        listings = None if start is None else start.listings
        required: Collection[str] = start.required if start is not None and orders.is_beside else ()
        if start is None and orders.taken_over is not None:
            listings = orders.taken_over.listings(configured)
            required = listings.keys() & orders.taken_over.serving
        # Beside one that serves, what is to be loaded may be tried: it ends nothing but this process.
        tried = _to_load(start) if start is not None and orders.is_beside else frozenset()
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
        )
        repository = self._engine.repository
        self._publisher = Publisher(repository, orders.first_loading)
        self._host = Host(
            self._answer,
            lambda: self._engine.lane_busy_s,
            self._front_has_gone,
            on_linked=self._priority.end if orders.is_beside else lambda: None,
        )
        self._replacement = EngineReplacement(
            repository=repository,
            configured=configured,
            begin=self._begin_successor,
            succeeded=self._be_succeeded,
            check_room=self._check_room,
            pass_news=child.pass_reload,
            always_in_place=orders.settings.swap == "in_place" or orders.settings.version_order == "unload_first",
            changed_ns=0 if start is None else start.changed_ns,
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
        """Serves until a signal, and returns the exit status. Raises ConfigError, and ModelFailed where one does."""
        loop = asyncio.get_running_loop()
        self._child.beat()
        self._stopping.listen()
        loop.add_signal_handler(signal.SIGHUP, self._configuration.request)
        log.info("device: %s", self._engine.device)
        self._engine.repository.announce()  # no front may take a model for one that is not there
        self._publish()
        self._host.listen(socket.socket(fileno=self._child.descriptors[FRONTS]))
        self._child.show_metrics(self._metrics.registry, partial(on_loop, loop, self._take_snapshot))
        looking = in_background(self._look(), self._stopping.crash)
        try:
            if await self._start():
                self._on_loaded()
                self._priority.end()
                self._has_started = True
                self._publish()
                self._tell_ready()
                await self._configuration.follow(
                    self._stopping.begun, on_reload=self._say_no_more, on_reloaded=self._tell_ready
                )
        finally:
            looking.cancel()
            self._leaving.cancel()
            await self._stop()
        return CRASHED if self._stopping.has_crashed else 0

    async def _start(self) -> bool:
        """Loads the models; returns whether it is of use, which it says itself where a model fails that is required."""
        try:
            return await self._engine.start(self._stopping.begun)
        except ModelFailed as error:
            if not self._is_beside:
                raise
            # Not ready, whatever the others do: it takes nobody's place.
            self._child.tell_ready({**self._readiness(), "is_ready": False, "reason": str(error)})
            await self._stopping.begun.wait()
            return False

    async def _begin_successor(self, start: Start) -> Outcome:
        loop = asyncio.get_running_loop()
        told: asyncio.Future[Outcome] = loop.create_future()

        def take(outcome: Outcome) -> None:
            if not told.done():
                told.set_result(outcome)

        def tell(outcome: Mapping[str, Any]) -> None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(take, Outcome(**outcome))

        self._child.ask_for_successor(pickle.dumps(start), tell)
        return await told

    async def _be_succeeded(self) -> None:
        await self._host.succeed()
        self._leaving = asyncio.create_task(self._leave())

    async def _leave(self) -> None:
        """Ends this process once no front needs it any more."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._settings.drain_timeout_s):
                await self._host.drained()
        self._stopping.begun.set()

    def _check_room(self) -> None:
        """Raises ModelFailed where there is no room for another process like this one."""
        taken, free, what = own_bytes(), available_memory_bytes(), "memory"  # it comes to share that of fronts
        if (limit := self._settings.max_resident_bytes) is not None:
            free = min(free, limit - taken)
        if self._engine.device.kind == "gpu":
            levels = [self._engine.gpus.levels()[index] for index in self._engine.device.gpus]
            used = [int(level["memory_used_bytes"]) for level in levels]
            left = [int(level["memory_size_bytes"]) - int(level["memory_used_bytes"]) for level in levels]
            if used and min(left) < max(used):
                taken, free, what = max(used), min(left), "memory of the GPU"
        if taken > free:
            raise ModelFailed(
                f"another process beside the one that serves needs some {taken >> 20} MiB of {what}, and"
                f" {max(0, free) >> 20} MiB are free: set swap: in_place, to change models in the process that serves"
            )

    def _keep(self) -> None:
        """Tells the supervisor what an engine that follows this one is to begin with, where that has changed.

        Not once this one is to end, which unloads all that it has.
        """
        if not self._has_started or self._stopping.begun.is_set():
            return
        if (kept := pickle.dumps(self._replacement.start())) != self._kept:
            self._kept = kept
            self._child.keep(kept)

    def _tell_ready(self) -> None:
        self._told = self._readiness()
        self._child.tell_ready(self._told)

    def _say_no_more(self) -> None:
        """Until `_tell_ready`: the supervisor takes that for the end of a reload."""
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
        """Returns the name, number and reason of each version that failed."""
        index = self._engine.repository.index()
        return [(one.name, one.settings.version, one.reason) for one in index if one.state is State.FAILED]

    async def _stop(self) -> None:
        """Ends what fronts have left: in order, they have ended before, and with them their requests."""
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
        if self._is_due:
            self._publish()  # before the answer, so that a model that was loaded is there for who asked
        return answer

    async def _count(self, *, of_fronts: bool) -> object:
        """Returns what this process has counted of the models, and all fronts if they are wanted too."""
        here = {number: one.telemetry.statistics for number, one in self._publisher.numbered().items()}
        total = tally.tally(self._engine.counted, here, in_flight=0)
        if not of_fronts:
            return total
        return reduce(tally.added, await self._host.count(), tally.added(total, self._gone))

    def _front_has_gone(self, last: Any) -> None:
        versions = self._publisher.numbered()
        there = {(version.name, version.settings.version) for version in versions.values()}
        self._gone = tally.select(tally.added(self._gone, tally.lasting(last)), versions, there)

    async def _profile(self, seconds: float) -> object:
        recording = await self._engine.profile(seconds)
        return [recording.name, recording.size_bytes]

    def _publish_soon(self) -> None:
        """Tells fronts once of all that changes in this turn of the loop."""
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._publish)

    async def _look(self) -> None:
        for look in count(1):
            await asyncio.sleep(LOOK_S)
            if look % COUNT_LOOKS == 0:
                await self._host.count()
            if (self._publisher.signs(), len(self._engine.unexpected)) != self._signs:
                self._publish()

    def _publish(self) -> None:
        self._is_due = False
        self._signs = self._publisher.signs(), len(self._engine.unexpected)
        engine = self._engine
        about = About(self._publisher.catalogue(), engine.device, (*engine.unexpected,), engine.is_watched)
        serving = self._publisher.serving()
        self._host.publish(
            [Hosted(snapshot, served.engine, partial(_enter, served), served.leave) for snapshot, served in serving],
            about,
        )
        self._keep()
        if self._told is not None and self._told != self._readiness():
            self._tell_ready()

    def _take_snapshot(self) -> None:
        self._engine.see_versions()
        self._metrics.read_gauges()


def _to_load(start: Start) -> frozenset[bytes]:
    return frozenset(
        key_of(settings)
        for model, ended in start.listings.values()
        for number, settings in model.versions.items()
        if number not in ended
    )


def _enter(served: Served) -> None:
    """Counts a front as a request, so that a version is not ended before each has answered what it has."""
    served.calls += 1
