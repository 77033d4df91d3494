"""The choice of buckets: pure functions of measured costs and of the expected demand.

The expected time that a lane spends on an image is minimised. A lane that becomes free while n images wait
runs them as the planner plans it: by the cheapest *sequence* of buckets, of which only the last is padded
(`planner.Sequences`). With S for the set of buckets, c[b] for the seconds that bucket b takes with every lane busy,
OVERHEAD_S included, and demand[n] for the images taken at a demand of n (`demand.Demand`):

    least[S, n] = min over b in S of c[b] + least[S, n - b],    least[S, n <= 0] = 0
    cost(S)     = sum over n of demand[n] * least[S, n] / n,    divided by the images

Loaded costs, because a set of buckets decides how much a busy server can do; an idle one runs single images, for which
the same order of costs holds.

The textbook algorithm for such a choice pads each n to the next bucket up, so that the cost falls apart into the gaps
between neighbours. Here it doesn't: with 1 and 4 a demand of 5 is 4 + 1 and never pays for 8. So sets are searched one
by one, each in a single step from its parent, since adding a bucket to S is one more item of an unbounded knapsack:

    least[S + b, n] = min(least[S, n], c[b] + least[S + b, n - b])

and a branch is cut where even all its remaining candidates together would not beat what is found. That is exact, and
takes milliseconds for the 8 candidates up to 16, and a second or two for the 16 up to 256.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from xlaserve.engine.buckets.demand import Demand
from xlaserve.engine.buckets.planner import with_bucket

MARGIN: Final = 0.01
"""A larger set must gain this part of the expected cost: noise must not decide, and every program takes memory."""

OVERHEAD_S: Final = 1e-4
"""Processor time that a batch takes in addition to its run, to be formed, handed over and given back: 50 to 120 us as
measured (an AMD EPYC core). To be added to measured costs: without it, batches of one would look as good as larger
ones for a network that runs no faster in a batch."""

_Least = NDArray[np.float64]
"""`least[S, n]` of one S, for every n from 0."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A batch size and its measured cost."""

    batch: int
    cost_s: float
    """Seconds for one run with every lane of the device busy."""
    held_bytes: int = 0
    """Memory that is taken for as long as the program is kept."""
    run_bytes: int = 0
    """Further memory that is taken while every lane runs it."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on a set of buckets."""

    buckets: int
    memory_bytes: float = math.inf
    """Memory held by all programs, plus the memory of the largest run: programs run instead of each other, not
    together."""

    def admit(self, chosen: Sequence[Candidate]) -> bool:
        """Returns whether a set keeps to the limits. Where a set does not, no larger one does."""
        memory_bytes = sum(one.held_bytes for one in chosen) + max((one.run_bytes for one in chosen), default=0)
        return len(chosen) <= self.buckets and memory_bytes <= self.memory_bytes


def powers_of_two(most: int) -> tuple[int, ...]:
    """Returns the default set of buckets: the powers of two up to `most`."""
    return tuple(2**exponent for exponent in range(most.bit_length()))


def in_order_of_use(batches: Iterable[int]) -> tuple[int, ...]:
    """Returns batch sizes in an order of which every beginning is a good set, so that measuring may stop at any point.

    The smallest is first, without which a single image is slow, then the largest, then always the size that is
    farthest, by ratio, from all before it.
    """
    left = sorted(set(batches))
    ordered = [left.pop(0)] if left else []
    while left:
        farthest = max(left, key=lambda batch: (min(abs(math.log(batch / other)) for other in ordered), batch))
        left.remove(farthest)
        ordered.append(farthest)
    return tuple(ordered)


def expected_cost_s(cost_s: Mapping[int, float], demand: Demand) -> float:
    """Returns the seconds that a lane is expected to spend on an image with these buckets."""
    weights = _weights(demand)
    least = np.full(len(weights), np.inf)
    least[0] = 0.0
    for batch, seconds in cost_s.items():
        least = _with(least, batch, seconds)
    return _expected_s(least, weights)


def choose(candidates: Iterable[Candidate], demand: Demand, limits: Limits) -> tuple[Candidate, ...]:
    """Returns the set with the least expected cost among those that keep to `limits`, sorted by batch.

    Of the sets within MARGIN of the least, one of the smallest, and of those the cheapest. Empty where not even one
    candidate keeps to the limits. Raises ValueError without any demand.
    """
    found = _cheapest_by_size(candidates, demand, limits)
    if not found:
        return ()
    least_s = min(cost_s for cost_s, _ in found.values())
    fewest = min(size for size, (cost_s, _) in found.items() if cost_s <= least_s * (1 + MARGIN))
    return tuple(sorted(found[fewest][1], key=lambda candidate: candidate.batch))


def _cheapest_by_size(
    candidates: Iterable[Candidate], demand: Demand, limits: Limits
) -> dict[int, tuple[float, tuple[Candidate, ...]]]:
    """Returns for each number of buckets the cheapest set, with its cost, if one keeps to the limits."""
    weights = _weights(demand)
    nothing = np.full(len(weights), np.inf)
    nothing[0] = 0.0
    # The order in which sets are good early cuts the most branches.
    by_batch = {candidate.batch: candidate for candidate in candidates}
    ordered = [by_batch[batch] for batch in in_order_of_use(by_batch)]
    best: dict[int, tuple[float, tuple[Candidate, ...]]] = {}

    def search(least: _Least, chosen: tuple[Candidate, ...], start: int) -> None:
        if chosen:
            cost_s = _expected_s(least, weights)
            if cost_s < best.get(len(chosen), (math.inf,))[0]:
                best[len(chosen)] = cost_s, chosen
        bound = least
        for candidate in ordered[start:]:
            bound = _with(bound, candidate.batch, candidate.cost_s)
        most = min(limits.buckets, len(chosen) + len(ordered) - start)
        if _expected_s(bound, weights) >= max(
            (best.get(size, (math.inf,))[0] for size in range(len(chosen) + 1, most + 1)), default=0.0
        ):
            return
        for index in range(start, len(ordered)):
            larger = (*chosen, ordered[index])
            if limits.admit(larger):
                search(_with(least, ordered[index].batch, ordered[index].cost_s), larger, index + 1)

    search(nothing, (), 0)
    return best


def _with(least: _Least, batch: int, cost_s: float) -> _Least:
    """Returns `least` with one bucket more."""
    least = least.copy()
    np.minimum(least[1:batch], cost_s, out=least[1:batch])
    return with_bucket(least, batch, np.array(cost_s))


def _weights(demand: Demand) -> NDArray[np.float64]:
    """Returns for each n from 0 the part of the images that meet it, divided by n."""
    if not demand.total() > 0:
        raise ValueError("no demand: a set of buckets is chosen for some images at least")
    weights = np.zeros(max(demand) + 1)
    for n, images in demand.items():
        weights[n] = images / n
    return weights / demand.total()


def _expected_s(least: _Least, weights: NDArray[np.float64]) -> float:
    used = weights > 0
    return float(least[used] @ weights[used])
