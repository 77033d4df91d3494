"""Prometheus metrics, in one explicit registry.

Labels are bounded: a model's name becomes one only once the model is in the repository, a mode and a status come from
their enumerations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, disable_created_metrics
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from xlaserve.telemetry.counts import LoopCounter, LoopHistogram

SECONDS: Final = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
)
IMAGES: Final = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
WARM_UP: Final = "warm_up"
BACKGROUND: Final = "background"
EXPECTED: Final = "expected"
SERVING: Final = "serving"
COMPILE_SECONDS: Final = (0.01, 0.05, 0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Metrics:
    """Every metric of the server; `registry` is what /metrics shows."""

    def __init__(self) -> None:
        # The time at which each series began, of which LoopCounter has none either. Of the process, not of a registry.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = registry = CollectorRegistry(auto_describe=True)
        self.requests = LoopCounter(
            "xlaserve_requests",
            "Requests that were answered, by gRPC status.",
            ("model", "method", "mode", "status"),
            registry=registry,
        )
        self.refused = Counter(
            "xlaserve_requests_refused",
            "Requests that were not taken in or named no model of the repository, by gRPC status.",
            ("method", "status"),
            registry=registry,
        )
        self.images = LoopCounter("xlaserve_images", "Images answered.", ("model", "mode"), registry=registry)
        self.request_s = LoopHistogram(
            "xlaserve_request_seconds",
            "From a request's arrival to its answer.",
            ("model", "method"),
            bounds=SECONDS,
            registry=registry,
        )

        def stage(name: str, help_text: str) -> LoopHistogram:
            return LoopHistogram(f"xlaserve_{name}_seconds", help_text, ("model",), bounds=SECONDS, registry=registry)

        self.decode_s = stage("decode", "Encoded images to pixels, for each request that sent encoded images.")
        self.queue_s = stage("queue", "From a request's arrival in the queue until its batch ran.")
        self.encode_s = stage("encode", "Making the response.")
        self.gather_s = stage("gather", "Copying a batch together.")
        self.execute_s = LoopHistogram(
            "xlaserve_execute_seconds", "Running a batch.", ("model", "mode"), bounds=SECONDS, registry=registry
        )
        self.batch_size = LoopHistogram(
            "xlaserve_batch_size", "Real images in a batch.", ("model", "mode"), bounds=IMAGES, registry=registry
        )
        self.bucket_batches = LoopCounter(
            "xlaserve_bucket_batches",
            "Batches by the bucket they ran in.",
            ("model", "mode", "bucket"),
            registry=registry,
        )
        self.padded_rows = LoopCounter(
            "xlaserve_padded_rows", "Rows that padding added.", ("model", "mode"), registry=registry
        )
        self.failed_batches = LoopCounter(
            "xlaserve_failed_batches", "Batches that raised.", ("model",), registry=registry
        )
        self.retired_buckets = LoopCounter(
            "xlaserve_retired_buckets",
            "Buckets that no longer serve, as the device's memory did not hold a batch.",
            ("model", "mode"),
            registry=registry,
        )
        self.not_finite_batches = LoopCounter(
            "xlaserve_not_finite_batches",
            "Batches with NaN or infinity in their outputs.",
            ("model", "mode"),
            registry=registry,
        )
        self.compilations = Counter(
            "xlaserve_compilations",
            "Programs compiled, at warm-up or in the background. After readiness only the latter grow.",
            ("model", "mode", "phase"),
            registry=registry,
        )
        self.xla_compilations = Counter(
            "xlaserve_xla_compilations",
            "Programs that XLA itself says it compiled, as expected (at warm-up, in the background) or while serving.",
            ("phase",),
            registry=registry,
        )
        for phase in (EXPECTED, SERVING):
            self.xla_compilations.labels(phase)
        self.cache_loads = Counter(
            "xlaserve_cache_loads",
            "Programs read from the compile cache instead of being compiled.",
            ("model", "mode"),
            registry=registry,
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
