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
from xlaserve_loadtest.analysis.settling import grows

_BATCHES: Final = 4
"""Few and long: a batch must outlast a queue, or batches are no more independent than requests are."""
_CONFIDENCE: Final = 0.99
"""Of Student's t. 95% is said: long batches of a queue are not quite independent, nor are their shares normal."""
_MANY: Final = 10_000
"""Requests of a run that is long enough to have seen a queue's slow times."""
_MIN_INDEPENDENT: Final = 100
"""Independent latencies that fewer requests than that must be worth, or a slow time may still come."""
_MIN_INDEPENDENT_OF_BLOCK: Final = 8
"""The same for each block, or a queue may be cut off by its end."""
_MIN_MEANS: Final = 8
"""Means that a variance is estimated from."""


class PercentileBounds:
    """Bounds of percentiles by batch means.

    Requests of one busy period of a queue are slow together, so that a thousand of them may say as little as ten
    independent ones. Bounds come from how much a few long stretches of the run differ in their share of slow requests,
    or how much server processes do. A run that is too short to have seen the slow times of its queue has lower bounds
    only.
    """

    def __init__(self, blocks: Sequence[Nanoseconds], servers: Sequence[int | None] | None = None) -> None:
        """Takes latencies in the order in which requests were due, an array for each block, and the blocks' servers."""
        pairs = zip(blocks, servers or [None] * len(blocks), strict=True)
        known = [(block, server) for block, server in pairs if block.size]
        blocks = [block for block, _ in known]
        self._batches = _batches(blocks, [server for _, server in known])
        self._ordered = np.sort(np.concatenate(blocks)) if blocks else np.empty(0, np.int64)
        self._saw_slow_times = bool(blocks) and _saw_slow_times(blocks)

    def ranks(self, percentile: float) -> tuple[int | None, int | None]:
        """Returns the ranks, from 1, of two latencies that hold the percentile between them with 95% confidence.

        None where a bound lies beyond the values seen, or the latencies can't tell.
        """
        if len(self._batches) < _BATCHES:
            return None, None
        count, batches, share = self._ordered.size, len(self._batches), percentile / 100
        at = self._ordered[nearest_rank(count, percentile) - 1]
        sizes = np.array([batch.size for batch in self._batches])
        below = np.array([np.count_nonzero(batch <= at) for batch in self._batches])
        excess = below - sizes * (below.sum() / count)
        variance = float((excess**2).sum()) * batches / (batches - 1) / count**2
        # Batches may agree by chance; independent requests would err by this much at least.
        error = math.sqrt(max(variance, share * (1 - share) / count))
        half = t_quantile(batches - 1, _CONFIDENCE) * error
        low, high = math.floor((share - half) * count), math.ceil((share + half) * count) + 1
        return low if low >= 1 else None, high if high <= count and self._saw_slow_times else None


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


def _saw_slow_times(blocks: Sequence[Nanoseconds]) -> bool:
    """Whether a queue had time to become long: not in a few requests, nor in blocks that end before that."""
    count = sum(block.size for block in blocks)
    independent = max(_MIN_INDEPENDENT, _MIN_INDEPENDENT_OF_BLOCK * len(blocks))
    is_enough = count >= _MANY or count >= independent * correlation_requests(blocks)
    return is_enough and not grows(blocks, _CONFIDENCE)


def _batches(blocks: Sequence[Nanoseconds], servers: Sequence[int | None]) -> list[Nanoseconds]:
    """Returns what each server process answered, or stretches: neighbouring blocks together, or parts of few blocks."""
    if len(set(servers)) >= _BATCHES:
        return [
            np.concatenate([block for block, own in zip(blocks, servers, strict=True) if own == server])
            for server in dict.fromkeys(servers)
        ]
    if len(blocks) >= _BATCHES:
        edges = np.linspace(0, len(blocks), _BATCHES + 1).round().astype(int).tolist()
        return [np.concatenate(blocks[first:last]) for first, last in pairwise(edges)]
    parts = math.ceil(_BATCHES / len(blocks)) if blocks else 0
    return [part for block in blocks for part in np.array_split(block, parts) if part.size]
