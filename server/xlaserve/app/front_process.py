"""A process that speaks to clients, and has another one run the models."""

from __future__ import annotations

import asyncio
import gc
import logging
import pickle
from collections.abc import Collection, Coroutine, Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

from prometheus_client.core import Metric

from xlaserve.app.event_loop import run_loop
from xlaserve.app.front import Front
from xlaserve.app.stopping import Stopping
from xlaserve.app.tracing import Tracing
from xlaserve.config import Settings
from xlaserve.engine.memory import keep_freed_memory
from xlaserve.errors import EngineLost, ModelNotFound
from xlaserve.inspection.profiler import Recording
from xlaserve.link import front as link
from xlaserve.model.mirror import Mirror
from xlaserve.model.published import About
from xlaserve.model.triton_metrics import triton_metrics
from xlaserve.model.version import Served, Version
from xlaserve.processes.child import Child
from xlaserve.protocol.call import Calls
from xlaserve.protocol.shared_regions import Regions
from xlaserve.runtimes.tf.device import Device
from xlaserve.runtimes.watch.xla_log import XlaCompilation
from xlaserve.telemetry import tally
from xlaserve.telemetry.failures import Failure, Failures
from xlaserve.telemetry.gpus import Gpus
from xlaserve.telemetry.http import on_loop
from xlaserve.telemetry.metrics import Metrics, gauge_family
from xlaserve.telemetry.model import Statistics
from xlaserve.telemetry.tally import Counted
from xlaserve.usage import Usage

USAGE: Final = "usage"
"""The descriptor of the table of what all fronts have in use."""
REGIONS: Final = "regions"
"""The descriptor of the file of the regions of shared memory that clients have registered."""
CRASHED: Final = 1
VERSION: Final = ("model", "version")
RETRY_S: Final = 0.05
"""Between attempts to reach an engine that is not there."""
AGE_JITTER: Final = 1.1
"""Connections end up to a tenth later than their age says (gRPC's proposal A9)."""
LEAVING_LATER_S: Final = 1.0
FAILED_RETRY_S: Final = 1.0
"""Between attempts where something else is wrong: no file descriptors are left, say."""

log = logging.getLogger(__name__)


class Orders(NamedTuple):
    """What a front is started with."""

    settings: Settings
    engine: Path
    """The socket of its engine."""
    metrics: str | None
    """HOST:PORT where the metrics of all processes are shown."""
    number: int
    """Which front it is, from 1. The first says where it listens."""
    waits: bool = False
    """Whether it listens only once models serve: others serve until then."""


class RemoteEngine:
    """An engine in another process, which may end and be followed by another. It is a `protocol.backend.Backend`."""

    def __init__(self, address: Path, arena_bytes: int, directory: Mirror, metrics: Metrics) -> None:
        self.directory = directory
        self._metrics = metrics
        self.calls: Calls | None = None
        """What is under way here and has failed, once this front takes calls."""
        self._own_in_flight = 0
        """At the time when this front was last counted."""
        self._tally: tally.Json = tally.NOTHING
        """Of all processes."""
        self._address = address
        self._arena_bytes = arena_bytes
        self._link: link.EngineLink | None = None
        """To the engine that requests are brought to."""
        self._leaving: set[asyncio.Task[None]] = set()
        """Of engines that another has taken the place of, until what they have is answered."""
        self._known = asyncio.Event()
        self.device = Device("cpu", "unknown", 0, 0)
        self.unexpected: Collection[XlaCompilation] = ()
        self.is_watched: bool | None = None

    @property
    def lane_busy_s(self) -> float:
        """Time for which lanes were in use, all together, up to a second ago."""
        told = None if self._link is None else self._link.about
        return cast(float, told) if told is not None else 0.0

    async def known(self) -> None:
        """Returns once an engine has said what it is."""
        await self._known.wait()

    async def follow(self) -> None:
        """Links to the engine, to one that takes its place, and to the next one when it has ended, for ever."""
        try:
            while True:
                linked = await self._reached()
                if not await linked.superseded():
                    log.warning("the engine is lost: %s", await linked.lost())
                    self.directory.lose()
        finally:
            for leaving in self._leaving:
                leaving.cancel()
            if self._link is not None:
                self._link.close()
            self.directory.lose()

    async def _reached(self) -> link.EngineLink:
        """Returns a new link to the engine, once there is one."""
        while True:
            try:
                linked = await link.connect(
                    self._address, self._arena_bytes, on_models=self._on_models, tally=self._own_tally
                )
            except (EngineLost, ConnectionError) as error:
                log.debug("no engine: %r", error)
                if self._link is None or self._link.is_lost:
                    self.directory.lose()  # it may have ended right after it had said what it has
                await asyncio.sleep(RETRY_S)
            except TimeoutError:
                log.info("the engine does not answer yet")  # importing libraries may take it long
                await asyncio.sleep(RETRY_S)
            except OSError as error:
                log.warning("the engine can't be reached, next attempt in %g s: %s", FAILED_RETRY_S, error)
                await asyncio.sleep(FAILED_RETRY_S)
            else:
                log.debug("linked to the engine")
                return linked

    def _on_models(self, linked: link.EngineLink) -> None:
        before, self._link = self._link, linked
        if before is not None and before is not linked and not before.is_lost:
            leaving = asyncio.create_task(_leave(before, self.directory.in_use()))
            self._leaving.add(leaving)
            leaving.add_done_callback(self._leaving.discard)
        about = cast(About, linked.details)
        self.device, self.unexpected, self.is_watched = about.device, about.unexpected, about.is_watched
        self.directory.take(about.catalogue, linked.models)
        self._known.set()
        if before is not None and before is not linked:
            before.move()

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

    def failures(self, here: Failures) -> Iterable[Failure]:
        """Returns the last requests that failed here, and as of the last `count` at all fronts, the newest first."""
        failures = {*tally.failures_of(self._tally), *here}
        return sorted(failures, key=lambda failure: failure.at_s, reverse=True)

    async def count(self) -> None:
        """Adds up what all processes have counted until now. Without an engine, nothing changes."""
        with suppress(EngineLost):
            self._tally = await self._linked.ask("count")

    def _own_tally(self) -> object:
        calls = self.calls
        self._own_in_flight = 0 if calls is None else calls.in_flight
        numbered = self.directory.numbered()
        here = {number: version.telemetry.statistics for number, version in numbered.items()}
        failures = None if calls is None else calls.failures
        return tally.tally(Counted.here(self._metrics), here, self._own_in_flight, failures)

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
        """Does as `Profiler.record`."""
        return Recording(*await self._linked.ask("profile", seconds=seconds))

    async def _change(self, name: str, question: str, **arguments: object) -> None:
        while True:
            linked = self._linked
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

    @property
    def _linked(self) -> link.EngineLink:
        if self._link is None:
            raise EngineLost("the process that runs the models is starting")
        return self._link


def leaving_s(settings: Settings) -> float:
    """Returns within what time all clients go elsewhere whose connections end at their next call, or for their age."""
    return AGE_JITTER * (settings.effective_max_connection_age_s or 0) + LEAVING_LATER_S


def run(child: Child) -> int:
    """Serves clients until a signal, and returns the exit status."""
    orders: Orders = pickle.loads(child.payload)
    return run_loop(_serve(child, orders))


async def _serve(child: Child, orders: Orders) -> int:
    settings, metrics, stopping, tracing = orders.settings, Metrics(), Stopping(), Tracing.of(orders.settings)
    stopping.listen()
    stopping.listen_for_leave()
    mirror = Mirror(metrics)
    engine = RemoteEngine(orders.engine, 2 * settings.max_queue_bytes, mirror, metrics)
    following = asyncio.create_task(engine.follow())
    try:
        if not await _until(engine.known(), stopping.begun):
            return 0
        front = Front(
            settings,
            engine,
            metrics,
            stopping=stopping.begun,
            on_crash=stopping.crash,
            gpus=Gpus(None),
            tracing=tracing,
            metrics_elsewhere=orders.metrics,
            refresh=metrics.read_gauges,
            usage=Usage(child.descriptors[USAGE], settings.front_processes, orders.number - 1),
            regions=Regions(child.descriptors[REGIONS]),
        )
        engine.calls = front.calls
        mirror.on_change = front.health.refresh
        if orders.waits and not await _until(mirror.ready(), stopping.begun):
            return 0
        metrics.add_gauges(lambda: _taken_in(mirror.versions()))
        if settings.triton_metrics:
            metrics.add_gauges(lambda: triton_metrics(mirror.versions(), metrics, has_queues=False))

        def refresh() -> None:
            mirror.see_versions()
            metrics.read_gauges()

        child.show_metrics(metrics.registry, partial(on_loop, asyncio.get_running_loop(), refresh))
        try:
            await front.ports.open()
            if orders.number == 1:
                front.ports.announce()
            gc.freeze()  # what stays for ever; the collector pauses the event loop
            keep_freed_memory()
            child.tell_ready(front.ports.addresses())
            if await _until(stopping.leaving.wait(), stopping.begun):
                await front.leave(stopping.begun, leaving_s(settings))
        finally:
            is_serving = mirror.is_ready and not stopping.has_crashed and not stopping.leaving.is_set()
            mirror.is_stopping = True
            await front.drain(stopping.draining, settings.shutdown_delay_s if is_serving else 0)
            await _end(following)  # what has not finished in time fails with the link to the engine
            await front.close()
            if tracing is not None:
                await asyncio.to_thread(tracing.close)
            log.info("stopped")
    finally:
        await _end(following)
    return CRASHED if stopping.has_crashed else 0


def _taken_in(versions: Iterable[Version]) -> Iterable[Metric]:
    """Yields what this front has taken in and the engine does not have, which shows the rest: both are added up."""
    images = gauge_family("xlaserve_in_flight_images", "Images that are decoded, wait or run.", VERSION)
    size_bytes = gauge_family("xlaserve_in_flight_bytes", "Bytes of those images, encoded and decoded.", VERSION)
    for version in versions:
        if version.served is not None and isinstance(engine := version.served.engine, link.RemoteModel):
            labels, taken = (version.name, version.settings.version), engine.admission
            images.add_metric(labels, taken.images - engine.submitted_images)
            size_bytes.add_metric(labels, taken.size_bytes - engine.submitted_bytes)
    return images, size_bytes


async def _leave(linked: link.EngineLink, in_use: Collection[Served]) -> None:
    """Ends the link to an engine once what it has of this front is answered."""
    try:
        await asyncio.gather(*(served.left() for served in in_use))
        await linked.answered()
    finally:
        linked.close()


async def _end(following: asyncio.Task[None]) -> None:
    following.cancel()
    await asyncio.wait([following])


async def _until(happens: Coroutine[Any, Any, object], stopping: asyncio.Event) -> bool:
    """Waits until it happens; returns False where the process is to end first."""
    waiting = [asyncio.create_task(happens), asyncio.create_task(stopping.wait())]
    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    for task in waiting:
        task.cancel()
    return not stopping.is_set()
