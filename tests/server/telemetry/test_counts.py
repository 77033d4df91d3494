from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.exposition import choose_encoder, generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from xlaserve.telemetry.counts import LoopCounter, LoopHistogram
from xlaserve.telemetry.metrics import Metrics

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


@given(st.lists(st.one_of(st.sampled_from(BOUNDS), st.floats(0, 1000))))
def test_a_histogram_shows_what_that_of_prometheus_shows(values: Sequence[float]) -> None:
    ours, theirs = CollectorRegistry(auto_describe=True), CollectorRegistry(auto_describe=True)
    histogram = LoopHistogram("seconds", "How long.", LABELS, bounds=BOUNDS, registry=ours)
    reference = Histogram("seconds", "How long.", LABELS, buckets=BOUNDS, registry=theirs)
    for value in values:
        histogram.labels("a", "xla").observe(value)
        reference.labels("a", "xla").observe(value)
    assert exposed(ours) == exposed(theirs)


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
