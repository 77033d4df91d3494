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


def capacity(costs: Costs, fronts: int, cores: int) -> Capacity:
    """Returns what `fronts` and one engine carry, or one process where there are none."""
    if fronts:
        all_us = costs.front_us + costs.engine_us + costs.lanes_us
        own = {Limit.ENGINE: US_PER_S / costs.engine_us, Limit.FRONTS: fronts * US_PER_S / costs.front_us}
    else:
        all_us = costs.process_us + costs.lanes_us
        own = {Limit.PROCESS: US_PER_S / costs.process_us}
    most = {Limit.CORES: cores * US_PER_S / all_us, **own}
    limit = min(most, key=lambda part: most[part])  # the first of equals: fronts are last, as they can be added
    return Capacity(fronts, most[limit], limit)


def most_useful(costs: Costs, cores: int) -> Capacity:
    """Returns what the fewest fronts carry that no further one would add to."""
    most = capacity(costs, MOST_FRONTS, cores)
    needed = math.ceil(round(most.requests_per_s * costs.front_us / US_PER_S, 9))
    return capacity(costs, max(1, needed), cores)


def advised(costs: Costs, cores: int) -> Capacity:
    """Returns what is best for speed: as many fronts as are of use, or one process where those carry hardly more."""
    alone, several = capacity(costs, 0, cores), most_useful(costs, cores)
    return several if several.requests_per_s >= WORTH * alone.requests_per_s else alone
