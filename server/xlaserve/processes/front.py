"""The front of a server: ports, identity, limits, requests in flight, health and metrics."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import lru_cache
from typing import Final

from prometheus_client.core import Metric

from xlaserve.admission.authenticator import Authenticator
from xlaserve.admission.calls import Admissions
from xlaserve.admission.certificates import Certificates
from xlaserve.admission.hosts import Hosts
from xlaserve.admission.message_memory import MessageMemory
from xlaserve.admission.shared_counts import Kind, SharedCounts
from xlaserve.config import Settings
from xlaserve.engine.memory import machine_memory_bytes, resident_bytes
from xlaserve.images.decoder import ImageLimits
from xlaserve.pipeline.pipeline import Pipeline
from xlaserve.processes.event_loop import in_background
from xlaserve.processes.memory_bounds import MemoryBounds, left_bytes
from xlaserve.processes.ports import Ports
from xlaserve.processes.spans import Tracing
from xlaserve.telemetry.access_log import AccessLog
from xlaserve.telemetry.gpus import Gpus
from xlaserve.telemetry.http import HttpEndpoint
from xlaserve.telemetry.metrics import Metrics, gauge
from xlaserve.wire.grpc.admin import Admin
from xlaserve.wire.grpc.grpc_server import GrpcServer, Services
from xlaserve.wire.grpc.health_service import Health
from xlaserve.wire.grpc.open_inference_service import OpenInference
from xlaserve.wire.grpc.open_streams import OpenStreams
from xlaserve.wire.grpc.tensorflow_serving_service import ModelService, PredictionService
from xlaserve.wire.grpc.vision_service import Vision
from xlaserve.wire.http import metrics_method as shown_metrics
from xlaserve.wire.http import routes
from xlaserve.wire.http.cors import with_cors
from xlaserve.wire.http.http_calls import CallsIn
from xlaserve.wire.http.http_server import HttpServer
from xlaserve.wire.http.open_inference_methods import OpenInference as HttpOpenInference
from xlaserve.wire.http.status_pages import Status
from xlaserve.wire.http.tensorflow_serving_methods import TensorflowServing as HttpTensorflowServing
from xlaserve.wire.http.vision_methods import Vision as HttpVision
from xlaserve.wire.shared.backend import Backend
from xlaserve.wire.shared.call import Calls
from xlaserve.wire.shared.models import Models
from xlaserve.wire.shared.overview import Overview
from xlaserve.wire.shared.shadow import Shadows
from xlaserve.wire.shared.shared_memory import SharedMemory
from xlaserve.wire.shared.shared_regions import Regions

log = logging.getLogger(__name__)

QUIET_S: Final = 0.2
"""The ports close once no request has come for this time, or after FLUSH_S."""
FLUSH_S: Final = 1.0
"""The longest time for which requests are refused once all accepted ones are answered, and after that the longest time
in which the last answers are sent. Idle streams end with it."""
BEGUN_LOOK_S: Final = 0.02
"""Interval at which a front that drains looks for requests that began before and still arrive."""
LEAVING_LOOK_S: Final = 0.5
"""Interval at which a front that leaves looks for clients: it lists all its sockets."""


class Front:
    """Serves the models of `backend` to clients. `stopping` is set once the server is to end.

    `on_crash` is called when the server can't go on and has to end.

    `usage` counts what all fronts of the server have in use, and `regions` has the shared memory that clients have
    registered. `supervisor` is the number of the process that has started the fronts and the engines; `is_supervised`
    returns whether it still replaces processes that end.
    """

    def __init__(
        self,
        settings: Settings,
        backend: Backend,
        metrics: Metrics,
        *,
        stopping: asyncio.Event,
        on_crash: Callable[[], None],
        gpus: Gpus,
        tracing: Tracing | None = None,
        telemetry: HttpEndpoint | None = None,
        metrics_elsewhere: str | None = None,
        refresh: Callable[[], None],
        usage: SharedCounts | None = None,
        regions: Regions | None = None,
        resident: Callable[[], int] = resident_bytes,
        supervisor: int | None = None,
        is_supervised: Callable[[], bool] = lambda: True,
    ) -> None:
        usage = self._usage = usage or SharedCounts()
        self._regions = regions
        self._supervisor = supervisor
        self._is_supervised = is_supervised
        self._settings = settings
        self._backend = backend
        self._metrics = metrics
        self._stopping = stopping
        self._on_crash = on_crash
        self._tracer = None if tracing is None else tracing.tracer
        self._pipeline = Pipeline(settings, usage=usage)
        admissions = self._admissions = Admissions.of(settings, usage)
        self._shadows = Shadows(
            backend.directory, ImageLimits.of(settings), metrics, held=usage.amount(Kind.SHADOW_BYTES)
        )
        self.calls = Calls(
            backend.directory,
            metrics,
            self._pipeline,
            self._shadows,
            AccessLog(settings.access_log),
            is_tracing=tracing is not None,
            usage=usage,
            admission=admissions.calls,
        )
        self._streams = OpenStreams()
        self.health = Health(self.is_ready, backend.directory.serving, self._streams, is_supervised)
        self._message_memory = MessageMemory(
            settings.max_inflight_bytes,
            settings.max_message_bytes,
            settings.max_resident_bytes or machine_memory_bytes(),
            resident,
            usage,
            left=left_bytes,
        )
        self._memory_bounds = MemoryBounds(settings, self._message_memory, self._pipeline.memory)
        self._following: asyncio.Task[None] | None = None
        self._authenticator = Authenticator(settings.access)
        self._certificates = _certificates(settings)
        models = Models(backend, settings.has_model_control, settings.max_message_bytes)
        self.ports = Ports(
            settings,
            self._make_grpc_server(admissions, models, usage),
            self._make_http_server(admissions, models, gpus, refresh, metrics_elsewhere),
            telemetry,
            self._authenticator,
            self._certificates,
            metrics_elsewhere,
        )
        metrics.add_gauges(self._gauges)

    def _make_grpc_server(self, admissions: Admissions, models: Models, usage: SharedCounts) -> GrpcServer:
        settings, calls = self._settings, self.calls
        shared_memory = None
        if settings.shared_memory:
            shared_memory = SharedMemory(
                settings.max_message_bytes, settings.max_inflight_bytes, self._message_memory, regions=self._regions
            )
        return GrpcServer(
            settings,
            Services(
                OpenInference(calls, models, self._streams, shared_memory, self._is_supervised),
                Vision(
                    calls,
                    models,
                    settings.max_message_bytes,
                    count_fronts=lambda: usage.serving if settings.front_processes else 0,
                ),
                PredictionService(calls, models),
                ModelService(models),
            ),
            self.health,
            Admin(self._backend) if settings.has_admin else None,
            message_memory=self._message_memory,
            admissions=admissions,
            authenticator=self._authenticator,
            certificates=self._certificates,
            metrics=self._metrics,
            on_failed=calls.note_failure,
            on_crash=self._on_crash,
            tracer=self._tracer,
            headers=_Headers(usage),
        )

    def _make_http_server(
        self,
        admissions: Admissions,
        models: Models,
        gpus: Gpus,
        refresh: Callable[[], None],
        elsewhere: str | None,
    ) -> HttpServer:
        settings, calls = self._settings, self.calls
        incoming = CallsIn(
            admissions,
            self._message_memory,
            settings.max_message_bytes,
            self._metrics.count_refused,
            self._authenticator,
            on_failed=calls.note_failure,
            tracer=self._tracer,
        )
        overview = Overview(
            calls,
            self._backend,
            is_ready=self.is_ready,
            addresses=lambda: self.ports.addresses(),  # noqa: PLW0108 - they are made later
            supervisor=self._supervisor,
        )
        methods = routes.operations(
            HttpOpenInference(calls, models, settings.cors_origins, self._is_supervised),
            HttpVision(calls, settings.max_message_bytes),
            HttpTensorflowServing(calls, models),
            Status(overview, models, gpus),
            shown_metrics.relayed(elsewhere) if elsewhere else shown_metrics.shown(self._metrics.registry, refresh),
        )
        hosts = Hosts.of(settings, is_locked=self._authenticator.is_locked)
        application = with_cors(routes.application(incoming, methods, hosts), settings.cors_origins)
        return HttpServer(settings, application, self._certificates, calls.note_failure)

    def is_ready(self) -> bool:
        """Whether models serve and the server is not to end."""
        return self._backend.directory.is_ready and not self._stopping.is_set()

    async def open(self) -> None:
        """Opens the ports, until `close`. Raises ConfigError."""
        self._following = in_background(self._memory_bounds.follow())
        await self.ports.open()

    async def leave(self, ending: asyncio.Event, longest_s: float) -> None:
        """Leaves new clients to another process, and serves the present ones until their connections have ended.

        Returns after `longest_s` at the latest, or once `ending` is set.
        """
        log.info("leaving: %d connections, %d requests in flight", self.ports.connections, self.calls.in_flight)
        await self.ports.leave(self._usage.serving)
        with suppress(TimeoutError):
            async with asyncio.timeout(longest_s):
                while self.ports.connections and not ending.is_set():
                    with suppress(TimeoutError):
                        await asyncio.wait_for(ending.wait(), LEAVING_LOOK_S)

    async def drain(self, draining: asyncio.Event, delay_s: float) -> None:
        """Finishes requests that have begun and refuses new ones: first health says so, then calls. Then ends shadows.

        Before that, health says so and calls are served for `delay_s`, or until `draining` is set, which it sets.
        """
        self.health.stop()
        if delay_s:
            log.info("stopping: still serving for %g s, or until the next signal", delay_s)
            with suppress(TimeoutError):
                async with asyncio.timeout(delay_s):
                    await draining.wait()
        draining.set()
        log.info("draining: %d requests in flight", self.calls.in_flight)
        timeout_s = self._settings.drain_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                await self._finish()
        except TimeoutError:
            log.warning(
                "%d requests, and those that still arrive, did not finish in %g s", self.calls.in_flight, timeout_s
            )
        await self._shadows.stop()

    async def _finish(self) -> None:
        """Returns once all requests are answered of which some part had arrived at the time of the call."""
        calls = self._admissions.calls
        calls.drain()
        self.ports.http.drain()
        await self.calls.drain()
        while calls.has_transfers or self.ports.http.has_begun:
            await asyncio.sleep(BEGUN_LOOK_S)
            await self.calls.drain()

    async def close(self) -> None:
        """Closes the ports of gRPC and HTTP, once clients have been refused for a while."""
        # An error says more to clients than a connection that closes.
        with suppress(TimeoutError):
            async with asyncio.timeout(FLUSH_S):
                await self.calls.quiet(QUIET_S)
        await self._streams.end(FLUSH_S)
        await self.ports.stop_calls(FLUSH_S)
        if self._following is not None:
            self._following.cancel()
        self._pipeline.stop()
        self.calls.access_log.flush()

    def _gauges(self) -> Iterable[Metric]:
        yield gauge("xlaserve_in_flight_requests", "Requests accepted and not yet answered.", self.calls.in_flight)
        yield gauge(
            "xlaserve_in_flight_message_bytes",
            "Bytes of messages that arrived and are still held.",
            self._message_memory.held_bytes,
        )
        yield gauge(
            "xlaserve_in_flight_message_bytes_limit",
            "As many of those bytes there may be: `max_inflight_bytes`, or less where memory has no room for them.",
            self._message_memory.max_bytes,
        )
        yield gauge(
            "xlaserve_certificate_expiry_timestamp_seconds",
            "When the server's certificate ends, in seconds since the epoch; absent without TLS.",
            self._certificates.pem.expiry_s if self._certificates is not None else None,
        )
        yield gauge("xlaserve_ready", "1 once start-up has finished and at least one model serves.", self.is_ready())


class _Headers:
    """Headers of answers that name the front, by which our own clients spread their calls over fronts."""

    def __init__(self, usage: SharedCounts) -> None:
        self._usage = usage
        self._made = lru_cache(self._make)

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return iter(self._made(self._usage.serving))

    def _make(self, fronts: int) -> tuple[tuple[str, str], ...]:
        return (("xlaserve-front", f"{self._usage.front + 1}/{fronts}"),) if fronts > 1 else ()


def _certificates(settings: Settings) -> Certificates | None:
    certificate, key = settings.tls_certificate, settings.tls_key
    return None if certificate is None or key is None else Certificates(certificate, key, settings.tls_client_ca)
