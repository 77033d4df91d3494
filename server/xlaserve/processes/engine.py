"""The engine: a device with its lanes, the repository of its models, the compile cache, the watch for compilations."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Final

from prometheus_client.core import Metric

from xlaserve.config import ModelSettings, Settings
from xlaserve.engine.batch_watch import BatchWatch
from xlaserve.engine.batching.lanes import Lanes
from xlaserve.engine.batching.worker import Worker
from xlaserve.engine.memory import keep_freed_memory
from xlaserve.engine.under_way import UnderWay
from xlaserve.engine.warmup.ledger import Entry
from xlaserve.errors import ModelFailed
from xlaserve.models import catalog, gauges
from xlaserve.models.change_checks import NO_LABELS
from xlaserve.models.change_queue import Stop
from xlaserve.models.listing import Listings
from xlaserve.models.loader import Loader
from xlaserve.models.preparer import Preparer
from xlaserve.models.repository import Repository
from xlaserve.models.sources.conversions import Conversions
from xlaserve.models.triton_metrics import triton_metrics
from xlaserve.models.version import Version
from xlaserve.processes.spans import Tracing
from xlaserve.programs.cache.compile_cache import CompileCache
from xlaserve.programs.tf import xla_executable_cache
from xlaserve.programs.tf.device import Device, configure
from xlaserve.programs.tf.profiler import Profiler
from xlaserve.programs.watch.compile_watch import CompileWatch
from xlaserve.programs.watch.stderr_tap import StderrTap
from xlaserve.programs.watch.xla_log import XlaCompilation
from xlaserve.telemetry import gpus
from xlaserve.telemetry.failures import Failure, Failures
from xlaserve.telemetry.findings import Findings, Pair
from xlaserve.telemetry.metrics import EXPECTED, SERVING, Metrics, SeriesRetention, build_info, counter, gauge
from xlaserve.telemetry.tally import Counted
from xlaserve.telemetry.version_metrics import Statistics

log = logging.getLogger(__name__)

PROFILES: Final = Path("xlaserve-profiles")


class Engine:
    """Loads and runs the models of `settings`. Build it on a running event loop, before TensorFlow is imported.

    `read_settings` reads the configuration again, on a thread, for a load. `on_record` is called with each program that
    warm-up compiled, on the compiling thread; `on_change` at every change of a version's state, `on_crash` when nothing
    can be run any more. `on_endless` is called where batches that never end hold all lanes or the event loop, see
    `BatchWatch`. `xla_events` is entered already. `listings`, `required` and `set_aside` are the repository's,
    `under_way` is the loader's. Implements `wire.shared.backend.Backend`.
    """

    def __init__(
        self,
        settings: Settings,
        metrics: Metrics,
        *,
        read_settings: Callable[[], Settings] | None = None,
        on_record: Callable[[Entry], None] = lambda entry: None,
        on_change: Callable[[], None] = lambda: None,
        on_crash: Callable[[], None] = lambda: None,
        tracing: Tracing | None = None,
        xla_events: StderrTap | None = None,
        listings: Listings | None = None,
        required: Collection[str] = (),
        set_aside: Mapping[bytes, str] = MappingProxyType({}),
        under_way: UnderWay | None = None,
        on_endless: Callable[[], object] = lambda: None,
    ) -> None:
        under_way = under_way or UnderWay()
        self._settings = settings
        self._read_settings = read_settings or (lambda: settings)
        self._metrics = metrics
        self._on_change = on_change
        self._has_tensorflow = any(map(catalog.uses_tensorflow, settings.models))
        self.gpus = gpus.of_machine()
        self._cache = self._open_cache()
        self.device: Device = configure(settings, self._has_tensorflow)
        self._lanes = Lanes(self.device.lanes, self.device.count)
        if self._cache and self.device.replicas:
            log.warning("compile_cache: programs for several GPUs are not kept, each start compiles them")
        worker = Worker(self.device.lanes, self.device.count)
        self._watch = CompileWatch(self._on_compiled, worker.is_lane)
        self._is_watching = xla_events is not None
        if xla_events is not None:
            xla_events.restore_environment()
            xla_events.listen(self._watch.read)
        self._series_retention = SeriesRetention(metrics.forget)
        self._batch_watch = BatchWatch(under_way, self.device.lanes, on_endless)
        self.repository = Repository(
            settings=settings,
            loader=self._make_loader(worker, on_crash, tracing, under_way),
            read_models=lambda: self._read_settings().models,
            metrics=metrics,
            on_change=self._changed,
            on_record=on_record,
            on_listing=on_change,
            listings=listings,
            required=required,
            set_aside=dict(set_aside),
        )
        self._profiler = Profiler((settings.profile_dir or PROFILES) if self._has_tensorflow else None)
        self.profile = self._profiler.record
        metrics.add_gauges(self._gauges)
        metrics.registry.register(self.gpus)
        self.see_versions()

    def _open_cache(self) -> CompileCache | None:
        """Opens the compile cache that `settings` name. To be called before TensorFlow is imported."""
        settings = self._settings
        if not self._has_tensorflow:
            return None
        xla_executable_cache.set_environment(has_all_compiled=settings.compile_cache is not None)
        if settings.compile_cache is None:
            return None
        return CompileCache(settings.compile_cache, read_only=settings.compile_cache_read_only)

    def _make_loader(
        self, worker: Worker, on_crash: Callable[[], None], tracing: Tracing | None, under_way: UnderWay
    ) -> Loader:
        settings, device, stop = self._settings, self.device, Stop()
        has_preparer = self._has_tensorflow and settings.load_process and device.kind == "cpu"
        return Loader(
            settings=settings,
            load_model=self._load_model,
            lanes=self._lanes,
            worker=worker,
            expecting=self._watch.expecting,
            on_crash=on_crash,
            under_way=under_way,
            on_traced=None if tracing is None else tracing.tracer.batch_ran,
            preparer=Preparer(settings, device, stop, self._cache) if has_preparer else None,
            stop=stop,
            has_tf32=device.tf32,
            on_cpu=device.kind == "cpu",
        )

    @property
    def directory(self) -> Repository:
        """All models and their versions."""
        return self.repository

    @property
    def unexpected(self) -> Collection[XlaCompilation]:
        """Compilations of XLA that nothing asked for."""
        return self._watch.unexpected

    @property
    def is_watched(self) -> bool | None:
        """Whether XLA's compilations are seen; None without a watch for them."""
        return None if self._watch.is_blind is None else not self._watch.is_blind

    @property
    def lane_busy_s(self) -> float:
        """Time for which lanes were in use, all together."""
        return self._lanes.busy_s

    @property
    def counted(self) -> Counted:
        """Counts of all models in this process."""
        return Counted.here(self._metrics)

    @property
    def in_flight_elsewhere(self) -> int:
        """0: an engine in this process knows no other process."""
        return 0

    def statistics(self, version: Version) -> Statistics:
        """Returns the counts of a version in this process since it was loaded."""
        return version.telemetry.statistics

    def shadows(self, version: Version) -> Mapping[Pair, Findings]:
        """Returns the comparisons of a version with its shadows in this process."""
        return version.shadows

    def failures(self, here: Failures) -> Iterable[Failure]:
        """Returns the last requests that failed in this process, which are `here`."""
        return here

    async def count(self) -> None:
        """Does nothing: counts of this process are always current."""

    @property
    def serving(self) -> str:
        """Names of the models that serve, as a sentence for the log."""
        ready = [name for name, serves in self.repository.serving().items() if serves]
        return f"ready: {', '.join(ready) or 'no model'}"

    async def load(self, name: str) -> None:
        """Loads all configured versions of a model; see `Repository.load`."""
        await self.repository.load(name)

    async def update(self, name: str, labels: Mapping[str, str] = NO_LABELS, versions: Collection[str] = ()) -> None:
        """Loads the versions of a model that changed, and moves labels; see `Repository.update`."""
        await self.repository.update(name, labels, versions)

    async def unload(self, name: str) -> None:
        """Unloads a model; see `Repository.unload`."""
        await self.repository.unload(name)

    async def start(self, stopping: asyncio.Event) -> bool:
        """Loads every model; False if `stopping` was set first. Raises ModelFailed if a required model fails."""
        if self._is_watching:
            from xlaserve.programs.tf.known_compilation import compile_known  # noqa: PLC0415 - imports TensorFlow

            await asyncio.to_thread(self._watch.check, compile_known)
        self._batch_watch.start()
        loading = asyncio.ensure_future(self._load_all())
        ending = asyncio.ensure_future(stopping.wait())
        await asyncio.wait((loading, ending), return_when=asyncio.FIRST_COMPLETED)
        ending.cancel()
        if stopping.is_set():
            loading.cancel()
            return False
        await loading
        if self._cache is not None:
            self._cache.stop_filling()
        return True

    async def _load_all(self) -> None:
        await asyncio.to_thread(self._settle)
        await self.repository.load_all()
        keep_freed_memory()  # not before: loading frees much that is of no further use

    def _settle(self) -> None:
        """Freezes the objects of libraries: the garbage collector, which pauses all threads, skips them from now on."""
        if self._has_tensorflow and self._cache is None:
            from xlaserve.models.networks import keras_runtime  # noqa: F401, PLC0415 - imports TensorFlow
        gc.freeze()

    @property
    def images_per_s(self) -> float:
        """Images/s with all lanes busy, by the costs that warm-up measured of the fastest program that serves."""
        entries = chain.from_iterable(version.ledger for version in self.repository.index() if version.served)
        rates = (self.device.lanes * entry.bucket.batch / entry.cost.loaded_s for entry in entries)
        return max(rates, default=0.0)

    def see_versions(self) -> None:
        """Forgets metrics of versions that have been gone for a while; see `SeriesRetention`."""
        self._series_retention.update((version.name, version.settings.version) for version in self.repository.index())

    def _load_model(self, settings: ModelSettings, prepared: CompileCache | None = None) -> catalog.Model:
        if catalog.uses_tensorflow(settings) and not self._has_tensorflow:
            raise ModelFailed("the server was started without any TensorFlow model; restart it to serve this one")
        if not catalog.uses_tensorflow(settings):
            return catalog.load(settings)
        if self.device.replicas:
            return self._replicated(settings)
        if (cache := prepared or self._cache) is None:
            return catalog.load(settings)
        from xlaserve.models.networks import cached  # noqa: PLC0415 - imports TensorFlow

        conversions = Conversions(cache.root, is_filling=cache.is_filling)
        return catalog.load(settings, partial(cached.network, cache, self.device), conversions)

    @cached_property
    def _replicated(self) -> Callable[[ModelSettings], catalog.Model]:
        """Loads models on all devices, which take turns at the batches."""
        from xlaserve.programs.tf.device_replicas import Replicas  # noqa: PLC0415 - imports TensorFlow

        return partial(catalog.load_replicated, replicas=Replicas(self.device.replicas))

    def _on_compiled(self, compilation: XlaCompilation, is_expected: bool) -> None:
        self._metrics.xla_compilations.labels(EXPECTED if is_expected else SERVING).inc()

    def _changed(self, version: Version) -> None:
        self.see_versions()
        self._on_change()

    def _gauges(self) -> Iterable[Metric]:
        versions = self.repository.versions()
        yield from gauges.gauges(versions)
        if self._settings.triton_metrics:
            yield from triton_metrics(versions, self._metrics)
        yield build_info(self.device.kind, self.device.name)
        yield gauge("xlaserve_lanes", "Batches that the device runs at the same time.", self._lanes.count)
        yield counter(
            "xlaserve_lane_busy_seconds", "Time for which lanes were in use, all together.", self._lanes.busy_s
        )
        is_watched = self.is_watched
        yield gauge(
            "xlaserve_compile_watch",
            "1 where XLA's compilations are seen, 0 where they go unseen; absent where nobody watches.",
            is_watched,
        )
