"""A server as it was measured, for simulations of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from statistics import NormalDist
from typing import Final, Self

from xlaserve.engine.buckets.planner import Cost

POINTS: Final = 64
Quantiles = Sequence[float]
"""Of a distribution, from its least value to its largest, at equal distances; none for one that is always 0."""


def draw(quantiles: Quantiles, chance: Random) -> float:
    """Returns a random value of a distribution."""
    if not quantiles:
        return 0.0
    at = chance.random() * (len(quantiles) - 1)
    below = int(at)
    above = min(below + 1, len(quantiles) - 1)
    return quantiles[below] + (at - below) * (quantiles[above] - quantiles[below])


def lognormal(spread: float) -> Quantiles:
    """Returns ratios whose logarithms have the standard deviation `spread`, and the mean 0."""
    normal = NormalDist()
    return [math.exp(spread * normal.inv_cdf((at + 0.5) / POINTS)) for at in range(POINTS)]


@dataclass(frozen=True, slots=True)
class Profile:
    """The measured costs and times of one server."""

    costs: Mapping[int, Cost]
    """Seconds to gather and run a batch, by bucket: alone, and while all lanes are busy."""
    lanes: int = 1
    planned: Mapping[int, Cost] = field(default_factory=dict)
    """Costs that plans expect before any traffic, as measured at warm-up, by bucket; `costs` by default."""
    deviations: Quantiles = ()
    """Quantiles of the ratio of batches' times to their costs; none where the ratio is always 1."""
    started_s: Quantiles = ()
    """Quantiles of the seconds from being taken from the queue until a thread has the batch."""
    returned_s: Quantiles = ()
    """Quantiles of the seconds from the end of a batch until the event loop has its rows, and so from any call until an
    idle event loop runs."""
    front_s: float = 0.0
    """Seconds of an event loop for a request: to read it, and to write its answer."""
    fronts: int = 0
    """Event loops that share the requests, before the one of the engine; 0 where the engine's does it all."""
    engine_s: float = 0.0
    """Seconds of the engine's event loop for a request that a front has read."""
    outside_s: float = 0.0
    """Seconds that clients and the network add to a request's latency."""
    max_images: int = 2048
    """`max_queue_images`."""
    max_queue_delay_s: float = 0.0

    @property
    def capacity(self) -> float:
        """Images a second at most, with full batches on every lane."""
        best = max(batch / self.loaded_s(batch) for batch in self.costs)
        return self.lanes * best

    def loaded_s(self, bucket: int) -> float:
        """Returns the seconds that a batch takes with all lanes busy."""
        return self.costs[bucket].at(self.lanes, self.lanes)

    def scaled(self, factor: float) -> Self:
        """Returns a server whose batches take `factor` times as long."""
        return replace(self, costs={bucket: Cost(*(factor * s for s in cost)) for bucket, cost in self.costs.items()})

    def with_lanes(self, lanes: int) -> Self:
        """Returns a server with `lanes` of its lanes."""
        costs, planned = (
            {bucket: Cost(cost.alone_s, cost.at(lanes, self.lanes)) for bucket, cost in of.items()}
            for of in (self.costs, self.planned)
        )
        return replace(self, lanes=lanes, costs=costs, planned=planned)

    def with_buckets(self, buckets: Sequence[int]) -> Self:
        """Returns a server with these of its buckets."""
        costs, planned = (
            {bucket: cost for bucket, cost in of.items() if bucket in buckets} for of in (self.costs, self.planned)
        )
        return replace(self, costs=costs, planned=planned)
