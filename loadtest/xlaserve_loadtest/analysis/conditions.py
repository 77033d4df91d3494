"""Judges a run by conditions on its figures, as `--fail-if` and `--slo` take them; see `schedule.conditions`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from xlaserve_loadtest.analysis.compare import Comparison
from xlaserve_loadtest.analysis.percentiles import latency_text
from xlaserve_loadtest.analysis.points import Point
from xlaserve_loadtest.schedule.conditions import LATENCIES, Condition


def failures(points: Sequence[Point], comparisons: Sequence[Comparison], conditions: Iterable[Condition]) -> list[str]:
    """Returns a sentence for each condition that a run meets, or that can't be judged; empty where all is well.

    A condition that can't be judged counts as met: a check that saw nothing must not pass.
    """
    sentences = (
        _ratio_failure(points, comparisons, condition) if condition.metric == "ratio" else _failure(points, condition)
        for condition in conditions
    )
    return [sentence for sentence in sentences if sentence is not None]


def value_of(point: Point, condition: Condition) -> float | None:
    """Returns the metric's value at one load of one arm; None where it is not known. Not for ratios."""
    errors = sum(point.errors.values())
    match condition.metric:
        case "mean":
            return point.mean_ms
        case "max":
            return point.max_ms
        case "images/s":
            return point.images_per_s.value if point.images_per_s else None
        case "requests/s":
            return point.requests_per_s.value if point.requests_per_s else None
        case "errors" | "dropped":
            count = float(errors if condition.metric == "errors" else point.dropped)
            due = point.requests + errors + point.dropped
            return (count / due if due else None) if condition.is_share else count
        case name if condition.percentile is not None:
            return point.percentile(name).value_ms
        case name:
            raise ValueError(f"{name}: expected a metric that has a value here")


def _failure(points: Sequence[Point], condition: Condition) -> str | None:
    concerned = [point for point in points if condition.arm in (None, point.arm)]
    if not concerned:
        return f"{condition.text}: can't be judged: {condition.arm or 'nothing'} was not measured"
    for point in concerned:
        value = value_of(point, condition)
        where = f"{point.arm}, {point.label}"
        if value is None:
            return f"{condition.text}: can't be judged: {where}: too few answers ({point.requests})"
        shown, is_met = _shown(value, condition, point), condition.holds(value)
        if _is_lower_bound(point, condition) and is_met == condition.op.startswith("<"):
            # The value may be any above it.
            return f"{condition.text}: can't be judged: {where}: {shown}, as {point.unanswered:,} were not answered"
        if is_met:
            return f"{condition.text}: {where}: {shown}"
    return None


def _is_lower_bound(point: Point, condition: Condition) -> bool:
    """Whether the true value may lie above the one that is known, since requests were not answered."""
    if condition.metric in ("mean", "max"):
        return point.unanswered > 0
    return condition.percentile is not None and point.percentile(condition.metric).is_lower_bound


def _ratio_failure(points: Sequence[Point], comparisons: Sequence[Comparison], condition: Condition) -> str | None:
    arm, baseline = condition.arm, condition.baseline
    ratios = {
        comparison.label: estimate.value
        for comparison in comparisons
        if (comparison.arm, comparison.baseline) == (arm, baseline) and (estimate := comparison.ratios["images_per_s"])
    }
    if not ratios:
        rates = {(point.arm, point.label): point.images_per_s.value for point in points if point.images_per_s}
        ratios = {
            load: rate / rates[baseline, load]
            for (name, load), rate in rates.items()
            if name == arm and baseline is not None and rates.get((baseline, load))
        }
    if not ratios:
        return f"{condition.text}: can't be judged: {arm} and {baseline} were not both measured"
    for load, value in ratios.items():
        if condition.holds(value):
            return f"{condition.text}: {load}: {value:.3f}"
    return None


def _shown(value: float, condition: Condition, point: Point) -> str:
    if condition.metric in LATENCIES:
        return latency_text(value, is_lower_bound=_is_lower_bound(point, condition))
    return f"{value:.2%}" if condition.is_share else f"{value:,.6g}"
