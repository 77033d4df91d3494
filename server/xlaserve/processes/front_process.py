"""The process of a front: it serves clients, and has engines in other processes run the models."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import pickle
import socket
from collections.abc import Coroutine, Iterable
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

from prometheus_client.core import Metric

from xlaserve.admission.shared_counts import SharedCounts
from xlaserve.config import Settings
from xlaserve.engine.memory import keep_freed_memory, resident_bytes
from xlaserve.models.triton_metrics import triton_metrics
from xlaserve.models.version import Version
from xlaserve.processes.event_loop import Stopping, in_background, run_loop
from xlaserve.processes.front import Front
from xlaserve.processes.link.front_end.remote_model import RemoteModel
from xlaserve.processes.link.spread import Spread
from xlaserve.processes.mirror import Mirror
from xlaserve.processes.passed_changes import OtherServer, taking
from xlaserve.processes.remote_engines import RemoteEngines
from xlaserve.processes.spans import Tracing
from xlaserve.processes.supervision.child import Child
from xlaserve.telemetry.gpus import Gpus
from xlaserve.telemetry.http import on_loop
from xlaserve.telemetry.metrics import Metrics, gauge_family
from xlaserve.wire.shared.shared_regions import Regions

USAGE: Final = "usage"
"""Name of the descriptor of the counts that all fronts share; see `SharedCounts`."""
REGIONS: Final = "regions"
"""Name of the descriptor of the file of the regions of shared memory that clients have registered."""
CHANGES: Final = "changes"
"""Name of the descriptor of the socket where another server makes changes of models."""
CRASHED: Final = 1
VERSION: Final = ("model", "version")
AGE_JITTER: Final = 1.1
"""Connections end up to a tenth later than their age says (gRPC's proposal A9)."""
LEAVING_LATER_S: Final = 1.0
SHARING_S: Final = 10.0
"""A front that takes another server's place, which has passed its connections on, has them spread over all fronts again
this long after it began to listen: by then nobody else listens."""

log = logging.getLogger(__name__)


class FrontOrders(NamedTuple):
    """The orders that a front is started with; plain data, which can be pickled."""

    settings: Settings
    engines: tuple[Path, ...]
    """The sockets of its engines."""
    successor: Path
    """The socket of the server that has taken this one's place, which makes changes of models from then on."""
    metrics: str | None
    """HOST:PORT of the metrics of all processes; None if they are off."""
    number: int
    """Number of the front, from 1. The first one logs the addresses of the server."""
    waits: bool = False
    """Whether the front listens only once models serve: the server before this one serves until then."""


def leaving_s(settings: Settings) -> float:
    """Returns the seconds within which clients have left a front that ends connections after a call or at their age."""
    return AGE_JITTER * (settings.effective_max_connection_age_s or 0) + LEAVING_LATER_S


def run(child: Child) -> int:
    """Serves clients until a signal, and returns the exit status."""
    orders: FrontOrders = pickle.loads(child.payload)
    return run_loop(_serve(child, orders))


async def _serve(child: Child, orders: FrontOrders) -> int:
    settings, metrics, stopping, tracing = orders.settings, Metrics(), Stopping(), Tracing.of(orders.settings)
    child.beat()
    stopping.listen()
    stopping.listen_for_leave()
    mirror = Mirror(metrics)
    usage = SharedCounts(child.descriptors[USAGE], settings.front_processes, orders.number - 1)
    engines = RemoteEngines(orders.engines, mirror, metrics, usage, OtherServer(orders.successor).make)
    changes = taking(engines)
    following = in_background(engines.follow(), stopping.crash)
    try:
        if not await _until(engines.known(), stopping.begun):
            return 0
        front = Front(
            settings,
            engines,
            metrics,
            stopping=stopping.begun,
            on_crash=stopping.crash,
            gpus=Gpus(None),
            tracing=tracing,
            metrics_elsewhere=orders.metrics,
            refresh=metrics.read_gauges,
            usage=usage,
            regions=Regions(child.descriptors[REGIONS]),
            resident=lambda: resident_bytes() - engines.spare_bytes,
            supervisor=os.getppid(),
            is_supervised=lambda: child.is_supervised,
        )
        engines.serve(front.calls)
        mirror.follow(front.health.refresh)
        child.follow_supervision(front.health.refresh)
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
            await front.open()
            if orders.number == 1:
                front.ports.announce()
            if orders.waits:
                asyncio.get_running_loop().call_later(SHARING_S, front.ports.share)
            gc.freeze()  # objects that are never freed: the collector, which pauses the event loop, skips them
            keep_freed_memory()
            changes.listen(socket.socket(fileno=child.descriptors[CHANGES]))
            child.tell_ready(front.ports.addresses())
            if await _until(stopping.leaving.wait(), stopping.begun):
                await front.leave(stopping.begun, leaving_s(settings))
        finally:
            is_serving = mirror.is_ready and not stopping.has_crashed and not stopping.leaving.is_set()
            mirror.stop()
            await front.drain(stopping.draining, settings.shutdown_delay_s if is_serving else 0)
            await _end(following)  # requests that have not finished in time fail with the link to the engine
            await changes.close()
            await front.close()
            if tracing is not None:
                await asyncio.to_thread(tracing.close)
            log.info("stopped")
    finally:
        await _end(following)
    return CRASHED if stopping.has_crashed else 0


def _taken_in(versions: Iterable[Version]) -> Iterable[Metric]:
    """Returns gauges of the images that this front has accepted and not sent to an engine, whose gauges are added."""
    images = gauge_family("xlaserve_in_flight_images", "Images that are decoded, wait or run.", VERSION)
    size_bytes = gauge_family("xlaserve_in_flight_bytes", "Bytes of those images, encoded and decoded.", VERSION)
    for version in versions:
        if version.served is not None and isinstance(spread := version.served.engine, Spread):
            labels = version.name, version.settings.version
            parts = [part for part in spread.parts if isinstance(part, RemoteModel)]
            images.add_metric(labels, sum(part.images - part.submitted_images for part in parts))
            size_bytes.add_metric(labels, sum(part.admission.size_bytes - part.submitted_bytes for part in parts))
    return images, size_bytes


async def _end(following: asyncio.Task[None]) -> None:
    following.cancel()
    await asyncio.wait([following])


async def _until(happens: Coroutine[Any, Any, object], stopping: asyncio.Event) -> bool:
    """Waits until `happens` returns; returns False if `stopping` is set first."""
    waiting = [asyncio.create_task(happens), asyncio.create_task(stopping.wait())]
    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    for task in waiting:
        task.cancel()
    return not stopping.is_set()
