from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.exposition import choose_encoder, generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from xlaserve.config import Bucket, Mode
from xlaserve.engine.batching.worker import Run
from xlaserve.engine.timings import Timings
from xlaserve.telemetry.counts import LoopCounter, LoopHistogram
from xlaserve.telemetry.metrics import Metrics
from xlaserve.telemetry.version_metrics import ModelTelemetry

Metrics()  # has prometheus-client show as little as we do
LABELS = ("model", "mode")
BOUNDS = (0.001, 0.5, 1.0, 256.0)


def exposed(registry: CollectorRegistry) -> set[str]:
    """Returns the lines of /metrics."""
    return set(generate_latest(registry).decode().splitlines())


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 10**12))))
def test_a_counter_shows_what_that_of_prometheus_shows(increments: Sequence[tuple[str, int]]) -> None:
    ours, theirs = CollectorRegistry(auto_describe=True), CollectorRegistry(auto_describe=True)
    counter = LoopCounter("things", "What was counted.", LABELS, registry=ours)
    reference = Counter("things", "What was counted.", LABELS, registry=theirs)
    for label, amount in increments:
        counter.labels(label, "xla").inc(amount)
        reference.labels(label, "xla").inc(amount)
    assert exposed(ours) == exposed(theirs)


def test_what_was_counted_of_a_version_is_forgotten_whatever_it_did() -> None:
    def series(metrics: Metrics) -> int:
        return sum(len(family.samples) for family in metrics.registry.collect() if "process" not in family.name)

    metrics = Metrics()
    kept = ModelTelemetry(metrics, "cats", "1")
    before = series(metrics)
    for version in map(str, range(2, 50)):
        telemetry = ModelTelemetry(metrics, "cats", version)
        telemetry.compiled(Mode.XLA, 1.0, in_background=False)
        telemetry.loaded(Mode.XLA)
        telemetry.buckets_retired(Mode.XLA, 1)
        telemetry.batch_ran(Mode.XLA, Bucket(1, 2, 3), 1, Run((), 0.0, 0.0, 0.0, is_finite=False))
        telemetry.request_answered("ModelInfer", Mode.XLA, 1, Timings())
        telemetry.request_failed("ModelInfer", "xla", "INTERNAL", 1.0)
        telemetry.request_refused("late", 1.0)
        as_shadow = "cats", "1", "xla", version, "xla"
        metrics.shadow_agreement.labels(*as_shadow).observe(1.0)
        metrics.shadow_dropped.labels(*as_shadow, "busy").inc()
        assert series(metrics) > before
        metrics.forget("cats", version)
        assert series(metrics) == before
    metrics.forget("dogs", "1")
    assert series(metrics) == before
    kept.request_answered("ModelInfer", Mode.XLA, 1, Timings())
    assert metrics.requests.series[("cats", "1", "ModelInfer", "xla", "OK")].value == 1


@given(st.lists(st.one_of(st.sampled_from(BOUNDS), st.floats(0, 1000))))
def test_a_histogram_shows_what_that_of_prometheus_shows(values: Sequence[float]) -> None:
    ours, theirs = CollectorRegistry(auto_describe=True), CollectorRegistry(auto_describe=True)
    histogram = LoopHistogram("seconds", "How long.", LABELS, bounds=BOUNDS, registry=ours)
    reference = Histogram("seconds", "How long.", LABELS, buckets=BOUNDS, registry=theirs)
    for value in values:
        histogram.labels("a", "xla").observe(value)
        reference.labels("a", "xla").observe(value)
    assert exposed(ours) == exposed(theirs)


def test_a_histogram_shows_nothing_of_label_values_without_observations() -> None:
    registry = CollectorRegistry(auto_describe=True)
    histogram = LoopHistogram("seconds", "How long.", LABELS, bounds=BOUNDS, registry=registry)
    seconds = histogram.labels("a", "xla")
    assert not [line for line in exposed(registry) if not line.startswith("#")]
    seconds.observe(0.0)
    assert 'seconds_count{mode="xla",model="a"} 1.0' in exposed(registry)


def test_openmetrics_names_the_last_trace_of_each_bucket() -> None:
    registry = CollectorRegistry(auto_describe=True)
    seconds = LoopHistogram("seconds", "How long.", LABELS, bounds=BOUNDS, registry=registry).labels("a", "xla")
    for value, trace in ((0.25, "first"), (0.3, "second"), (0.4, None), (0.75, None), (1000.0, "slow")):
        seconds.observe(value, trace)
    encode, _ = choose_encoder("application/openmetrics-text; version=1.0.0")
    (family,) = text_string_to_metric_families(encode(registry).decode())  # type: ignore[no-untyped-call]
    found = {sample.labels["le"]: sample.exemplar for sample in family.samples if "le" in sample.labels}
    shown = {bound: (each.labels["trace_id"], each.value) for bound, each in found.items() if each is not None}
    assert shown == {"0.5": ("second", 0.3), "+Inf": ("slow", 1000.0)}
