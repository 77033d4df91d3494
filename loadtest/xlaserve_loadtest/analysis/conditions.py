"""Conditions on a run's figures, as `--fail-if` and `--slo` take them: `p99>80ms`, `errors>0`, `xla/graph<1.0`.

    condition  = [arm ":"] metric op number [unit]  |  arm "/" arm op number
    metric     = "p50" | "p90" | "p95" | "p99" | "p99.9" | "mean" | "max"          unit us, ms (the default) or s
               | "images/s" | "requests/s"                                         no unit
               | "errors" | "dropped"                                              no unit, or % of all requests
    op         = "<" | "<=" | ">" | ">="

Without an arm it is about every arm and load. `arm/arm` is the ratio of images/s, over paired blocks where these arms
were compared.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from xlaserve_loadtest.analysis.compare import Comparison
from xlaserve_loadtest.analysis.points import Point

_OPERATORS: Final[Mapping[str, Callable[[float, float], bool]]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
}
_LATENCIES: Final = ("p50", "p90", "p95", "p99", "p99.9", "mean", "max")
_RATES: Final = ("images/s", "requests/s")
_COUNTS: Final = ("errors", "dropped")
_UNIT_MS: Final = {"": 1.0, "us": 1e-3, "ms": 1.0, "s": 1e3}
_FORM: Final = re.compile(
    r"\s*(?P<what>[^<>=]+?)\s*(?P<op><=|>=|<|>)\s*(?P<number>\d+\.?\d*|\.\d+)\s*(?P<unit>%|[a-z]*)\s*"
)


class ConditionError(ValueError):
    """The text is not a condition; the message says what was expected."""


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition, parsed. Times are milliseconds, shares from 0 to 1."""

    text: str
    metric: str
    """One of the metrics, or "ratio"."""
    op: str
    limit: float
    is_share: bool = False
    arm: str | None = None
    baseline: str | None = None
    """The baseline of a ratio."""

    def holds(self, value: float) -> bool:
        """Whether `value` meets the condition."""
        return _OPERATORS[self.op](value, self.limit)


def parse(text: str) -> Condition:
    """Reads one condition. Raises ConditionError."""
    form = _FORM.fullmatch(text)
    if form is None:
        raise ConditionError(f"{text!r}: expected METRIC, one of < <= > >=, and a number, such as 'p99>80ms'")
    what, op, unit, limit = form["what"], form["op"], form["unit"], float(form["number"])
    arm, _, metric = what.rpartition(":")
    if metric in _LATENCIES:
        if unit not in _UNIT_MS:
            raise ConditionError(f"{text!r}: {metric} is a time in us, ms or s, not in {unit!r}")
        return Condition(text, metric, op, limit * _UNIT_MS[unit], arm=arm or None)
    if metric in _COUNTS:
        if unit not in ("", "%"):
            raise ConditionError(f"{text!r}: {metric} is a number, or a share in %, not in {unit!r}")
        is_share = unit == "%"
        return Condition(text, metric, op, limit / 100 if is_share else limit, is_share, arm=arm or None)
    if unit:
        raise ConditionError(f"{text!r}: {what} takes a number without a unit, not {unit!r}")
    if metric in _RATES:
        return Condition(text, metric, op, limit, arm=arm or None)
    first, slash, second = what.partition("/")
    if slash and first and second:
        return Condition(text, "ratio", op, limit, arm=first.strip(), baseline=second.strip())
    known = ", ".join((*_LATENCIES, *_RATES, *_COUNTS))
    raise ConditionError(f"{text!r}: {what!r} is none of {known}, nor a ratio such as xla/graph")


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
        case name:
            return point.percentile(name).value_ms


def _failure(points: Sequence[Point], condition: Condition) -> str | None:
    concerned = [point for point in points if condition.arm in (None, point.arm)]
    if not concerned:
        return f"{condition.text}: can't be judged: {condition.arm or 'nothing'} was not measured"
    for point in concerned:
        value = value_of(point, condition)
        where = f"{point.arm}, {point.label}"
        if value is None:
            return f"{condition.text}: can't be judged: {where}: too few answers ({point.requests})"
        if condition.holds(value):
            return f"{condition.text}: {where}: {_shown(value, condition)}"
    return None


def _ratio_failure(points: Sequence[Point], comparisons: Sequence[Comparison], condition: Condition) -> str | None:
    arm, baseline = condition.arm, condition.baseline
    ratios = {
        found.label: estimate.value
        for found in comparisons
        if (found.arm, found.baseline) == (arm, baseline) and (estimate := found.ratios["images_per_s"])
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


def _shown(value: float, condition: Condition) -> str:
    if condition.metric in _LATENCIES:
        return f"{value:.3g} ms" if value < 1000 else f"{value:,.0f} ms"
    return f"{value:.2%}" if condition.is_share else f"{value:,.6g}"
