"""Prometheus metrics, in one explicit registry.

Labels are bounded: a model's name becomes one only once the model is in the repository, a mode and a status come from
their enumerations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, disable_created_metrics
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from xlaserve.telemetry.counts import LoopCounter, LoopHistogram

SECONDS: Final = (1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
BATCH_SIZES: Final = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
WARM_UP: Final = "warm_up"
BACKGROUND: Final = "background"
EXPECTED: Final = "expected"
SERVING: Final = "serving"
COMPILE_SECONDS: Final = (0.01, 0.05, 0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Metrics:
    """Every counter and histogram of the server; `registry`, which gauges join, is what /metrics shows."""

    def __init__(self) -> None:
        # The time at which each series began, of which LoopCounter has none either. Of the process, not of a registry.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = registry = CollectorRegistry(auto_describe=True)

        def counter(name: str, help_text: str, labels: Sequence[str]) -> LoopCounter:
            return LoopCounter(f"xlaserve_{name}", help_text, labels, registry=registry)

        def histogram(
            name: str, help_text: str, labels: Sequence[str], bounds: Sequence[float] = SECONDS
        ) -> LoopHistogram:
            return LoopHistogram(f"xlaserve_{name}", help_text, labels, bounds=bounds, registry=registry)

        def any_threads_counter(name: str, help_text: str, labels: Sequence[str]) -> Counter:
            return Counter(f"xlaserve_{name}", help_text, labels, registry=registry)

        self.requests = counter(
            "requests", "Requests that were answered, by gRPC status.", ("model", "method", "mode", "status")
        )
        self.refused = any_threads_counter(
            "requests_refused",
            "Requests that were not taken in or named no model of the repository, by gRPC status.",
            ("method", "status"),
        )
        self.images = counter("images", "Images answered.", ("model", "mode"))
        self.request_s = histogram("request_seconds", "From a request's arrival to its answer.", ("model", "method"))
        self.decode_s = histogram(
            "decode_seconds", "Encoded images to pixels, for each request that sent encoded images.", ("model",)
        )
        self.queue_s = histogram(
            "queue_seconds", "Waiting for a batch to be formed and, once it is gathered, for a lane.", ("model",)
        )
        self.encode_s = histogram("encode_seconds", "Making the response.", ("model",))
        self.gather_s = histogram("gather_seconds", "Copying a batch together.", ("model",))
        self.execute_s = histogram("execute_seconds", "Running a batch.", ("model", "mode"))
        self.batch_size = histogram("batch_size", "Real images in a batch.", ("model", "mode"), bounds=BATCH_SIZES)
        self.bucket_batches = counter(
            "bucket_batches", "Batches by the bucket they ran in.", ("model", "mode", "bucket")
        )
        self.padded_rows = counter("padded_rows", "Rows that padding added.", ("model", "mode"))
        self.failed_batches = counter("failed_batches", "Batches that raised.", ("model",))
        self.retired_buckets = counter(
            "retired_buckets",
            "Buckets that no longer serve, as the device's memory did not hold a batch.",
            ("model", "mode"),
        )
        self.not_finite_batches = counter(
            "not_finite_batches", "Batches with NaN or infinity in their outputs.", ("model", "mode")
        )
        self.compilations = any_threads_counter(
            "compilations",
            "Programs compiled, at warm-up (of a start, a load or a reload) or in the background.",
            ("model", "mode", "phase"),
        )
        self.xla_compilations = any_threads_counter(
            "xla_compilations",
            "Programs that XLA itself says it compiled, as expected (at warm-up, in the background) or while serving.",
            ("phase",),
        )
        for phase in (EXPECTED, SERVING):
            self.xla_compilations.labels(phase)
        self.cache_loads = any_threads_counter(
            "cache_loads", "Programs read from the compile cache instead of being compiled.", ("model", "mode")
        )
        self.compile_s = Histogram(
            "xlaserve_compile_seconds",
            "Tracing and compiling a program.",
            ("model", "mode"),
            buckets=COMPILE_SECONDS,
            registry=registry,
        )
        ProcessCollector(registry=registry)
        self._gauges: list[_Gauges] = []

    def add_gauges(self, collect: Callable[[], Iterable[Metric]]) -> None:
        """Registers gauges of the event loop's state: `collect` is called by `read_gauges` alone."""
        gauges = _Gauges(collect)
        self._gauges.append(gauges)
        self.registry.register(gauges)

    def read_gauges(self) -> None:
        """Reads the gauges again, on the event loop, whose state they show; /metrics shows what was read last."""
        for gauges in self._gauges:
            gauges.read()


class _Gauges(Collector):
    """Metrics that are read on one thread and shown on others, whole."""

    def __init__(self, collect: Callable[[], Iterable[Metric]]) -> None:
        self._collect = collect
        self._read: tuple[Metric, ...] = ()

    def read(self) -> None:
        self._read = tuple(self._collect())

    def collect(self) -> Iterable[Metric]:
        return self._read


def gauge_family(name: str, help_text: str, labels: tuple[str, ...]) -> GaugeMetricFamily:
    """Returns a gauge without series, to be filled with `add_metric`."""
    return GaugeMetricFamily(name, help_text, labels=labels)


def gauge(name: str, help_text: str, value: float | None) -> GaugeMetricFamily:
    """Returns a gauge of one series without labels, or of none."""
    return GaugeMetricFamily(name, help_text, value=None if value is None else float(value))
