"""Prometheus metrics, in one explicit registry.

Labels are bounded: a model's name and a version become labels only once they are in the repository, a mode and a status
come from their enumerations; the series of versions that have left the repository are removed after a while
(`SeriesRetention`). All counts but those of compilations are written on the event loop.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Final, TypeVar

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

import xlaserve
from xlaserve.admission.caller import Caller
from xlaserve.telemetry.counts import LoopCounter, LoopHistogram

SECONDS: Final = (1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
BATCH_SIZES: Final = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
OTHERS: Final = "(others)"
"""The label of all callers that `access` does not name: their names are chosen by clients, and so unbounded."""
SHARES: Final = (0.0, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 0.999, 1.0)
DIFFERENCES: Final = (0.0, 1e-6, 1e-5, 1e-4, 1e-3, 0.01, 0.1, 1.0)
WARM_UP: Final = "warm_up"
BACKGROUND: Final = "background"
EXPECTED: Final = "expected"
SERVING: Final = "serving"
COMPILE_SECONDS: Final = (0.01, 0.05, 0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)

SERIES_KEPT_S: Final = 15 * 60.0
"""Seconds for which the series of a version that has left are still shown: far longer than the scrape interval of any
usual Prometheus server, so that their last values are scraped."""
MAX_VERSIONS_KEPT: Final = 32
"""Versions of all models that have left and whose series are still shown; of more, the first to leave is forgotten."""

VersionKey = tuple[str, str]
"""The name of a model and the number of a version."""

MetricT = TypeVar("MetricT", LoopCounter, LoopHistogram, Counter, Histogram)


class Metrics:
    """Every counter and histogram of the server; `registry`, which gauges join, is what /metrics shows."""

    def __init__(self) -> None:
        # No `_created` samples, which LoopCounter has not either. A setting of the process, not of a registry.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = registry = CollectorRegistry(auto_describe=True)

        self._of_versions: list[tuple[Sequence[str], LoopCounter | LoopHistogram | Counter | Histogram]] = []
        """Metrics with a label `version`, each with all its labels."""

        def counter(name: str, help_text: str, labels: Sequence[str]) -> LoopCounter:
            return self._kept(LoopCounter(f"xlaserve_{name}", help_text, labels, registry=registry), labels)

        def histogram(
            name: str, help_text: str, labels: Sequence[str], bounds: Sequence[float] = SECONDS
        ) -> LoopHistogram:
            made = LoopHistogram(f"xlaserve_{name}", help_text, labels, bounds=bounds, registry=registry)
            return self._kept(made, labels)

        def any_threads_counter(name: str, help_text: str, labels: Sequence[str]) -> Counter:
            return self._kept(Counter(f"xlaserve_{name}", help_text, labels, registry=registry), labels)

        self.requests = counter(
            "requests",
            "Requests that were answered, by gRPC status. Of those that were not taken in or named no model or version"
            " of the repository, `model` and `version` are empty.",
            ("model", "version", "method", "mode", "status"),
        )
        self.limited = counter(
            "requests_limited",
            "Requests that a caller's limits refused, by the limit; those that `access` does not name together.",
            ("caller", "limit"),
        )
        self.images = counter("images", "Images answered.", ("model", "version", "mode"))
        self.request_s = histogram(
            "request_seconds",
            "From a request's arrival to its answer. Buckets name a trace that was sampled, where one is.",
            ("model", "version", "method", "status"),
        )
        self.refusal_s = histogram(
            "refusal_seconds",
            "From a request's arrival to its refusal for overload, by reason: queue_full; limit, of its caller;"
            " deadline, which it could not have met; late, where it was accepted and not answered by then.",
            ("model", "version", "reason"),
        )
        self.decode_s = histogram(
            "decode_seconds",
            "Encoded images to pixels, for each request that sent encoded images.",
            ("model", "version"),
        )
        self.queue_s = histogram(
            "queue_seconds",
            "Waiting for a batch to be formed and, once it is gathered, for a lane.",
            ("model", "version"),
        )
        self.encode_s = histogram("encode_seconds", "Making the response.", ("model", "version"))
        self.gather_s = histogram("gather_seconds", "Copying a batch together.", ("model", "version"))
        self.execute_s = histogram("execute_seconds", "Running a batch.", ("model", "version", "mode"))
        self.batch_size = histogram(
            "batch_size", "Real images in a batch.", ("model", "version", "mode"), bounds=BATCH_SIZES
        )
        self.bucket_batches = counter(
            "bucket_batches", "Batches by the bucket they ran in.", ("model", "version", "mode", "bucket")
        )
        self.padded_rows = counter("padded_rows", "Rows that padding added.", ("model", "version", "mode"))
        self.failed_batches = counter("failed_batches", "Batches that raised.", ("model", "version"))
        self.retired_buckets = counter(
            "retired_buckets",
            "Buckets that no longer serve, as the device's memory did not hold a batch.",
            ("model", "version", "mode"),
        )
        self.not_finite_batches = counter(
            "not_finite_batches", "Batches with NaN or infinity in their outputs.", ("model", "version", "mode")
        )
        compared = ("model", "version", "mode", "shadow_version", "shadow_mode")
        self.shadow_agreement = histogram(
            "shadow_agreement",
            "How far an answer and its shadow's agree, by image, from 0 to 1: the same class, the share of objects or"
            " pixels in both, the cosine of vectors.",
            compared,
            bounds=SHARES,
        )
        self.shadow_iou = histogram(
            "shadow_iou",
            "Mean intersection over union of objects in both answers or of classes of pixels, by image.",
            compared,
            bounds=SHARES,
        )
        self.shadow_difference = histogram(
            "shadow_difference",
            "Largest difference of two scores or of two numbers of a vector, by image.",
            compared,
            bounds=DIFFERENCES,
        )
        self.shadow_execute_s = histogram(
            "shadow_execute_seconds",
            "A batch that ran in both for comparing, alone on the device: in the version and mode that answered"
            " (served) and in the other (shadow).",
            (*compared, "side"),
        )
        self.shadow_dropped = counter(
            "shadow_dropped",
            "Requests that were drawn for a shadow but not compared, by the reason.",
            (*compared, "reason"),
        )
        self.compilations = any_threads_counter(
            "compilations",
            "Programs compiled, at warm-up (of a start, a load or a reload) or in the background.",
            ("model", "version", "mode", "phase"),
        )
        self.xla_compilations = any_threads_counter(
            "xla_compilations",
            "Programs that XLA itself says it compiled, as expected (at warm-up, in the background) or while serving.",
            ("phase",),
        )
        for phase in (EXPECTED, SERVING):
            self.xla_compilations.labels(phase)
        self.cache_loads = any_threads_counter(
            "cache_loads",
            "Programs read from the compile cache instead of being compiled.",
            ("model", "version", "mode"),
        )
        of_program = ("model", "version", "mode")
        self.compile_s = self._kept(
            Histogram(
                "xlaserve_compile_seconds",
                "Tracing and compiling a program.",
                of_program,
                buckets=COMPILE_SECONDS,
                registry=registry,
            ),
            of_program,
        )
        ProcessCollector(registry=registry)
        self._gauges: list[_Gauges] = []

    def _kept(self, made: MetricT, labels: Sequence[str]) -> MetricT:
        if "version" in labels:
            self._of_versions.append((labels, made))
        return made

    def forget(self, model: str, version: str) -> None:
        """Removes all series of a version, also those in which it is the shadow."""
        for labels, metric in self._of_versions:
            for label in ("version", "shadow_version"):
                if label in labels:
                    metric.remove_by_labels({"model": model, label: version})

    def count_refused(self, method: str, status: str) -> None:
        """Counts a request of any protocol that was refused before its model was known."""
        self.requests.labels("", "", method, "", status).inc()

    def count_limited(self, caller: Caller, limit: str) -> None:
        """Counts a request of `caller` that `limit` refused."""
        self.limited.labels(caller.name if caller.is_listed else OTHERS, limit).inc()

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
    """Metrics that are read on one thread and shown on others, always a whole reading."""

    def __init__(self, collect: Callable[[], Iterable[Metric]]) -> None:
        self._collect = collect
        self._read: tuple[Metric, ...] = ()

    def read(self) -> None:
        self._read = tuple(self._collect())

    def collect(self) -> Iterable[Metric]:
        return self._read


class SeriesRetention:
    """Calls `forget` for each version that has left the repository and not come back for SERIES_KEPT_S.

    `clock` counts seconds.
    """

    def __init__(self, forget: Callable[[str, str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._forget = forget
        self._clock = clock
        self._present: set[VersionKey] = set()
        self._left_at: dict[VersionKey, float] = {}
        """The clock's time at which each version left, in order of leaving."""

    def update(self, present: Iterable[VersionKey]) -> None:
        """Notes which versions are in the repository now, and forgets those that left too long ago."""
        now, before, self._present = self._clock(), self._present, {*present}
        self._left_at.update(dict.fromkeys(sorted(before - self._present), now))
        for key in self._present & self._left_at.keys():
            del self._left_at[key]
        while self._left_at:
            first = next(iter(self._left_at))
            if len(self._left_at) <= MAX_VERSIONS_KEPT and now - self._left_at[first] < SERIES_KEPT_S:
                break
            del self._left_at[first]
            self._forget(*first)


def gauge_family(name: str, help_text: str, labels: tuple[str, ...]) -> GaugeMetricFamily:
    """Returns a gauge without series, to be filled with `add_metric`."""
    return GaugeMetricFamily(name, help_text, labels=labels)


def build_info(device_kind: str, device_name: str) -> GaugeMetricFamily:
    """Returns the gauge `xlaserve_build_info`, with versions and the device as labels."""
    labels = {
        "version": xlaserve.__version__,
        "python": platform.python_version(),
        "tensorflow": tensorflow_version(),
        "device": device_kind,
        "device_name": device_name,
    }
    family = GaugeMetricFamily("xlaserve_build_info", "1, and what serves on which device.", labels=tuple(labels))
    family.add_metric(tuple(labels.values()), 1.0)
    return family


@cache
def tensorflow_version() -> str:
    """Returns the installed version of TensorFlow without importing it; empty where it is not installed."""
    for package in ("tensorflow", "tensorflow-cpu"):
        with suppress(PackageNotFoundError):
            return version(package)
    return ""


def counter(name: str, help_text: str, value: float) -> CounterMetricFamily:
    """Returns a counter of one series without labels."""
    return CounterMetricFamily(name, help_text, value=value)


def gauge(name: str, help_text: str, value: float | None) -> GaugeMetricFamily:
    """Returns a gauge of one series without labels; of no series where `value` is None."""
    return GaugeMetricFamily(name, help_text, value=None if value is None else float(value))
