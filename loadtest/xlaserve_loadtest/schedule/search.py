"""The search for the highest rate that a target sustains: pure but for the function that measures a rate.

Short runs find a candidate, which is not a result yet. A fresh run at the candidate confirms it; it is long enough for
the rule of `early_stopping` to pass, and to contain the server's slow spells. Where it does not confirm, a lower rate
is measured in a fresh run. Such a run errs with a probability of 1% where the rate is barely too high, and hardly ever
where it is much too high, so that at most 5% of searches end on a rate that is too high.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from xlaserve_loadtest.record.requests import Rows, Status
from xlaserve_loadtest.schedule import conditions
from xlaserve_loadtest.schedule.conditions import ConditionError
from xlaserve_loadtest.schedule.early_stopping import (
    BATCHES,
    MIN_BATCH,
    TailCount,
    inflation_of_run,
    least_requests,
    least_requests_to_pass,
)

PRECISION: Final = 0.04
"""Largest relative distance between the candidate and the lowest rate that failed in a short run."""
MAX_STEPS: Final = 20
"""Rates that bracketing and bisection may try each; both draw on one budget of twice as many."""
LOWEST: Final = 1 / 64
"""Share of the first guess below which no rate is tried: a target that sustains none of these has another problem."""
BACK_OFF: Final = (0.95, 0.94, 0.92, 0.85, 0.7, 0.7, 0.7, 0.7)
"""Rate of each confirming run over the rate of the run before, of the first one over the candidate."""
FAR_BACK: Final = 0.5
"""Largest such factor after a run with slow spells, which a slightly lower rate would not end."""
COVERED_S: Final = 600.0
"""Default of the least seconds of a confirming run: disturbances that are rarer than that are not covered."""
USUAL_STEPS: Final = 10
"""Usual number of short runs: three to find a bracket, five to halve it, and some repetitions."""
USUAL_CONFIRMING: Final = 2
"""Usual number of confirming runs."""
USUAL_INFLATION: Final = 10.0
"""Usual `variance_inflation`; behind an almost full queue it is over 100."""
COUNT_MARGIN: Final = 1.25
"""Requests that a short run is planned for, over those that the percentile needs: by chance fewer may arrive."""
GUESS_MARGIN: Final = 8.0
"""The same factor where such a run takes GUESS_S at most: a better candidate saves confirming runs, which are long."""
GUESS_S: Final = 20.0
HEADROOM: Final = 0.65
"""Share of the allowed requests over the limit with which a confirming run is still long enough to pass."""
SHORT_LIMITS: Final = 20.0
"""Least length of a short run over the limit of latency: a growing queue would not show in a shorter one."""
LONG_LIMITS: Final = 50.0
"""Least length of a confirming run over the limit of latency."""
MAX_RUN_S: Final = 600.0
"""Largest length of a run in seconds, unless `min_run_s` is more: the least length of a run of MLPerf."""
MIN_ANSWERED: Final = 0.97
"""Least share of the requests due in a window that must be answered in it, so that no queue grows for ever."""


@dataclass(frozen=True, slots=True)
class Slo:
    """A service level objective: a percentile of latency stays under a limit."""

    percentile: float
    limit_ms: float

    @classmethod
    def parse(cls, text: str) -> Slo:
        """Parses `p99<50ms`. Raises ValueError."""
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
    """The outcome of an offered rate, judged by an objective."""

    rate_per_s: float
    slo: Slo
    tail: TailCount
    """Requests over the limit: late, failed or dropped."""
    answered_share: float
    """Requests answered in the window over those due in it."""

    @classmethod
    def of(cls, rate_per_s: float, slo: Slo, rows: Rows, window_ns: tuple[int, int] | None, dropped: int) -> TriedRate:
        """Judges a block by all of its rows."""
        measured = rows[rows["measured"]]
        measured = measured[np.argsort(measured["scheduled_ns"], kind="stable")]
        latencies_ms = (measured["end_ns"] - measured["scheduled_ns"]) / 1e6
        latencies_ms[measured["status"] != Status.OK] = math.inf
        first_ns, last_ns = window_ns or (0, 0)
        in_window = (rows["end_ns"] >= first_ns) & (rows["end_ns"] < last_ns) & (rows["status"] == Status.OK)
        due = measured.size + dropped
        tail = TailCount(
            due,
            int((latencies_ms >= slo.limit_ms).sum()) + dropped,
            inflation_of_run(latencies_ms, slo.limit_ms, slo.percentile),
        )
        return cls(rate_per_s, slo, tail, float(in_window.sum()) / due if due else 0.0)

    @property
    def keeps_up(self) -> bool:
        """Whether no queue grew."""
        return self.answered_share >= MIN_ANSWERED

    @property
    def holds(self) -> bool:
        """Whether the rate seems to be sustained: enough to go on with the search, not to report the rate."""
        return (
            self.keeps_up
            and self.tail.requests >= least_requests(self.slo.percentile)
            and self.tail.share < 1 - self.slo.percentile / 100
        )

    @property
    def is_confirmed(self) -> bool:
        """Whether the objective was met with 99% confidence, and no queue grew."""
        return self.keeps_up and self.tail.is_surely_within(self.slo.percentile)

    @property
    def has_slow_spells(self) -> bool:
        """Whether requests over the limit come in so few clusters that no run of this length could confirm the
        percentile."""
        return self.tail.over > 0 and self.tail.requests < self.tail.inflation * least_requests(self.slo.percentile)

    @property
    def is_rejected(self) -> bool:
        """Whether the objective was missed with 99% confidence, or the queue grew."""
        return not self.keeps_up or self.tail.is_surely_beyond(self.slo.percentile)


Measure = Callable[[float, float, bool], Awaitable[TriedRate]]
"""Measures a rate: takes requests per second, seconds, and whether this is a confirming run."""


@dataclass(frozen=True, slots=True)
class Found:
    """The result of a search."""

    confirmed_per_s: float | None
    """The rate that a fresh run confirmed; None where no rate was confirmed."""
    rejected_per_s: float | None
    """The lowest rate above that was rejected in all of its runs, with 99% confidence in each; None where there is
    none."""
    tried: tuple[TriedRate, ...]


@dataclass
class Search:
    """One search. `min_run_s` is the least length of a run, `covered_s` the least length of a confirming run."""

    measure: Measure
    slo: Slo
    min_run_s: float
    covered_s: float = COVERED_S
    tried: list[TriedRate] = field(default_factory=list)

    async def run(self, start_per_s: float) -> Found:
        """Searches the highest rate that meets the objective; `start_per_s` is a first guess.

        The rate is doubled or halved until one rate holds and another does not; then the bracket is bisected by ratio
        to PRECISION. A rejected rate is measured once more. The candidate is confirmed, or lowered by BACK_OFF and
        measured again.
        """
        confirmed = None
        if (candidate := await self._candidate(start_per_s)) is not None:
            confirmed = await self._confirm(candidate)
        return Found(confirmed, lowest_rejected(self.tried, above=confirmed or 0.0), tuple(self.tried))

    async def _try(self, rate_per_s: float, seconds: float, *, confirms: bool) -> TriedRate:
        point = await self.measure(rate_per_s, seconds, confirms)
        self.tried.append(point)
        return point

    async def _candidate(self, rate: float) -> TriedRate | None:
        low: TriedRate | None = None
        high: float | None = None
        lowest = LOWEST * rate
        for _ in range(2 * MAX_STEPS):
            seconds = short_run_s(self.slo, rate, self.min_run_s)
            point = await self._try(rate, seconds, confirms=False)
            if point.is_rejected and point.answered_share:
                # A disturbance of the machine must not bound the whole search.
                point = await self._try(rate, seconds, confirms=False)
            if point.holds:
                low = point
            else:
                high = rate
            if low is None:
                rate /= 2
                if not point.answered_share or rate < lowest:
                    return None
            elif high is None:
                rate *= 2
            elif high / low.rate_per_s <= 1 + PRECISION:
                return low
            else:
                rate = math.sqrt(low.rate_per_s * high)
        return low

    async def _confirm(self, candidate: TriedRate) -> float | None:
        point = candidate
        for factor in BACK_OFF:
            has_spells = point is not candidate and point.has_slow_spells
            rate = point.rate_per_s * (min(factor, FAR_BACK) if has_spells else factor)
            seconds = confirming_run_s(self.slo, rate, max(self.min_run_s, self.covered_s), point.tail.inflation)
            point = await self._try(rate, seconds, confirms=True)
            if point.is_confirmed:
                return rate
        return None


def lowest_rejected(tried: Iterable[TriedRate], *, above: float) -> float | None:
    """Returns the lowest rate over `above` that was rejected in all of its runs; None where there is none."""
    rejected: dict[float, bool] = {}
    for point in tried:
        rejected[point.rate_per_s] = rejected.get(point.rate_per_s, True) and point.is_rejected
    return min((rate for rate, is_rejected in rejected.items() if is_rejected and rate > above), default=None)


def short_run_s(slo: Slo, rate_per_s: float, min_run_s: float) -> float:
    """Returns the seconds of a short run: enough requests for a rough estimate of the percentile."""
    least_s = max(least_requests(slo.percentile), BATCHES * MIN_BATCH) / rate_per_s
    wanted_s = max(COUNT_MARGIN * least_s, min(GUESS_MARGIN * least_s, GUESS_S))
    return min(max(min_run_s, SHORT_LIMITS * slo.limit_ms / 1000, wanted_s), MAX_RUN_S)


def confirming_run_s(slo: Slo, rate_per_s: float, min_run_s: float, inflation: float) -> float:
    """Returns the seconds of a run that can confirm a rate, given its `variance_inflation`."""
    wanted = inflation * least_requests_to_pass(slo.percentile, HEADROOM) / rate_per_s
    return max(min_run_s, min(max(LONG_LIMITS * slo.limit_ms / 1000, wanted), MAX_RUN_S))


def estimate_s(slo: Slo, rate_per_s: float, min_run_s: float, covered_s: float = COVERED_S) -> tuple[float, float]:
    """Returns the usual and the largest seconds of a search whose highest rate is near `rate_per_s`."""
    short = short_run_s(slo, rate_per_s, min_run_s)
    usual = confirming_run_s(slo, rate_per_s, max(min_run_s, covered_s), USUAL_INFLATION)
    return USUAL_STEPS * short + USUAL_CONFIRMING * usual, USUAL_STEPS * short + len(BACK_OFF) * max(
        MAX_RUN_S, covered_s
    )
