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
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

_OPERATORS: Final[Mapping[str, Callable[[float, float], bool]]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
}
LATENCIES: Final = ("p50", "p90", "p95", "p99", "p99.9", "mean", "max")
_RATES: Final = ("images/s", "requests/s")
_COUNTS: Final = ("errors", "dropped")
METRICS: Final = (*LATENCIES, *_RATES, *_COUNTS)
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

    @property
    def percentile(self) -> float | None:
        """The percentile that it is about, from 0 to 100; None where it is about another metric."""
        return float(self.metric[1:]) if self.metric[1:2].isdigit() else None

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
    if metric in LATENCIES:
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
    raise ConditionError(f"{text!r}: {what!r} is none of {', '.join(METRICS)}, nor a ratio such as xla/graph")
