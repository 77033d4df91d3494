"""Metrics of models by the names that Triton Inference Server has for them, so that its dashboards go on working.

Names, labels and units: Triton's documentation, "Metrics". Durations are of requests that succeeded.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from xlaserve.models.version import Version
from xlaserve.telemetry.metrics import Metrics
from xlaserve.telemetry.version_metrics import Statistics

LABELS: Final = ("model", "version")
REASONS: Final[Mapping[str, str]] = {
    "CANCELLED": "CANCELED",
    "INTERNAL": "BACKEND",
    "RESOURCE_EXHAUSTED": "REJECTED",
    "UNAVAILABLE": "REJECTED",
}
"""Triton's reason for a failure, by gRPC status; OTHER for all other statuses."""

_COUNTERS: Final[tuple[tuple[str, str, Callable[[Statistics], float]], ...]] = (
    ("request_success", "Requests that succeeded.", lambda of: of.success.count),
    ("count", "Images answered.", lambda of: of.images),
    ("exec_count", "Batches that ran.", lambda of: of.batches),
    ("request_duration_us", "From a request's arrival to its answer, summed.", lambda of: _us(of.success.seconds)),
    ("queue_duration_us", "Waiting for a batch, summed.", lambda of: _us(of.queue.seconds)),
    ("compute_input_duration_us", "Decoding and gathering, summed.", lambda of: _us(of.input.seconds)),
    ("compute_infer_duration_us", "Running batches, summed.", lambda of: _us(of.infer.seconds)),
    ("compute_output_duration_us", "Making responses, summed.", lambda of: _us(of.output.seconds)),
)


def triton_metrics(versions: Collection[Version], metrics: Metrics, *, has_queues: bool = True) -> Iterator[Metric]:
    """Yields the metrics of `versions`, each of another number. On the event loop.

    A process without queues yields no gauge of waiting requests; all other metrics are summed over the processes.
    """
    for name, help_text, read in _COUNTERS:
        family = CounterMetricFamily(f"nv_inference_{name}", help_text, labels=LABELS)
        for version in versions:
            family.add_metric((version.name, version.settings.version), read(version.telemetry.statistics))
        yield _as_named(family)
    failures = CounterMetricFamily("nv_inference_request_failure", "Requests that failed.", labels=(*LABELS, "reason"))
    for labels, count in _failures(metrics).items():
        failures.add_metric(labels, count)
    yield _as_named(failures)
    if not has_queues:
        return
    pending = GaugeMetricFamily("nv_inference_pending_request_count", "Requests that wait for a batch.", labels=LABELS)
    for version in versions:
        if batcher := version.batcher:
            pending.add_metric((version.name, version.settings.version), batcher.waiting_requests)
    yield pending


def _failures(metrics: Metrics) -> dict[tuple[str, str, str], int]:
    failures: dict[tuple[str, str, str], int] = {}
    for (model, version, _, _, status), count in metrics.requests.series.items():
        if model and status != "OK":
            labels = model, version, REASONS.get(status, "OTHER")
            failures[labels] = failures.get(labels, 0) + count.value
    return failures


def _as_named(family: CounterMetricFamily) -> Metric:
    """Returns a counter whose samples have the family's own name: Triton's do not end in `_total`."""
    family.type = "unknown"
    family.samples = [sample._replace(name=family.name) for sample in family.samples]
    return family


def _us(seconds: float) -> int:
    return round(seconds * 1e6)
