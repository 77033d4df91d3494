"""Judges a run by conditions on its figures, as `--fail-if` and `--slo` take them; see `schedule.conditions`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from xlaserve_loadtest.analysis.compare import Comparison
from xlaserve_loadtest.analysis.intervals import MIN_BLOCKS, Estimate
from xlaserve_loadtest.analysis.percentiles import PERCENTILES, latency_text
from xlaserve_loadtest.analysis.points import Point
from xlaserve_loadtest.analysis.verdict import MEASURE_NAMES, Verdict
from xlaserve_loadtest.record.lines import Equality
from xlaserve_loadtest.schedule import conditions
from xlaserve_loadtest.schedule.conditions import RATIO, VERDICT, Condition
from xlaserve_loadtest.schedule.early_stopping import least_requests

_INVERSE: Final[dict[Verdict, Verdict]] = {"faster": "slower", "slower": "faster", "inconclusive": "inconclusive"}


@dataclass(frozen=True, slots=True)
class Judged:
    """A condition and what was found."""

    condition: Condition
    is_met: bool
    """Whether it is met, or can't be judged: a check that saw nothing must not pass."""
    is_judged: bool
    """Whether there was a figure to judge by."""
    found: str
    """The figure that decides and where it was found, or why there is none."""
    option: str = "--fail-if"
    """The option that asked for it."""

    def __str__(self) -> str:
        doubt = "" if self.is_judged else "can't be judged: "
        return f"{self.condition.text}: {doubt}{self.found}"


@dataclass(frozen=True, slots=True)
class _Figure:
    """A figure that a condition is about."""

    value: float | Verdict | None
    where: str
    shown: str
    """The figure as it is shown; why there is none where `value` is None."""


def judge(
    points: Sequence[Point],
    comparisons: Sequence[Comparison],
    conditions: Iterable[Condition],
    equalities: Sequence[Equality] = (),
    *,
    these_processes: bool = False,
) -> list[Judged]:
    """Judges each condition. One is met where any of the figures that it is about meets it.

    Verdicts and intervals that hold for two server processes alone are judged only with `these_processes`: other
    processes of the same code may differ by more.
    """
    if these_processes:
        comparisons = [dataclasses.replace(each, holds="") for each in comparisons]
    return [_judge(condition, list(_figures(condition, points, comparisons, equalities))) for condition in conditions]


def value_of(point: Point, condition: Condition) -> float | None:
    """Returns the metric's value at one load of one arm; None where it is not known. Not for ratios and verdicts."""
    errors = sum(point.errors.values())
    match condition.metric:
        case "mean":
            return point.mean_ms
        case "max":
            return point.max_ms
        case "images/s" | "requests/s" as name:
            rate = point.images_per_s if name == "images/s" else point.requests_per_s
            return _bounded(rate, condition)
        case conditions.ERRORS | conditions.DROPPED | conditions.DIFFERING as name:
            counts = {conditions.ERRORS: errors, conditions.DROPPED: point.dropped}
            count, total = (point.differing, point.compared) if name not in counts else (counts[name], point.due)
            return None if not total else count / total if condition.is_share else float(count)
        case conditions.GOODPUT:
            goodput = point.goodput
            return None if goodput is None else goodput.share if condition.is_share else goodput.per_s
        case name if condition.percentile is not None:
            percentile = point.percentile(name)
            return {"lower": percentile.low_ms, "upper": percentile.high_ms}.get(
                condition.bound or "", percentile.value_ms
            )
        case name:
            raise ValueError(f"{name}: expected a metric that has a value here")


def percentiles(conditions: Iterable[Condition | None]) -> tuple[float, ...]:
    """Returns the percentiles to compute: the usual ones and those of the conditions, ascending."""
    asked = (condition.percentile for condition in conditions if condition is not None)
    return tuple(sorted({*PERCENTILES, *(percentile for percentile in asked if percentile is not None)}))


def _judge(condition: Condition, figures: Sequence[_Figure]) -> Judged:
    unknown = next((figure for figure in figures if figure.value is None), None)
    met = next((figure for figure in figures if figure.value is not None and condition.holds(figure.value)), None)
    if met is not None:
        return Judged(condition, True, True, _placed(met))
    if unknown is not None:
        return Judged(condition, True, False, _placed(unknown))
    # Of those that do not meet it, the one that comes closest.
    known = [(figure.value, figure) for figure in figures if isinstance(figure.value, float)]
    closest = max(known, key=lambda pair: pair[0] * (1 if ">" in condition.op else -1))[1] if known else figures[0]
    return Judged(condition, False, True, _placed(closest))


def _placed(figure: _Figure) -> str:
    return f"{figure.where}: {figure.shown}" if figure.where else figure.shown


def _figures(
    condition: Condition, points: Sequence[Point], comparisons: Sequence[Comparison], equalities: Sequence[Equality]
) -> Iterator[_Figure]:
    """Yields the figures that a condition is about, at least one."""
    if condition.metric in (RATIO, VERDICT):
        yield from _compared(condition, points, comparisons)
        return
    if condition.metric == conditions.DIFFERING:
        known = list(_differing(condition, points, equalities))
        yield from known or [_Figure(None, condition.arm or "", "no outputs were compared")]
        return
    concerned = [point for point in points if condition.arm in (None, point.arm)]
    if not concerned:
        yield _Figure(None, "", f"{condition.arm} was not measured" if condition.arm else "nothing was measured")
    for point in concerned:
        value = value_of(point, condition)
        shown = _why_not(point, condition) if value is None else _shown(value, condition, point)
        # Where it is a lower bound, the true value may be any above it.
        is_sure = value is None or condition.holds(value) != ("<" in condition.op)
        if _is_lower_bound(point, condition) and not is_sure:
            value, shown = None, f"{shown}, as {point.unanswered:,} were not answered"
        yield _Figure(value, f"{point.arm}, {point.label}", shown)


def _differing(condition: Condition, points: Sequence[Point], equalities: Sequence[Equality]) -> Iterator[_Figure]:
    """Yields how many outputs differ: from the baseline's before the run, from the request's own under load."""
    for each in equalities:
        if condition.arm in (None, each.arm):
            of = f" for {each.model}" if each.model else ""
            if each.incomparable:
                # As if all differed: a check that saw nothing must not pass.
                shown = f"outputs can't be compared: {each.incomparable}"
                yield _Figure(1.0 if condition.is_share else math.inf, each.pair, shown)
                continue
            differing = each.differing_images / (each.images if condition.is_share else 1)
            shown = f"{each.differing_images:,} of {each.images:,} images"
            yield _Figure(differing, f"{each.pair}{of}", shown)
    for point in points:
        if condition.arm in (None, point.arm) and (value := value_of(point, condition)) is not None:
            yield _Figure(value, f"{point.arm}, {point.label}", f"answers: {point.differing_text}")


def _is_lower_bound(point: Point, condition: Condition) -> bool:
    """Whether the true value may lie above the one that is known, since requests were not answered."""
    if condition.metric in ("mean", "max"):
        return point.unanswered > 0
    is_point_value = condition.percentile is not None and condition.bound is None
    return is_point_value and point.percentile(condition.metric).is_lower_bound


def _compared(condition: Condition, points: Sequence[Point], comparisons: Sequence[Comparison]) -> Iterator[_Figure]:
    """Yields the ratios or verdicts of the comparisons that a condition is about."""
    both_ways = [*comparisons, *(_inverted(each) for each in comparisons)] if condition.baseline else comparisons
    concerned = [
        each
        for each in both_ways
        if (condition.arm is None and not each.is_control)
        or (each.arm == condition.arm and condition.baseline in (None, each.baseline))
    ]
    for each in concerned:
        where = each.label if condition.baseline else f"{each.arm} / {each.baseline}, {each.label}"
        if each.holds and (condition.metric == VERDICT or condition.bound):
            yield _Figure(None, where, f"it holds {each.holds}; --these-processes judges it all the same")
        elif condition.metric == VERDICT:
            yield _of_verdict(condition, each, where)
        else:
            yield _of_ratio(condition, each, where)
    if not concerned:
        yield from _uncompared(condition, points, comparisons)


def _of_verdict(condition: Condition, comparison: Comparison, where: str) -> _Figure:
    ratio, reason = comparison.ratio, comparison.reason
    is_withheld = comparison.verdict == "inconclusive"
    if ratio is not None and ratio.low is not None and ratio.high is not None:
        is_better = (ratio.low > 1) == (comparison.decides not in ("p50", "p99"))
        claimed = "inconclusive" if ratio.low <= 1 <= ratio.high else "faster" if is_better else "slower"
        is_withheld &= comparison.decides in comparison.doubts and condition.holds(claimed)
    if is_withheld and not condition.holds(comparison.verdict):
        # What would have met the condition is in doubt, not refuted.
        return _Figure(None, where, reason)
    return _Figure(comparison.verdict, where, comparison.verdict + (f" ({reason})" if reason else ""))


def _of_ratio(condition: Condition, comparison: Comparison, where: str) -> _Figure:
    measure = next(each for each, name in MEASURE_NAMES.items() if name == condition.measure)
    ratio = comparison.ratios[measure]
    if ratio is None:
        return _Figure(None, where, f"too few answers to compare {condition.measure}")
    if (value := _bounded(ratio, condition)) is None:
        return _Figure(
            None, where, f"an interval takes {MIN_BLOCKS} pairs of {comparison.unit}; got {comparison.pairs}"
        )
    if condition.bound and (doubt := comparison.doubts.get(measure)):
        # As if the interval had no end: that is judged only where such an interval and this one do not meet it.
        unbounded = 0.0 if condition.bound == "lower" else math.inf
        if condition.holds(value) or condition.holds(unbounded):
            return _Figure(None, where, doubt)
    interval = "" if ratio.low is None or ratio.high is None else f" (95% interval {ratio.low:.3f} to {ratio.high:.3f})"
    return _Figure(value, where, f"{ratio.value:.3f}{interval}")


def _uncompared(condition: Condition, points: Sequence[Point], comparisons: Sequence[Comparison]) -> Iterator[_Figure]:
    """Yields what is known of two arms that were not compared with each other: the ratio of their images/s."""
    arm, baseline = condition.arm, condition.baseline
    rates = {(point.arm, point.label): point.images_per_s.value for point in points if point.images_per_s}
    ratios = [
        (load, rate / rates[baseline, load])
        for (name, load), rate in rates.items()
        if name == arm and baseline is not None and rates.get((baseline, load))
    ]
    if ratios and condition.measure == "images/s" and condition.bound is None:
        for load, value in ratios:
            yield _Figure(value, load, f"{value:.3f}")
        return
    if arm is None or baseline is None:
        yield _Figure(None, "", f"{arm or 'no arm'} was {'not ' if arm else ''}compared with a baseline")
    elif {(arm, label) for _, label in rates} & set(rates) and {(baseline, label) for _, label in rates} & set(rates):
        others = ", ".join(dict.fromkeys(each.baseline for each in comparisons if not each.is_control))
        compared = f"arms were compared with {others} alone" if others else "no arms were compared"
        yield _Figure(None, "", f"{arm} and {baseline} were not compared with each other: {compared}")
    else:
        yield _Figure(None, "", f"{arm} and {baseline} were not both measured")


def _inverted(comparison: Comparison) -> Comparison:
    """Returns the baseline over the arm."""

    def inverse(ratio: Estimate | None) -> Estimate | None:
        if ratio is None:
            return None
        bounds = [None if bound is None else 1 / bound for bound in (ratio.high, ratio.low)]
        return Estimate(1 / ratio.value, *bounds)

    return dataclasses.replace(
        comparison,
        arm=comparison.baseline,
        baseline=comparison.arm,
        ratios={measure: inverse(ratio) for measure, ratio in comparison.ratios.items()},
        verdict=_INVERSE[comparison.verdict],
    )


def _bounded(estimate: Estimate | None, condition: Condition) -> float | None:
    """Returns the value of an estimate, or the bound that the condition names."""
    if estimate is None:
        return None
    return {"lower": estimate.low, "upper": estimate.high}.get(condition.bound or "", estimate.value)


def _why_not(point: Point, condition: Condition) -> str:
    percentile = condition.percentile
    if not point.due:
        return "no request was measured"
    if condition.metric == conditions.GOODPUT:
        return "the run had no limit to be within: --slo"
    if percentile is not None and point.percentile(condition.metric).value_ms is None:
        return f"{condition.metric} needs {least_requests(percentile):,} answers, got {point.due:,}"
    if condition.bound and point.requests:
        return f"no {condition.bound} bound: too few answers or blocks"
    return f"too few answers ({point.requests})"


def _shown(value: float, condition: Condition, point: Point) -> str:
    if condition.is_time:
        return latency_text(value, is_lower_bound=_is_lower_bound(point, condition))
    return f"{value:.2%}" if condition.is_share else f"{value:,.6g}"
