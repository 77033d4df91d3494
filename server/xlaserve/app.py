"""The one place that builds, warms, serves, drains and stops."""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import os
import signal
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path
from typing import Final

from prometheus_client.core import Metric

from xlaserve.access.certificates import Certificates
from xlaserve.access.door import Door
from xlaserve.cache.cache import CompileCache
from xlaserve.config import ModelSettings, Settings
from xlaserve.engine.batching.lanes import Lanes
from xlaserve.engine.batching.worker import Worker
from xlaserve.engine.memory import keep_freed_memory, usable_memory_bytes
from xlaserve.engine.warmup.ledger import Entry
from xlaserve.errors import ConfigError, ModelFailed
from xlaserve.http import metrics, routes
from xlaserve.http.calls import CallsIn
from xlaserve.http.cors import with_cors
from xlaserve.http.open_inference import OpenInference as HttpOpenInference
from xlaserve.http.server import HttpServer
from xlaserve.http.status import Status
from xlaserve.http.tensorflow_serving import TensorflowServing as HttpTensorflowServing
from xlaserve.http.vision import Vision as HttpVision
from xlaserve.image import ImageLimits
from xlaserve.inspection.profiler import Profiler
from xlaserve.model import catalog, gauges
from xlaserve.model.changes import Stop
from xlaserve.model.loader import Loader
from xlaserve.model.poll import Poll
from xlaserve.model.preparer import Preparer
from xlaserve.model.repository import Repository
from xlaserve.model.triton_metrics import triton_metrics
from xlaserve.model.version import Version
from xlaserve.pipeline import Pipeline
from xlaserve.ports import Ports
from xlaserve.protocol.admission import Admissions
from xlaserve.protocol.call import Calls
from xlaserve.protocol.intake import Intake
from xlaserve.protocol.models import Models
from xlaserve.protocol.overview import Overview
from xlaserve.protocol.shadow import Shadows
from xlaserve.protocol.shared_memory import SharedMemory
from xlaserve.ready_file import ReadyFile
from xlaserve.rpc.admin import Admin
from xlaserve.rpc.health import Health
from xlaserve.rpc.open_inference import OpenInference
from xlaserve.rpc.open_streams import OpenStreams
from xlaserve.rpc.server import GrpcServer, Services
from xlaserve.rpc.tensorflow_serving import ModelService, PredictionService
from xlaserve.rpc.vision import Vision
from xlaserve.runtimes.tf import persistent_cache
from xlaserve.runtimes.tf.device import Device, configure
from xlaserve.runtimes.watch.compile_watch import CompileWatch
from xlaserve.runtimes.watch.stderr_tap import StderrTap
from xlaserve.runtimes.watch.xla_log import XlaCompilation
from xlaserve.service_manager import ServiceManager
from xlaserve.telemetry import gpus, log_writer
from xlaserve.telemetry.access_log import AccessLog
from xlaserve.telemetry.departures import Departures
from xlaserve.telemetry.http import HttpEndpoint, on_loop
from xlaserve.telemetry.metrics import EXPECTED, SERVING, Metrics, build_info, counter, gauge
from xlaserve.telemetry.tracing import Tracer

log = logging.getLogger(__name__)

QUIET_S: Final = 0.2
"""The port closes once no request came for this time, or after FLUSH_S."""
FLUSH_S: Final = 1.0
"""The longest time that requests are refused once all accepted ones are answered, and then the longest that the last
answers may take to leave. Idle streams end with it."""
SECOND_SIGNAL_S: Final = 0.5
"""A signal that comes sooner after another is the same one: supervisors send it to a process and to its group."""
LAST_WORDS_S: Final = 0.2
"""How long the log may take to be written where it stops at once."""
RESIDENT_SHARE: Final = 0.8
"""Share of the usable memory that `max_resident_bytes` is by default."""
CRASHED: Final = 1
PROFILES: Final = Path("xlaserve-profiles")


class App:
    """A server: build it on a running event loop, then `run` it.

    `read_settings` reads the configuration again, on a thread, for a load and on SIGHUP. `on_record` is called with
    each program that warm-up compiled, on the compiling thread; `on_loaded` once every model was loaded or failed.
    `xla_events` is entered already.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        read_settings: Callable[[], Settings] | None = None,
        on_record: Callable[[Entry], None] = lambda entry: None,
        on_loaded: Callable[[], None] = lambda: None,
        xla_events: StderrTap | None = None,
    ) -> None:
        self._settings = settings
        self._read_settings = read_settings or (lambda: settings)
        self._on_loaded = on_loaded
        self._stopping = asyncio.Event()
        self._draining = asyncio.Event()
        """Set once it refuses new requests, or is about to."""
        self._has_news = asyncio.Event()
        """Set when the configuration is to be read again."""
        self._has_crashed = False
        self._service_manager = ServiceManager()
        self._last_signal_at = -math.inf
        self._metrics = Metrics()
        self._gpus = gpus.of_machine()
        self._has_tensorflow = any(map(catalog.uses_tensorflow, settings.models))
        self._cache = self._open_cache()
        self.device: Device = configure(settings, self._has_tensorflow)
        self._lanes = Lanes(self.device.lanes, self.device.count)
        if self._cache and self.device.replicas:
            log.warning("compile_cache: programs for several GPUs are not kept, each start compiles them")
        self._close_tracing: Callable[[], None] = lambda: None
        self._tracer = self._make_tracer() if settings.tracing else None
        worker = Worker(self.device.lanes, self.device.count)
        self._watch = CompileWatch(self._on_compiled, worker.is_lane)
        self._is_watching = xla_events is not None
        if xla_events is not None:
            xla_events.restore_environment()
            xla_events.listen(self._watch.read)
        self._departures = Departures(self._metrics.forget)
        self.repository = Repository(
            settings=settings,
            loader=self._make_loader(worker),
            read_models=lambda: self._read_settings().models,
            metrics=self._metrics,
            on_change=self._on_change,
            on_record=on_record,
        )
        self._pipeline = Pipeline(settings)
        self._shadows = Shadows(self.repository, ImageLimits.of(settings), self._metrics)
        log_of_requests = AccessLog(settings.access_log)
        self._calls = Calls(
            self.repository,
            self._metrics,
            self._pipeline,
            self._shadows,
            log_of_requests,
            is_tracing=self._tracer is not None,
        )
        self._streams = OpenStreams()
        self._health = Health(self._is_ready, self.repository.serving, self._streams)
        self._intake = Intake(
            settings.max_inflight_bytes,
            settings.max_message_bytes,
            settings.max_resident_bytes or int(usable_memory_bytes() * RESIDENT_SHARE),
        )
        self._door = Door(settings.access)
        self._certificates = _certificates(settings)
        admissions, models = Admissions.of(settings), Models(self.repository, self.device, settings.has_model_control)
        self._ports = Ports(
            settings,
            self._make_grpc_server(admissions, models),
            self._make_http_server(admissions, models),
            self._make_telemetry(),
            self._door,
            self._certificates,
        )
        self._ready_file = ReadyFile(settings.ready_file)
        self._metrics.add_gauges(self._gauges)
        self._metrics.registry.register(self._gpus)
        self._take_snapshot()

    def _open_cache(self) -> CompileCache | None:
        """Must come before TensorFlow is imported."""
        settings = self._settings
        if not self._has_tensorflow:
            return None
        persistent_cache.set_environment(has_all_compiled=settings.compile_cache is not None)
        if settings.compile_cache is None:
            return None
        return CompileCache(settings.compile_cache, read_only=settings.compile_cache_read_only)

    def _make_tracer(self) -> Tracer:
        """Raises ConfigError."""
        try:
            from xlaserve.telemetry.otlp import Exporter  # noqa: PLC0415 - an extra
        except ImportError:
            raise ConfigError("tracing: it needs the extra otel: pip install 'xlaserve[otel]'") from None
        exporter = Exporter(self._settings.trace_endpoint)
        self._close_tracing = exporter.close
        return Tracer(self._settings.trace_sample_ratio, exporter.send)

    def _make_loader(self, worker: Worker) -> Loader:
        settings, device, stop = self._settings, self.device, Stop()
        has_preparer = self._has_tensorflow and settings.load_process and device.kind == "cpu"
        return Loader(
            settings=settings,
            load_model=self._load_model,
            lanes=self._lanes,
            worker=worker,
            expecting=self._watch.expecting,
            on_crash=self._crash,
            on_traced=None if self._tracer is None else self._tracer.batch_ran,
            preparer=Preparer(settings, device, stop, self._cache) if has_preparer else None,
            stop=stop,
            has_tf32=device.tf32,
            on_cpu=device.kind == "cpu",
        )

    def _make_grpc_server(self, admissions: Admissions, models: Models) -> GrpcServer:
        settings, calls = self._settings, self._calls
        shared_memory = None
        if settings.shared_memory:
            shared_memory = SharedMemory(settings.max_message_bytes, settings.max_inflight_bytes, self._intake)
        profiles = (settings.profile_dir or PROFILES) if self._has_tensorflow else None
        return GrpcServer(
            settings,
            Services(
                OpenInference(calls, models, self._streams, shared_memory),
                Vision(calls, models, settings.max_message_bytes, self._watch.unexpected),
                PredictionService(calls, models),
                ModelService(models),
            ),
            self._health,
            Admin(Profiler(profiles)) if settings.has_admin else None,
            intake=self._intake,
            admissions=admissions,
            door=self._door,
            certificates=self._certificates,
            metrics=self._metrics,
            on_failed=calls.note_failure,
            on_crash=self._crash,
            tracer=self._tracer,
        )

    def _make_http_server(self, admissions: Admissions, models: Models) -> HttpServer:
        settings, calls = self._settings, self._calls
        incoming = CallsIn(
            admissions,
            self._intake,
            settings.max_message_bytes,
            self._metrics.count_refused,
            self._door,
            on_failed=calls.note_failure,
            tracer=self._tracer,
        )
        methods = routes.operations(
            HttpOpenInference(calls, models, settings.cors_origins),
            HttpVision(calls, settings.max_message_bytes),
            HttpTensorflowServing(calls, models),
            Status(self._make_overview(), models, self._gpus),
            metrics.shown(self._metrics.registry, self._take_snapshot),
        )
        application = with_cors(routes.application(incoming, methods), settings.cors_origins)
        return HttpServer(settings, application, self._certificates, calls.note_failure)

    def _make_overview(self) -> Overview:
        return Overview(
            self._calls,
            self.device,
            self._watch,
            is_ready=self._is_ready,
            lane_busy_s=lambda: self._lanes.busy_s,
            addresses=lambda: self._ports.addresses(),  # noqa: PLW0108 - they are made later
        )

    def _make_telemetry(self) -> HttpEndpoint | None:
        settings = self._settings
        if settings.metrics_port is None:
            return None
        return HttpEndpoint(
            settings.host,
            settings.metrics_port,
            self._metrics.registry,
            is_ready=lambda: self._was_ready,
            refresh=partial(on_loop, asyncio.get_running_loop(), self._take_snapshot),
        )

    async def run(self) -> int:
        """Serves until a signal, and returns the exit status: 0, or 1 after a crash.

        Listens from the start, so that a warm-up can be watched, but is ready only after it. Raises ConfigError where
        it can't listen and ModelFailed where a model fails.
        """
        await asyncio.sleep(0)  # an interrupt that came while TensorFlow was imported ends it here, with nothing begun
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        loop.add_signal_handler(signal.SIGHUP, self._has_news.set)
        self._ready_file.remove()
        watching = asyncio.create_task(self._service_manager.watch())
        try:
            log.info("device: %s", self.device)
            await self._ports.open()
            self._service_manager.tell_status("compiling")
            try:
                if await self._load():
                    if self._is_ready():
                        self._ready_file.write(self._ports.addresses())
                    self._service_manager.tell_ready(self._serving)
                    await self._serve()
            finally:
                await self._stop()
        finally:
            self._ports.close()
            self._ready_file.remove()
            watching.cancel()
            self._service_manager.close()
        return CRASHED if self._has_crashed else 0

    def _load_model(self, settings: ModelSettings, prepared: CompileCache | None = None) -> catalog.Model:
        if catalog.uses_tensorflow(settings) and not self._has_tensorflow:
            raise ModelFailed("the server was started without any TensorFlow model; restart it to serve this one")
        if not catalog.uses_tensorflow(settings):
            return catalog.load(settings)
        if self.device.replicas:
            return self._replicated(settings)
        if (cache := prepared or self._cache) is None:
            return catalog.load(settings)
        from xlaserve.model.networks import cached  # noqa: PLC0415 - imports TensorFlow

        return catalog.load(settings, partial(cached.network, cache, self.device))

    @cached_property
    def _replicated(self) -> Callable[[ModelSettings], catalog.Model]:
        """Loads models on all devices, which share the turns."""
        from xlaserve.model import replicas  # noqa: PLC0415
        from xlaserve.runtimes.tf.replicas import Replicas  # noqa: PLC0415 - imports TensorFlow

        return partial(replicas.load, replicas=Replicas(self.device.replicas))

    async def _load(self) -> bool:
        """Loads every model; False where a signal came first."""
        if self._is_watching:
            from xlaserve.runtimes.tf.known_compilation import compile_known  # noqa: PLC0415 - imports TensorFlow

            await asyncio.to_thread(self._watch.check, compile_known)
        loading = asyncio.ensure_future(self._load_all())
        stopping = asyncio.ensure_future(self._stopping.wait())
        await asyncio.wait((loading, stopping), return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if self._stopping.is_set():
            loading.cancel()
            return False
        await loading
        if self._cache is not None:
            self._cache.stop_filling()
        self._on_loaded()
        self._health.refresh()
        log.info(self._serving)
        return True

    @property
    def _serving(self) -> str:
        """Which models serve, in words."""
        ready = [name for name, serves in self.repository.serving().items() if serves]
        return f"ready: {', '.join(ready) or 'no model'}"

    async def _load_all(self) -> None:
        await asyncio.to_thread(self._settle)
        await self.repository.load_all()
        keep_freed_memory()  # not before: loading frees much that is of no further use

    def _settle(self) -> None:
        """Freezes what stays for ever, the libraries: the garbage collector, which pauses all threads, skips it."""
        if self._has_tensorflow and self._cache is None:
            from xlaserve.model.networks import keras_runtime  # noqa: F401, PLC0415 - imports TensorFlow
        gc.freeze()

    async def _serve(self) -> None:
        """Serves until a signal ends it, and reads the configuration again whenever SIGHUP came."""
        following = [asyncio.create_task(self._follow_configuration())]
        if every_s := self._settings.poll_versions_s:
            poll = Poll(lambda: self._read_settings().models, self._reconfigure, every_s)
            following.append(asyncio.create_task(poll.follow(self._settings.models)))
        try:
            await self._stopping.wait()
        finally:
            for task in following:
                task.cancel()
            await asyncio.wait(following)

    async def _follow_configuration(self) -> None:
        while True:
            await self._has_news.wait()
            self._has_news.clear()
            log.info("reading the configuration again")
            self._service_manager.tell_reloading()
            await self._reconfigure()
            self._service_manager.tell_ready(self._serving)

    async def _reconfigure(self, only: Collection[str] | None = None) -> None:
        """Reads the configuration again, and has models served as it says: all, or `only` these."""
        try:
            await self._apply_configuration(only)
        except ConfigError as error:
            log.error("the configuration is as before: %s", error)
        except Exception:
            log.exception("the configuration could not be read again")

    async def _apply_configuration(self, only: Collection[str] | None) -> None:
        settings = await asyncio.to_thread(self._read_settings)
        fixed = [name for name in Settings.model_fields if name != "models"]
        if waiting := [name for name in fixed if getattr(settings, name) != getattr(self._settings, name)]:
            log.warning("changed in the configuration, but only a restart applies it: %s", ", ".join(waiting))
        done = await self.repository.reconfigure(settings.models, only)
        log.info("read the configuration again: %s", "; ".join(done) or "no model changed")

    async def _stop(self) -> None:
        """Lets accepted work finish and refuses new, as clients see it: first health, then calls, then the port."""
        delay_s = self._settings.shutdown_delay_s if self.repository.is_ready and not self._has_crashed else 0
        self._service_manager.tell_stopping()
        self.repository.stop_loading()
        self._health.stop()
        if delay_s:
            log.info("stopping: still serving for %g s, or until the next signal", delay_s)
            with suppress(TimeoutError):
                async with asyncio.timeout(delay_s):
                    await self._draining.wait()
        self._draining.set()
        log.info("draining: %d requests in flight", self._calls.in_flight)
        timeout_s = self._settings.drain_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                await self._calls.drain()
        except TimeoutError:
            log.warning("%d requests did not finish in %g s", self._calls.in_flight, timeout_s)
        await self._shadows.stop()
        await self.repository.drain(timeout_s=0)
        # A refusal says more than a connection that closes.
        with suppress(TimeoutError):
            async with asyncio.timeout(FLUSH_S):
                await self._calls.quiet(QUIET_S)
        await self._streams.end(FLUSH_S)
        await self._ports.stop_calls(FLUSH_S)
        self._pipeline.stop()
        await asyncio.to_thread(self._close_tracing)
        self._calls.access_log.flush()
        log.info("stopped")

    def _is_ready(self) -> bool:
        return self.repository.is_ready and not self._stopping.is_set()

    def _on_compiled(self, compilation: XlaCompilation, is_expected: bool) -> None:
        self._metrics.xla_compilations.labels(EXPECTED if is_expected else SERVING).inc()

    def _on_signal(self, number: int) -> None:
        now = self._pipeline.clock()
        if now - self._last_signal_at < SECOND_SIGNAL_S:
            return
        self._last_signal_at = now
        if not self._stopping.is_set():
            self._stopping.set()
        elif not self._draining.is_set():
            self._draining.set()
        else:
            log.warning("another signal: stopping at once")
            with suppress(ConfigError):
                self._ready_file.remove()
            log_writer.finish(LAST_WORDS_S)
            os._exit(128 + number)

    def _crash(self) -> None:
        self._has_crashed = True
        self._stopping.set()

    def _take_snapshot(self) -> None:
        """Reads on the event loop what the HTTP endpoint shows on its own thread."""
        self._was_ready = self._is_ready()
        self._see_versions()
        self._metrics.read_gauges()

    def _on_change(self, version: Version) -> None:
        self._health.refresh()
        self._see_versions()

    def _see_versions(self) -> None:
        self._departures.see((version.name, version.settings.version) for version in self.repository.index())

    def _gauges(self) -> Iterable[Metric]:
        versions = self.repository.versions()
        yield from gauges.gauges(versions)
        if self._settings.triton_metrics:
            yield from triton_metrics(versions, self._metrics)
        yield build_info(self.device.kind, self.device.name)
        yield gauge("xlaserve_in_flight_requests", "Requests accepted and not yet answered.", self._calls.in_flight)
        yield gauge(
            "xlaserve_in_flight_message_bytes",
            "Bytes of messages that arrived and are still held.",
            self._intake.held_bytes,
        )
        yield gauge(
            "xlaserve_in_flight_message_bytes_limit",
            "`max_inflight_bytes`: as many of those bytes there may be.",
            self._settings.max_inflight_bytes,
        )
        yield gauge("xlaserve_lanes", "Batches that the device runs at the same time.", self._lanes.count)
        yield counter(
            "xlaserve_lane_busy_seconds", "Time for which lanes were in use, all together.", self._lanes.busy_s
        )
        yield gauge(
            "xlaserve_certificate_expiry_timestamp_seconds",
            "When the server's certificate ends, in seconds since the epoch; absent without TLS.",
            self._certificates.pem.expiry_s if self._certificates is not None else None,
        )
        is_blind = self._watch.is_blind
        yield gauge(
            "xlaserve_compile_watch",
            "1 where XLA's compilations are seen, 0 where they go unseen; absent where nobody watches.",
            None if is_blind is None else not is_blind,
        )
        yield gauge("xlaserve_ready", "1 once start-up has finished and at least one model serves.", self._is_ready())


def _certificates(settings: Settings) -> Certificates | None:
    certificate, key = settings.tls_certificate, settings.tls_key
    return None if certificate is None or key is None else Certificates(certificate, key, settings.tls_client_ca)
