from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder, generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from xlaserve.telemetry.counts import LoopCounter, LoopHistogram
from xlaserve.telemetry.merged import RULES, Merged, Rule, rule_of
from xlaserve.telemetry.metrics import Metrics
from xlaserve.telemetry.registry_snapshot import Family, Snapshot, decode, encode, take
from xlaserve.telemetry.version_metrics import ModelTelemetry

ROOT = Path(__file__).parents[3]
BOUNDS = (1.0, 10.0)
MODELS = ("cats", "dogs")


class Shown(Collector):
    """A collector of what is put in it."""

    def __init__(self, *families: Metric) -> None:
        self.families = families

    def collect(self) -> Iterable[Metric]:
        return self.families


def gauge(name: str, value: float, **labels: str) -> Metric:
    family = GaugeMetricFamily(name, "What it is.", labels=tuple(labels))
    family.add_metric(tuple(labels.values()), value)
    return family


def listed(*versions: tuple[str, str]) -> Metric:
    family = GaugeMetricFamily("xlaserve_model_state", "State.", labels=("model", "version", "state"))
    for model, version in versions:
        family.add_metric((model, version, "ready"), 1.0)
    return family


def snapshot(*families: Metric) -> Snapshot:
    return decode(encode(take(Shown(*families))))


def requests(value: float, *versions: tuple[str, str]) -> Metric:
    family = CounterMetricFamily("xlaserve_requests", "Requests.", labels=("model", "version"))
    for version in versions:
        family.add_metric(version, value)
    return family


def values(merged: Merged) -> dict[tuple[str, str], float]:
    """Returns the number of each sample, by its name and its labels as text."""
    return {
        (sample.name, str(dict(sorted(sample.labels.items())))): sample.value
        for family in merged.collect()
        for sample in family.samples
    }


def value(merged: Merged, name: str, **labels: str) -> float | None:
    return values(merged).get((name, str(dict(sorted(labels.items())))))


class Process:
    """Counts as a process does that may be killed."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.registry = CollectorRegistry()
        self.count = LoopCounter("things", "Things.", ("model",), registry=self.registry)
        self.seconds = LoopHistogram("seconds", "How long.", ("model",), bounds=BOUNDS, registry=self.registry)
        self.counted: Counter[str] = Counter()
        self.unseen: Counter[str] = Counter()

    def add(self, model: str, amount: int) -> None:
        self.count.labels(model).inc(amount)
        self.seconds.labels(model).observe(amount / 10)
        self.unseen[model] += amount
        self.unseen[f"{model} observations"] += 1

    def forget(self, model: str) -> None:
        self.count.remove_by_labels({"model": model})
        self.seconds.remove_by_labels({"model": model})
        for name in (model, f"{model} observations"):
            del self.unseen[name]


STEPS = st.one_of(
    st.tuples(st.just("add"), st.integers(0, 2), st.sampled_from(MODELS), st.integers(1, 20)),
    st.tuples(
        st.sampled_from(["look", "look", "kill", "end", "forget"]),
        st.integers(0, 2),
        st.sampled_from(MODELS),
        st.just(0),
    ),
)


@given(st.lists(STEPS, max_size=60))
def test_counts_never_fall_and_are_all_that_was_seen(steps: list[tuple[str, int, str, int]]) -> None:
    """Whatever processes count, show and forget, and however often each is killed and started again."""
    merged, seen, pids = Merged(), Counter[str](), iter(range(10_000))
    processes = [Process(next(pids)) for _ in range(3)]
    before: dict[tuple[str, str], float] = {}

    def look(process: Process, index: int) -> None:
        merged.update(process.pid, f"front {index}", decode(encode(take(process.registry))))
        seen.update(process.unseen)
        process.unseen.clear()

    for what, index, model, amount in steps:
        process = processes[index]
        if what == "add":
            process.add(model, amount)
        elif what == "look":
            look(process, index)
        elif what == "forget":
            # A series that begins again unseen and overtakes itself can't be told from one that went on.
            look(process, index)
            process.forget(model)
            look(process, index)
        else:
            if what == "end":
                look(process, index)
            merged.ended(process.pid)
            processes[index] = Process(next(pids))
        after = values(merged)
        for key, number in before.items():
            assert after[key] >= number, key
        before = after
        for name in MODELS:
            assert (value(merged, "things_total", model=name) or 0) == seen[name]
            assert (value(merged, "seconds_sum", model=name) or 0) == pytest.approx(seen[name] / 10)
            for series in ("seconds_count", "seconds_bucket"):
                labels = {"model": name} | ({"le": "+Inf"} if series == "seconds_bucket" else {})
                assert (value(merged, series, **labels) or 0) == seen[f"{name} observations"]


def test_one_process_is_shown_as_it_shows_itself() -> None:
    metrics, merged, registry = Metrics(), Merged(), CollectorRegistry()
    telemetry = ModelTelemetry(metrics, "cats", "1")
    telemetry.request_failed("ModelInfer", "xla", "INTERNAL", 0.25)
    telemetry.request_refused("late", 7.0)
    merged.update(1, "front 1", decode(encode(take(metrics.registry))))
    registry.register(merged)

    def lines(shown: CollectorRegistry) -> list[str]:
        return [line for line in generate_latest(shown).decode().splitlines() if "process_" not in line]

    assert lines(registry) == lines(metrics.registry)
    assert any('xlaserve_request_seconds_bucket{le="0.25"' in line for line in lines(registry))


def test_the_last_trace_of_a_bucket_stays_when_its_process_ends() -> None:
    merged, encode_text = Merged(), choose_encoder("application/openmetrics-text; version=1.0.0")[0]
    for pid, trace in ((1, "first"), (2, "second")):
        registry = CollectorRegistry()
        LoopHistogram("seconds", "How long.", ("model",), bounds=BOUNDS, registry=registry).labels("cats").observe(
            0.5, trace
        )
        merged.update(pid, f"front {pid}", decode(encode(take(registry))))
    merged.ended(2)
    shown = CollectorRegistry()
    shown.register(merged)
    (family,) = text_string_to_metric_families(encode_text(shown).decode())  # type: ignore[no-untyped-call]
    (found,) = [sample for sample in family.samples if sample.labels.get("le") == "1.0"]
    assert found.value == 2
    assert found.exemplar.labels == {"trace_id": "second"}


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("xlaserve_in_flight_requests", 5.0),
        ("xlaserve_certificate_expiry_timestamp_seconds", 2.0),
        ("xlaserve_gpu_power_watts", 3.0),
    ],
)
def test_gauges_are_added_or_one_counts(name: str, shown: float) -> None:
    merged = Merged()
    merged.update(1, "front 1", snapshot(gauge(name, 2.0)))
    merged.update(2, "front 2", snapshot(gauge(name, 3.0)))
    assert value(merged, name) == shown
    merged.ended(2)
    assert value(merged, name) == 2.0
    merged.ended(1)
    assert value(merged, name) is None


def test_what_is_of_a_process_has_its_role() -> None:
    merged = Merged()
    for pid, role in ((1, "front 1"), (2, "engine 0")):
        cpu = CounterMetricFamily("process_cpu_seconds", "Time.", value=float(pid))
        merged.update(pid, role, snapshot(gauge("process_open_fds", 7.0), cpu, gauge("of_a_plugin", 1.0)))
    assert value(merged, "process_open_fds", role="engine 0") == 7.0
    assert value(merged, "of_a_plugin", role="front 1") == 1.0, "what nobody has thought of is at least not wrong"
    merged.ended(2)
    assert value(merged, "process_open_fds", role="engine 0") is None
    merged.update(3, "engine 0", snapshot(CounterMetricFamily("process_cpu_seconds", "Time.", value=0.5)))
    assert value(merged, "process_cpu_seconds_total", role="engine 0") == 2.5


def test_what_every_process_reads_of_the_machine_is_not_added() -> None:
    merged = Merged()
    for pid in (1, 2):
        energy = CounterMetricFamily("xlaserve_gpu_energy_joules", "Energy.", labels=("gpu",))
        energy.add_metric(("0",), 100.0 + pid)
        merged.update(pid, f"engine {pid}", snapshot(energy))
    assert value(merged, "xlaserve_gpu_energy_joules_total", gpu="0") == 102.0
    for pid in (1, 2):
        merged.ended(pid)
    assert value(merged, "xlaserve_gpu_energy_joules_total", gpu="0") is None


def test_a_version_that_has_left_is_forgotten_once_no_process_shows_it() -> None:
    old, new = ("cats", "1"), ("cats", "2")
    merged = Merged()
    merged.update(1, "engine 0", snapshot(listed(old), requests(3, old)))
    merged.update(2, "front 1", snapshot(requests(5, old)))
    merged.update(3, "front 2", snapshot(requests(7, old)))
    merged.ended(3)
    merged.update(1, "engine 0", snapshot(listed(new), requests(3, old)))
    merged.update(1, "engine 0", snapshot(listed(new)))
    assert value(merged, "xlaserve_requests_total", model="cats", version="1") == 15, "front 1 still shows it"
    merged.update(2, "front 1", snapshot(requests(1, new)))
    assert value(merged, "xlaserve_requests_total", model="cats", version="1") is None
    assert value(merged, "xlaserve_requests_total", model="cats", version="2") == 1


def test_nothing_is_forgotten_while_nobody_knows_which_versions_there_are() -> None:
    version = ("cats", "1")
    merged = Merged()
    merged.update(1, "engine 0", snapshot(listed(version), requests(3, version)))
    merged.update(2, "front 1", snapshot())
    merged.ended(1)
    merged.update(3, "engine 0", snapshot(listed()))
    merged.update(3, "engine 0", snapshot(listed(version)))
    assert value(merged, "xlaserve_requests_total", model="cats", version="1") == 3


def test_what_is_kept_of_the_dead_does_not_grow_with_their_number() -> None:
    merged, version = Merged(), ("cats", "1")
    for pid in range(200):
        merged.update(pid, "front 1", snapshot(requests(1, version), gauge("process_open_fds", 7.0)))
        merged.ended(pid)
    assert values(merged) == {("xlaserve_requests_total", str({"model": "cats", "version": "1"})): 200}


def test_every_gauge_has_its_rule() -> None:
    page = (ROOT / "docs" / "reference" / "metrics.md").read_text().partition("## loadtest")[0]
    gauges = re.findall(r"^\| `(\w+)` \|.*\| gauge \|", page, re.MULTILINE)
    assert len(gauges) > 20
    assert set(gauges) <= RULES.keys()
    assert rule_of(Family("xlaserve_requests", "counter", "", {})) is Rule.SUM


@pytest.mark.parametrize("text", [b"", b"{", b"1", b"[1]", b'[["a", "gauge", "", [[[], [["", "", "high"]]]]]]'])
def test_what_is_no_snapshot_is_refused(text: bytes) -> None:
    with pytest.raises(ValueError, match=r"Expecting|snapshot|values"):
        decode(text)
