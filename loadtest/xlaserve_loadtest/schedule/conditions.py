"""Conditions on a run's figures, as `--fail-if`, `--abort-if` and `--slo` take them.

    condition = [arm ":"] metric [bound] op number [unit]
              | arm "/" baseline [measure] [bound] op number
              | [arm ":" | arm "/" baseline] "verdict" op ("faster" | "slower" | "inconclusive")
    metric    = "p" percentile | "mean" | "max"     unit us, ms (the default) or s; percentile such as 50 or 99.99
              | "images/s" | "requests/s"           no unit
              | "errors" | "dropped"                no unit, or % of all requests
              | "differing"                         outputs beyond the tolerance: no unit, or % of those compared
              | "goodput"                           answers within --slo: no unit for each second, or % of all requests
    measure   = "images/s" (the default) | "p50" | "p99"
    bound     = "lower" | "upper"                   of the 95% interval; without it the point value is compared
    op        = "<" | "<=" | ">" | ">=" | "=" | "==" | "!="

A condition without an arm applies to every arm and load. `arm/baseline` is a ratio over paired blocks. Only counts and
verdicts can be compared by = and !=, since a measured figure equals a number only by chance.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, Final, Literal

Bound = Literal["lower", "upper"]

_OPERATORS: Final[Mapping[str, Callable[[Any, Any], bool]]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "=": operator.eq,
    "<": operator.lt,
    ">": operator.gt,
}
RATIO: Final = "ratio"
VERDICT: Final = "verdict"
VERDICTS: Final = ("faster", "slower", "inconclusive")
RATIO_MEASURES: Final = ("images/s", "p50", "p99")
RATES: Final = ("images/s", "requests/s")
ERRORS: Final = "errors"
DROPPED: Final = "dropped"
DIFFERING: Final = "differing"
COUNTS: Final = (ERRORS, DROPPED)
"""Metrics that are numbers of requests, which are known during a run."""
_TIMES: Final = ("mean", "max")
GOODPUT: Final = "goodput"
METRICS: Final = (*_TIMES, *RATES, *COUNTS, DIFFERING, GOODPUT)
"""Metrics of one arm; any percentile is one, too."""
_UNIT_MS: Final = {
    name: Decimal(ms) for name, ms in {"": "1", "us": "1e-3", "µs": "1e-3", "ms": "1", "s": "1e3"}.items()
}
_EXAMPLES: Final = "'p99>80ms', 'errors>0', 'xla/graph upper<0.95' or 'verdict=slower'"
_FORM: Final = re.compile(
    rf"(?P<what>[^<>=!]*?)\s*(?P<op>{'|'.join(_OPERATORS)})\s*(?P<limit>[^<>=!]*)",
)
_NUMBER: Final = re.compile(r"(?P<number>(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3})?)\s*(?P<unit>%|[^\W\d_]*)")
_PERCENTILE: Final = re.compile(r"p([0-9]{1,2})(\.[0-9]{1,4})?")
_BOUNDED: Final = re.compile(r"(?P<what>.*\S)\s+(?P<bound>lower|upper)", re.DOTALL)
_LAST_WORD: Final = re.compile(r"(?P<first>.*\S)\s+(?P<last>\S+)", re.DOTALL)


class ConditionError(ValueError):
    """The text is not a condition; the message says what was expected."""


@dataclass(frozen=True, slots=True)
class Condition:
    """A parsed condition. `str` returns it in one form for all spellings."""

    text: str = field(compare=False)
    """The text that was parsed."""
    metric: str
    """A metric of the grammar, "ratio" or "verdict"."""
    op: str
    limit: float
    """Milliseconds, a share from 0 to 1, or a number; 0 in a condition on a verdict."""
    is_share: bool = False
    arm: str | None = None
    baseline: str | None = None
    """The baseline of a ratio or verdict."""
    bound: Bound | None = None
    """The bound of the 95% interval that is compared; None where the point value is."""
    measure: str | None = None
    """The measure of a ratio, one of RATIO_MEASURES; None in other conditions."""
    verdict: str | None = None
    """The verdict that is compared; None in other conditions."""

    @property
    def percentile(self) -> float | None:
        """The percentile, from 0 to 100; None where the metric is no percentile."""
        return float(self.metric[1:]) if _PERCENTILE.fullmatch(self.metric) else None

    @property
    def is_time(self) -> bool:
        """Whether the metric is a latency."""
        return self.metric in _TIMES or self.percentile is not None

    def holds(self, value: float | str) -> bool:
        """Whether `value` meets the condition."""
        return _OPERATORS[self.op](value, self.limit if self.verdict is None else self.verdict)

    def __str__(self) -> str:
        pair = f"{self.arm}/{self.baseline} "
        subject = pair if self.baseline is not None else "" if self.arm is None else f"{self.arm}:"
        what = self.measure if self.metric == RATIO else self.metric
        bound = f" {self.bound}" if self.bound else ""
        unit = "ms" if self.is_time else "%" if self.is_share else ""
        # The shortest decimal that reads back as the limit, exactly.
        limit = self.verdict or f"{Decimal(repr(self.limit)) * (100 if self.is_share else 1)}{unit}"
        return f"{subject}{what}{bound}{self.op}{limit}"


def parse(text: str) -> Condition:
    """Parses one condition. Raises ConditionError."""
    form = _FORM.fullmatch(text.strip())
    if form is None or not form["what"]:
        what = "nothing to compare before the operator" if form else "no comparison with <, <=, >, >=, = or !="
        raise ConditionError(f"{text!r}: {'empty' if not text.strip() else what}; expected such as {_EXAMPLES}")
    op = "==" if form["op"] == "=" else form["op"]
    what = form["what"]
    bound: Bound | None = None
    if bounded := _BOUNDED.fullmatch(what):
        what, bound = bounded["what"], "lower" if bounded["bound"] == "lower" else "upper"
    arm, baseline, metric, measure = _subject(text, what)
    right = form["limit"].strip()
    if metric == VERDICT:
        if op not in ("==", "!=") or right not in VERDICTS or bound:
            raise ConditionError(f"{text!r}: expected verdict= or verdict!= and one of {', '.join(VERDICTS)}")
        return Condition(text, VERDICT, op, 0.0, arm=arm, baseline=baseline, verdict=right)
    number = _NUMBER.fullmatch(right)
    if number is None:
        raise ConditionError(f"{text!r}: expected a number such as 80, 0.95 or 1e2, got {right!r}")
    limit, is_share = _limit(text, metric, Decimal(number["number"]), number["unit"])
    if op in ("==", "!=") and (metric not in (*COUNTS, DIFFERING) or is_share):
        name = measure or metric
        raise ConditionError(f"{text!r}: {name} is measured, and equal to a number only by chance; use < or >")
    if bound and metric != RATIO and metric not in RATES and not _PERCENTILE.fullmatch(metric):
        raise ConditionError(
            f"{text!r}: {metric} has no interval, so no {bound} bound; ratios, rates and percentiles do"
        )
    return Condition(text, metric, op, limit, is_share, arm, baseline, bound, measure)


def _subject(text: str, what: str) -> tuple[str | None, str | None, str, str | None]:
    """Returns the arm, the baseline, the metric and the measure of a ratio."""
    arm, colon, last = (part.strip() for part in what.rpartition(":"))
    if (metric := _metric(text, last)) and (arm or not colon):
        return arm or None, None, metric, None
    pair, measure = what, RATIO_MEASURES[0]
    last_word = _LAST_WORD.fullmatch(what)
    if last_word and _pair(last_word["first"]) and last_word["last"] in (*RATIO_MEASURES, VERDICT):
        pair, measure = last_word["first"], last_word["last"]
    if names := _pair(pair):
        is_verdict = measure == VERDICT
        return *names, VERDICT if is_verdict else RATIO, None if is_verdict else measure
    if last_word and _metric(text, last_word["last"]):
        hint = f"write {last_word['first'].strip()}:{last_word['last']}"
        raise ConditionError(f"{text!r}: {hint} for that of one arm")
    known = ", ".join(("p99 or another percentile", *METRICS, VERDICT))
    raise ConditionError(f"{text!r}: {what!r} is none of {known}, nor a ratio such as xla/graph")


def _pair(text: str) -> tuple[str, str] | None:
    arm, _, baseline = (part.strip() for part in text.partition("/"))
    return (arm, baseline) if arm and baseline else None


def _metric(text: str, name: str) -> str | None:
    """Returns the metric's name in one form for all spellings; None where `name` is no metric."""
    if _PERCENTILE.fullmatch(name):
        percentile = float(name[1:])
        if not percentile:
            raise ConditionError(f"{text!r}: a percentile lies between 0 and 100; the least latency is no metric")
        return f"p{percentile:g}"
    if re.fullmatch(r"p[0-9.]+", name):
        raise ConditionError(
            f"{text!r}: {name}: expected a percentile between 0 and 100 with four decimals at most; "
            "the greatest latency is max"
        )
    return name if name in (*METRICS, VERDICT) else None


def _limit(text: str, metric: str, number: Decimal, unit: str) -> tuple[float, bool]:
    """Returns the limit in the metric's unit, and whether it is a share."""
    if metric in (*COUNTS, DIFFERING, GOODPUT):
        if unit not in ("", "%"):
            raise ConditionError(f"{text!r}: {metric} is a number, or a share in %, not in {unit!r}")
        number /= 100 if unit else 1
    elif metric in _TIMES or _PERCENTILE.fullmatch(metric):
        if unit not in _UNIT_MS:
            raise ConditionError(f"{text!r}: {metric} is a time in us, ms or s, not in {unit!r}")
        number *= _UNIT_MS[unit]
    elif unit:
        raise ConditionError(f"{text!r}: {metric} takes a number without a unit, not {unit!r}")
    limit = float(number)
    if not math.isfinite(limit):
        raise ConditionError(f"{text!r}: the number is too large")
    return limit, unit == "%"
