from __future__ import annotations

from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families
from tests.loadtest.reports.published import published
from tests.loadtest.run_files import NewRun


def test_prometheus_has_bounds_verdicts_and_conditions(compared: NewRun, tmp_path: Path) -> None:
    text = published(compared(), tmp_path, "push-file", "p50>1ms", "p99.99>1ms")
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]

    def values(name: str, *labels: str) -> dict[tuple[str, ...], float]:
        own = [sample for sample in samples if sample.name == f"loadtest_{name}"]
        return {tuple(sample.labels[label] for label in labels): sample.value for sample in own}

    assert values("verdict", "arm", "verdict") == {
        ("xla", "faster"): 1,
        ("xla", "slower"): 0,
        ("xla", "inconclusive"): 0,
    }
    rate, bounds = values("images_per_second", "arm"), values("images_per_second_bound", "arm", "bound")
    assert bounds["xla", "low"] < rate["xla",] < bounds["xla", "high"]
    latency, limits = (
        values("latency_seconds", "arm", "quantile"),
        values("latency_bound_seconds", "arm", "quantile", "bound"),
    )
    assert limits["xla", "0.5", "low"] <= latency["xla", "0.5"] <= limits["xla", "0.5", "high"]
    assert values("condition_met", "condition") == {
        ("p50>1ms",): 1,
        ("p99.99>1ms",): 1,
        ("errors>0",): 0,
        ("differing>0",): 0,
    }
    assert values("condition_judged", "condition") == {
        ("p50>1ms",): 1,
        ("p99.99>1ms",): 0,
        ("errors>0",): 1,
        ("differing>0",): 0,
    }
    assert values("run_complete") == {(): 1}
