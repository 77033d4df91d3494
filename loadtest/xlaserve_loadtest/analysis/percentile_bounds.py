"""Bounds of percentiles, from latencies that follow each other. Pure; docs/loadtest-method.md gives the reasons."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from xlaserve_loadtest.analysis.intervals import t_quantile
from xlaserve_loadtest.analysis.percentiles import Nanoseconds, nearest_rank

_BATCHES: Final = 4
"""Few and long: a batch must outlast a queue, or batches are no more independent than requests are."""
_CONFIDENCE: Final = 0.95
_MIN_INDEPENDENT: Final = 20
"""Independent latencies that the requests must be worth."""
_MANY: Final = 2000
"""Requests that show how long a queue stays busy: at 90% utilisation some 300 in a row are slow together."""
_MIN_INDEPENDENT_OF_FEW: Final = 100
"""The same of fewer requests than that, whose correlation may be longer than they show."""
_MIN_MEANS: Final = 8
"""Means that a variance is estimated from."""


class PercentileBounds:
    """Bounds of percentiles by batch means.

    Requests of one busy period of a queue are slow together, so that a thousand of them may say as little as ten
    independent ones. Bounds come from how much a few long stretches of the run differ in their share of slow requests.
    """

    def __init__(self, blocks: Sequence[Nanoseconds]) -> None:
        """Takes latencies in the order in which requests were due, an array for each block."""
        blocks = [block for block in blocks if block.size]
        self.count = sum(block.size for block in blocks)
        self._batches = [np.sort(batch) for batch in _batches(blocks)]
        needs = _MIN_INDEPENDENT if self.count >= _MANY else _MIN_INDEPENDENT_OF_FEW
        self._is_known = self.count / correlation_requests(blocks) >= needs if blocks else False
        self._ordered = np.sort(np.concatenate(self._batches)) if blocks else np.empty(0, np.int64)

    def ranks(self, percentile: float) -> tuple[int | None, int | None]:
        """Returns the ranks, from 1, of two latencies that hold the percentile between them with 95% confidence.

        None where a bound lies beyond the values seen. Both are None where the latencies are too few or too correlated
        to tell.
        """
        if not self._is_known or len(self._batches) < _BATCHES:
            return None, None
        at = self._ordered[nearest_rank(self.count, percentile) - 1]
        sizes = np.array([batch.size for batch in self._batches])
        below = np.array([np.searchsorted(batch, at, side="right") for batch in self._batches])
        excess = below - sizes * (below.sum() / self.count)
        batches, share = len(self._batches), percentile / 100
        variance = float((excess**2).sum()) * batches / (batches - 1) / self.count**2
        # Batches may agree by chance; independent requests would err by this much at least.
        error = math.sqrt(max(variance, share * (1 - share) / self.count))
        half = t_quantile(batches - 1, _CONFIDENCE) * error
        low, high = math.floor((share - half) * self.count), math.ceil((share + half) * self.count) + 1
        return low if low >= 1 else None, high if high <= self.count else None


def correlation_requests(blocks: Sequence[Nanoseconds]) -> float:
    """Returns how many successive latencies say as much as one independent latency, at least 1.

    The variance of means over 1, 2, 4, ... requests falls with their number only where those are independent (H.
    Flyvbjerg and H. G. Petersen, 1989).
    """
    means: list[NDArray[np.float64]] = [block.astype(np.float64) for block in blocks]
    everything = np.concatenate(means)
    centre, variance = everything.mean(), everything.var()
    if not variance:
        return 1.0
    size, longest = 1, 1.0
    while True:
        means = [one[: one.size // 2 * 2].reshape(-1, 2).mean(axis=1) for one in means]
        size *= 2
        found = np.concatenate(means)
        if found.size < _MIN_MEANS:
            return longest
        longest = max(longest, size * float(((found - centre) ** 2).mean() / variance))


def _batches(blocks: Sequence[Nanoseconds]) -> list[Nanoseconds]:
    """Returns stretches of about the same length: neighbouring blocks together, or parts of few blocks."""
    if len(blocks) >= _BATCHES:
        edges = np.linspace(0, len(blocks), _BATCHES + 1).round().astype(int).tolist()
        return [np.concatenate(blocks[first:last]) for first, last in pairwise(edges)]
    parts = math.ceil(_BATCHES / len(blocks)) if blocks else 0
    return [part for block in blocks for part in np.array_split(block, parts) if part.size]
