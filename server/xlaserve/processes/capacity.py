"""What a server of several processes carries, from the processor time that each takes for a request.

An event loop of Python uses one core at most, and all together use no more than there are.
"""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Final, NamedTuple

US_PER_S: Final = 1e6
MOST_FRONTS: Final = 64
"""As many as `fronts` may be."""
WORTH: Final = 1.1
"""How many times as much as one process several have to carry, to be worth it for their speed."""


class Costs(NamedTuple):
    """Microseconds of processor time for a request."""

    front_us: float
    engine_us: float
    process_us: float
    """Of a server that is one process."""
    lanes_us: float = 0.0
    """Of what runs the model, where that takes the same cores; 0 on a device of its own."""


TYPICAL: Final = Costs(front_us=500.0, engine_us=100.0, process_us=460.0)
"""Of an image of 150 KB: what docs/operations.md shows of two shared cores, rounded up for the front."""


class Limit(StrEnum):
    """What is busy first."""

    FRONTS = "fronts"
    ENGINE = "engine"
    PROCESS = "process"
    CORES = "cores"


class Capacity(NamedTuple):
    """What a number of fronts carry."""

    fronts: int
    """0: all in one process."""
    requests_per_s: float
    limit: Limit


def capacity(costs: Costs, fronts: int, cores: int, engines: int = 1) -> Capacity:
    """Returns what `fronts` carry with `engines` that share the work, or one process where there are no fronts."""
    if fronts:
        all_us = costs.front_us + costs.engine_us + costs.lanes_us
        own = {Limit.ENGINE: engines * US_PER_S / costs.engine_us, Limit.FRONTS: fronts * US_PER_S / costs.front_us}
    else:
        all_us = costs.process_us + costs.lanes_us
        own = {Limit.PROCESS: US_PER_S / costs.process_us}
    most = {Limit.CORES: cores * US_PER_S / all_us, **own}
    limit = min(most, key=lambda part: most[part])  # the first of equals: fronts are last, as they can be added
    return Capacity(fronts, most[limit], limit)


def most_useful(costs: Costs, cores: int, engines: int = 1) -> Capacity:
    """Returns what the fewest fronts carry that no further one would add to."""
    most = capacity(costs, MOST_FRONTS, cores, engines)
    return capacity(costs, _fronts_for(most.requests_per_s, costs), cores, engines)


def advised(costs: Costs, cores: int, engines: int = 1) -> Capacity:
    """Returns what is best for speed: as many fronts as are of use, or one process where those carry hardly more."""
    alone, several = capacity(costs, 0, cores), most_useful(costs, cores, engines)
    return several if several.requests_per_s >= WORTH * alone.requests_per_s else alone


def needed(images_per_s: float, cores: int, engines: int = 1, costs: Costs = TYPICAL) -> int:
    """Returns how many fronts bring so many images/s, an image a request, to each of `engines` that compute on GPUs.

    A core is left to them, and no more is brought than their event loops take.
    """
    rate = engines * min(images_per_s, US_PER_S / costs.engine_us)
    return max(1, min(_fronts_for(rate, costs), cores - 1, MOST_FRONTS))


def _fronts_for(requests_per_s: float, costs: Costs) -> int:
    return max(1, math.ceil(round(requests_per_s * costs.front_us / US_PER_S, 9)))
