"""The search for the highest rate that a target sustains: pure but for the function that measures a rate."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from xlaserve_loadtest.schedule import conditions
from xlaserve_loadtest.schedule.conditions import ConditionError

PRECISION: Final = 0.05
"""The rate that is found and the lowest that failed lie at most this share apart."""
MAX_STEPS: Final = 20
"""Rates that one part of the search tries at most."""
LOWEST: Final = 1 / 64
"""Share of the first guess below which no rate is tried: a target that holds none of these has another problem."""
REPEATS: Final = 2
"""How often a rate that was found must hold again."""
USUAL_STEPS: Final = 9
"""Rates that a search usually measures: two or three until it has a bracket, four to halve that, and REPEATS."""
BACK_OFF: Final = 0.95
"""A rate that did not hold when it was repeated is lowered by this factor."""
MIN_ANSWERED: Final = 0.97
"""Least share of the offered rate that must be answered in the window: no queue may grow for ever."""


@dataclass(frozen=True, slots=True)
class Slo:
    """A service level objective: a percentile of latency stays under a limit."""

    percentile: float
    limit_ms: float

    @classmethod
    def parse(cls, text: str) -> Slo:
        """Reads `p99<50ms`. Raises ValueError."""
        with suppress(ConditionError):
            condition = conditions.parse(text)
            if (
                condition.percentile
                and condition.op == "<"
                and condition.limit
                and not (condition.arm or condition.bound)
            ):
                return cls(condition.percentile, condition.limit)
        raise ValueError(f"expected a condition such as p99<50ms, got {text!r}")

    def __str__(self) -> str:
        return f"p{self.percentile:g}<{self.limit_ms:g}ms"


@dataclass(frozen=True, slots=True)
class TriedRate:
    """The outcome of an offered rate."""

    rate_per_s: float
    answered_per_s: float
    """Requests due in the window and answered before its end, over its length."""
    latency_ms: float | None
    """The percentile of the objective; None where there were too few answers."""
    failed: int
    """Errors and dropped requests."""

    def holds(self, slo: Slo) -> bool:
        """Whether the target sustained the rate: in time, without failures, without a growing queue."""
        return (
            not self.failed
            and self.latency_ms is not None
            and self.latency_ms < slo.limit_ms
            and self.answered_per_s >= MIN_ANSWERED * self.rate_per_s
        )


Measure = Callable[[float], Awaitable[TriedRate]]


async def highest_rate(measure: Measure, slo: Slo, start_per_s: float) -> float | None:
    """Returns the highest rate that held and held again, None where none did; `start_per_s` is a first guess.

    The rate is doubled or halved until one holds and another does not, then the bracket is bisected (by ratio) to
    PRECISION. The winner is measured REPEATS times more; when it fails it is lowered and tried again.
    """
    low, high = await _bracket(measure, slo, start_per_s)
    if low is None:
        return None
    for _ in range(MAX_STEPS):
        if high is None or high / low <= 1 + PRECISION:
            break
        middle = math.sqrt(low * high)
        if (await measure(middle)).holds(slo):
            low = middle
        else:
            high = middle
    for _ in range(MAX_STEPS):
        if all([(await measure(low)).holds(slo) for _ in range(REPEATS)]):
            return low
        low *= BACK_OFF
    return None


async def _bracket(measure: Measure, slo: Slo, start_per_s: float) -> tuple[float | None, float | None]:
    low: float | None = None
    high: float | None = None
    rate = start_per_s
    for _ in range(MAX_STEPS):
        point = await measure(rate)
        if point.holds(slo):
            low = rate
            rate *= 2
        else:
            high = rate
            rate /= 2
        is_hopeless = not point.answered_per_s or rate < LOWEST * start_per_s
        if (low is not None and high is not None) or is_hopeless:
            break
    return low, high
