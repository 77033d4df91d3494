"""Percentiles of latency, with their bounds. Pure; docs/loadtest-method.md gives the reasons."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from xlaserve_loadtest.schedule.early_stopping import least_requests

PERCENTILES: Final = (50.0, 90.0, 95.0, 99.0, 99.9)

Nanoseconds = NDArray[np.int64]

AT_LEAST: Final = "\N{GREATER-THAN OR EQUAL TO} "
"""Stands before a latency that is a lower bound."""

_HIGHEST_NS: Final = 24 * 3600 * 10**9


@dataclass(frozen=True, slots=True)
class Percentile:
    """A percentile of latency with its 95% confidence bounds."""

    name: str
    """Name such as "p99"."""
    percentile: float
    """From 0 to 100."""
    value_ms: float | None
    """None where there were too few requests to support it."""
    low_ms: float | None
    high_ms: float | None
    """None where the bound lies beyond the values seen; both are None where the latencies can't tell."""
    needs: int
    """Number of requests needed to support it."""
    is_lower_bound: bool = False
    """Whether it falls among requests that were not answered: it is `value_ms` or more."""

    @property
    def text(self) -> str:
        """The value in words, such as "80.5 ms"; not where there is none."""
        return latency_text(self.value_ms or math.nan, is_lower_bound=self.is_lower_bound)


def latency_text(value_ms: float, *, is_lower_bound: bool = False) -> str:
    """Returns a latency in words, such as "80.5 ms"."""
    number = f"{value_ms:.3g}" if value_ms < 1000 else f"{value_ms:,.0f}"
    return f"{AT_LEAST if is_lower_bound else ''}{number} ms"


class Latencies:
    """Latencies in nanoseconds, from 1 to 24 hours, by rank.

    Requests that were not answered rank above all that were, whatever the least time is that each would have waited:
    they are censored values.
    """

    def __init__(self, latencies_ns: Nanoseconds, unanswered_ns: Nanoseconds | None = None) -> None:
        self.answered = int(latencies_ns.size)
        slowest_ns = latencies_ns.max(initial=0)
        self._unanswered_ns = np.maximum(np.sort(() if unanswered_ns is None else unanswered_ns), slowest_ns)
        self.count = self.answered + int(self._unanswered_ns.size)
        self._answered_ns = np.clip(np.sort(latencies_ns), 1, _HIGHEST_NS)

    def value_ms(self, percentile: float) -> float:
        """Returns the latency at `percentile` (0 to 100), whether the sample supports it or not."""
        return self._at_rank_ms(nearest_rank(self.count, percentile))

    def percentile(self, percentile: float, bounding_ranks: tuple[int | None, int | None] = (None, None)) -> Percentile:
        """Returns a percentile, where there are enough requests, with the latencies at its bounds' ranks."""
        name, needs = f"p{percentile:g}", least_requests(percentile)
        if self.count < needs:
            return Percentile(name, percentile, None, None, None, needs)
        low, high = bounding_ranks
        return Percentile(
            name,
            percentile,
            self.value_ms(percentile),
            self._at_rank_ms(low) if low else None,
            self._at_rank_ms(high) if high and high <= self.answered else None,
            needs,
            is_lower_bound=nearest_rank(self.count, percentile) > self.answered,
        )

    def _at_rank_ms(self, rank: int) -> float:
        if rank > self.answered:
            return float(self._unanswered_ns[rank - self.answered - 1]) / 1e6
        return float(self._answered_ns[rank - 1]) / 1e6


def at_nearest_rank(ordered: Nanoseconds, percentile: float) -> float:
    """Returns the value at a percentile of ascending values, at least 1; NaN where there are none."""
    if not ordered.size:
        return math.nan
    return float(max(ordered[nearest_rank(ordered.size, percentile) - 1], 1))


def nearest_rank(count: int, percentile: float) -> int:
    """Returns the rank, from 1, of a percentile of `count` values."""
    # Rounded first: 99.9% of 20,000 is 19,980, and a hair more in binary.
    return max(math.ceil(round(count * percentile / 100, 6)), 1)
