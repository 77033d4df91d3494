from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.exposition import generate_latest

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
