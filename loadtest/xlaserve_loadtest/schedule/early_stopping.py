"""The early-stopping rule: how many requests may be over a limit while a percentile is under it, with 99% confidence.

The rule is from MLPerf's LoadGen (github.com/mlcommons/inference, loadgen/early_stopping.cc and the `EarlyStopping` of
loadgen/results.cc): of requests that are each over the limit with probability 1 - p, so few are over it in at most 1%
of runs. LoadGen takes requests as independent. Behind a queue they are not: requests over the limit come in clusters.
`variance_inflation` estimates the size of such a cluster, and `TailCount` divides its counts by it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

CONFIDENCE: Final = 0.99
BATCHES: Final = 20
"""Batches of consecutive requests whose counts are compared."""
MIN_BATCH: Final = 10
"""Least number of requests of a batch."""
_UPPER: Final = 19 / 10.117
"""A variance over BATCHES is at most this many times its estimate, with 95% confidence (chi-squared, 19 degrees)."""

_CLUSTERS: Final = 2
"""Clusters of requests over its own percentile that a batch must hold for an estimate of their size."""
_GROWS_AT: Final = 2.33
"""Standard deviations that the number of rises among batches exceeds by chance in 1% of runs."""


def probability_of_at_most(over: int, requests: int, share_over: float) -> float:
    """Returns the probability that at most `over` of `requests` independent requests are over the limit."""
    if over < 0:
        return 0.0
    if over >= requests:
        return 1.0
    ranks = np.arange(1, over + 1)
    steps = np.log((requests - ranks + 1) / ranks) + math.log(share_over) - math.log1p(-share_over)
    logs = requests * math.log1p(-share_over) + np.concatenate([[0.0], np.cumsum(steps)])
    top = float(logs.max())
    return min(float(np.exp(logs - top).sum()) * math.exp(top), 1.0)


def max_over(requests: int, percentile: float) -> int:
    """Returns the number of `requests` that may be over the limit of a percentile (0 to 100); -1 where `requests` is
    too small."""
    low, high = -1, requests
    while high - low > 1:
        middle = (low + high) // 2
        if probability_of_at_most(middle, requests, 1 - percentile / 100) <= 1 - CONFIDENCE:
            low = middle
        else:
            high = middle
    return low


def least_requests(percentile: float) -> int:
    """Returns how many requests a percentile needs: 44 for p90, 459 for p99.

    It is the least n for which one of n requests lies above the percentile with 99% confidence.
    """
    return math.ceil(math.log(1 - CONFIDENCE) / math.log(percentile / 100))


def least_requests_to_pass(percentile: float, share_of_allowed: float) -> int:
    """Returns the number of requests that show that a percentile is under a limit, where the share of requests over the
    limit is `share_of_allowed` of the share that the percentile allows."""
    requests = least_requests(percentile)
    while max_over(requests, percentile) < math.ceil(requests * (1 - percentile / 100) * share_of_allowed):
        requests = math.ceil(requests * 1.05)
    return requests


def least_requests_for_estimate(percentile: float) -> int:
    """Returns how many requests `percentile_estimate` needs: 64 for p90, 662 for p99."""
    requests = least_requests(percentile)
    while max_over(requests, percentile) < 1:
        requests += 1
    return requests


def percentile_estimate(latencies: NDArray[np.float64], percentile: float) -> float | None:
    """Returns LoadGen's early-stopping estimate of a percentile: an upper bound with 99% confidence where requests are
    independent; None with fewer than 64 requests for p90, 662 for p99.

    It is the t-th greatest latency, where t is how many requests may be over a limit.
    """
    allowed = max_over(latencies.size, percentile)
    if allowed < 1:
        return None
    return float(np.partition(latencies, latencies.size - allowed)[latencies.size - allowed])


def variance_inflation(latencies: NDArray[np.float64], percentile: float) -> float:
    """Returns how many requests carry as much information as one independent request; infinity for too few requests.

    `latencies` are in the order in which requests were due. Those over their own percentile are counted in BATCHES
    batches of consecutive requests; the counts vary by this factor more than the binomial law says. Such a variance
    is itself uncertain: the factor is its 95% upper bound.
    """
    if latencies.size < BATCHES * MIN_BATCH:
        return math.inf
    rank = math.ceil(latencies.size * percentile / 100) - 1
    quantile = np.partition(latencies, rank)[rank]
    is_over = latencies > quantile
    if not is_over.any():
        is_over = latencies >= quantile
    counts = np.array([batch.sum() for batch in np.array_split(is_over, BATCHES)], np.float64)
    share = counts.sum() / latencies.size
    binomial = latencies.size / BATCHES * share * (1 - share)
    return max(1.0, _UPPER * float(counts.var(ddof=1)) / binomial) if binomial else 1.0


def inflation_of_run(latencies: NDArray[np.float64], limit: float, percentile: float) -> float:
    """Returns how many requests of a run carry as much information about a limit as one independent request.

    The result is `variance_inflation`, or `inflation_with_spells` where that is less and latencies do not grow in the
    run.
    """
    found = variance_inflation(latencies, percentile)
    if latencies.size < BATCHES or grows(latencies):
        return found
    return min(found, inflation_with_spells(latencies, limit, percentile))


def inflation_with_spells(latencies: NDArray[np.float64], limit: float, percentile: float) -> float:
    """Returns `variance_inflation` for a run that contains all slow spells of the server; infinity where batches are
    too short.

    All requests of a slow spell are over the percentile of the whole run, even if far below the limit, so that no run
    would ever be long enough. Therefore two estimates are made and the larger is returned: from the counts of requests
    over the limit in each of BATCHES batches, and as the median over batches of the inflation within a batch, by the
    batch's own percentile. Valid only where latencies do not grow in the run.
    """
    batches = np.array_split(latencies, BATCHES)
    over = np.array([batch.mean() for batch in np.array_split(latencies >= limit, BATCHES)], np.float64)
    share = float(over.mean())
    binomial = share * (1 - share) * BATCHES / latencies.size if latencies.size else 0.0
    at_limit = _UPPER * float(over.var(ddof=1)) / binomial if binomial else 1.0
    within = float(np.median([variance_inflation(batch, percentile) for batch in batches]))
    # Behind a long queue a batch may hold only a part of a cluster, whose size would be underestimated.
    if within * _CLUSTERS > latencies.size / BATCHES * (1 - percentile / 100):
        return math.inf
    return max(1.0, at_limit, within)


def grows(latencies: NDArray[np.float64]) -> bool:
    """Returns whether latencies, in the order in which requests were due, grow in the run: H. B. Mann's trend test of
    the medians of BATCHES batches, at 99%."""
    medians = np.array([np.median(batch) for batch in np.array_split(latencies, BATCHES)])
    earlier, later = np.triu_indices(BATCHES, 1)
    # Compared and not subtracted: requests that failed have an infinite latency.
    rises = float((medians[later] > medians[earlier]).sum()) - float((medians[later] < medians[earlier]).sum())
    return rises > _GROWS_AT * math.sqrt(BATCHES * (BATCHES - 1) * (2 * BATCHES + 5) / 18)


@dataclass(frozen=True, slots=True)
class TailCount:
    """The number of requests over a limit."""

    requests: int
    over: int
    inflation: float
    """The result of `variance_inflation`; 1 takes requests as independent."""

    @property
    def share(self) -> float:
        """Share over the limit, from 0 to 1."""
        return self.over / self.requests if self.requests else 1.0

    def is_surely_within(self, percentile: float) -> bool:
        """Whether, with 99% confidence, fewer than 1 - p are over the limit."""
        over, requests = self.over / self.inflation, int(self.requests / self.inflation)
        return probability_of_at_most(math.ceil(over), requests, 1 - percentile / 100) <= 1 - CONFIDENCE

    def is_surely_beyond(self, percentile: float) -> bool:
        """Whether, with 99% confidence, more than 1 - p are over the limit."""
        over, requests = int(self.over / self.inflation), math.ceil(self.requests / max(self.inflation, 1.0))
        return over > 0 and probability_of_at_most(over - 1, requests, 1 - percentile / 100) >= CONFIDENCE
