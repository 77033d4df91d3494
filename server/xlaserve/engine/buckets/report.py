"""Sets of buckets compared on recorded demand: the present one, powers of two, and the best. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise

from xlaserve.config import AutoBuckets
from xlaserve.engine.buckets.choice import Candidate, Limits, choose, expected_cost_s, powers_of_two
from xlaserve.engine.buckets.demand import Demand, Resolution
from xlaserve.engine.buckets.planner import Sequences


@dataclass(frozen=True, slots=True)
class Choice:
    """A set of buckets and its expected cost."""

    batches: tuple[int, ...]
    image_s: float
    """Seconds that a lane spends on an image, with every lane busy."""
    padding: float
    """The part of the rows that are padding."""
    estimated: tuple[int, ...]
    """The batches that were never measured."""


@dataclass(frozen=True, slots=True)
class Report:
    """One resolution's sets."""

    resolution: Resolution
    demand: Demand
    present: Choice
    powers_of_two: Choice
    proposed: Choice

    def gain_over(self, other: Choice) -> float:
        """Returns the part of the time that the proposed set saves; negative where it takes more."""
        return 1 - self.proposed.image_s / other.image_s


def report(
    resolution: Resolution,
    demand: Demand,
    *,
    present: Iterable[int],
    measured_s: Mapping[int, float],
    most_batch: int | None = None,
    most_buckets: int,
) -> Report:
    """Returns the sets for `demand`. `measured_s` are the loaded costs by batch, of the present buckets at least.

    Candidates go up to `most_batch`, by default the largest that was measured; larger ones have no known cost and are
    left out.
    """
    largest = max(measured_s)
    most = min(most_batch or largest, largest)
    candidates = sorted({*AutoBuckets(max_batch=min(most, 256)).candidates, *(b for b in measured_s if b <= most)})
    costs_s = {batch: cost_s(batch, measured_s) for batch in {*candidates, *present, *powers_of_two(most)}}

    def choice(batches: Iterable[int]) -> Choice:
        chosen = {batch: costs_s[batch] for batch in sorted(batches)}
        estimated = tuple(batch for batch in chosen if batch not in measured_s)
        return Choice(tuple(chosen), expected_cost_s(chosen, demand), _padding(chosen, demand), estimated)

    best = choose([Candidate(batch, costs_s[batch]) for batch in candidates], demand, Limits(most_buckets))
    return Report(
        resolution,
        demand,
        present=choice(present),
        powers_of_two=choice(powers_of_two(most)),
        proposed=choice(candidate.batch for candidate in best),
    )


def cost_s(batch: int, measured_s: Mapping[int, float]) -> float:
    """Returns the cost of a batch: as measured, or interpolated between its neighbours; below the smallest, as the
    smallest."""
    if batch in measured_s:
        return measured_s[batch]
    for low, high in pairwise(sorted(measured_s)):
        if low < batch < high:
            return measured_s[low] + (measured_s[high] - measured_s[low]) * (batch - low) / (high - low)
    return measured_s[min(measured_s)]


def _padding(cost_by_batch_s: Mapping[int, float], demand: Demand) -> float:
    sequences = Sequences(cost_by_batch_s)
    rows = sum(sum(sequences.buckets(n)) * images / n for n, images in demand.items())
    return 1 - demand.total() / rows
