"""The requests/s that a server of several processes can answer, and the number of fronts that it needs for them.

Both follow from the processor time that each process takes for a request: an event loop of Python uses one core at
most, and all processes together use no more cores than the machine has.
"""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Final, NamedTuple

from xlaserve.config import Settings
from xlaserve.errors import ConfigError
from xlaserve.models import catalog
from xlaserve.processes.engines import shares_of_machine
from xlaserve.programs.tf.device import usable_cores
from xlaserve.telemetry import gpus

US_PER_S: Final = 1e6
MOST_FRONTS: Final = 64
"""The largest value of the setting `fronts`."""
WORTH: Final = 1.1
"""Several processes are advised from this many times the requests/s of one process on."""


class Costs(NamedTuple):
    """Microseconds of processor time that each part of a server takes for a request."""

    front_us: float
    engine_us: float
    process_us: float
    """The process of a server that is only one, without the model."""
    lanes_us: float = 0.0
    """The model itself, if it runs on the same cores; 0 on a GPU."""


TYPICAL: Final = Costs(front_us=500.0, engine_us=100.0, process_us=460.0)
"""Costs of an encoded image of 150 KB, measured on two shared cores (docs/operations.md), rounded up for the front."""


class Limit(StrEnum):
    """The part of a server that is fully used first."""

    FRONTS = "fronts"
    ENGINE = "engine"
    PROCESS = "process"
    CORES = "cores"


class Capacity(NamedTuple):
    """The requests/s that a number of fronts can answer."""

    fronts: int
    """Number of fronts; 0 for a server of one process."""
    requests_per_s: float
    limit: Limit


def capacity(costs: Costs, fronts: int, cores: int, engines: int = 1) -> Capacity:
    """Returns the capacity of `fronts` with `engines` that share the work; of one process if `fronts` is 0."""
    if fronts:
        all_us = costs.front_us + costs.engine_us + costs.lanes_us
        own = {Limit.ENGINE: engines * US_PER_S / costs.engine_us, Limit.FRONTS: fronts * US_PER_S / costs.front_us}
    else:
        all_us = costs.process_us + costs.lanes_us
        own = {Limit.PROCESS: US_PER_S / costs.process_us}
    most = {Limit.CORES: cores * US_PER_S / all_us, **own}
    # Of equals the first one; fronts come last, as more of them can be added.
    limit = min(most, key=lambda part: most[part])
    return Capacity(fronts, most[limit], limit)


def most_useful(costs: Costs, cores: int, engines: int = 1) -> Capacity:
    """Returns the capacity of the smallest number of fronts to which no further one would add anything."""
    most = capacity(costs, MOST_FRONTS, cores, engines)
    return capacity(costs, _fronts_for(most.requests_per_s, costs), cores, engines)


def advised(costs: Costs, cores: int, engines: int = 1) -> Capacity:
    """Returns the fastest shape: `most_useful`, or one process if fronts are less than `WORTH` times as fast."""
    alone, several = capacity(costs, 0, cores), most_useful(costs, cores, engines)
    return several if several.requests_per_s >= WORTH * alone.requests_per_s else alone


def needed(images_per_s: float, cores: int, engines: int = 1, costs: Costs = TYPICAL) -> int:
    """Returns the number of fronts that bring `images_per_s`, an image a request, to each of `engines` on GPUs.

    At least one, and one core is left to the engines. Images/s that an engine's event loop can't take in don't count.
    """
    rate = engines * min(images_per_s, US_PER_S / costs.engine_us)
    return max(1, min(_fronts_for(rate, costs), cores - 1, MOST_FRONTS))


def resolve_fronts(settings: Settings) -> Settings:
    """Returns `settings` with a number instead of `fronts: auto`: the most fronts that the server may come to need.

    On a CPU, `auto` stays as it is, which means a server of one process. Neither opens a GPU nor imports TensorFlow.
    Raises ConfigError for several engines in one process.
    """
    if settings.fronts != "auto":
        return settings
    if not _is_on_gpu(settings):
        if settings.has_several_engines:
            expected = "fronts: 1 or more as well, as fronts: auto is one process here"
            raise ConfigError(f"engines: expected {expected}, got engines: {settings.engines}")
        return settings
    most = needed(math.inf, usable_cores(), len(shares_of_machine(settings)))
    return settings.model_copy(update={"fronts": most})


def _fronts_for(requests_per_s: float, costs: Costs) -> int:
    return max(1, math.ceil(round(requests_per_s * costs.front_us / US_PER_S, 9)))


def _is_on_gpu(settings: Settings) -> bool:
    is_named = settings.device.startswith("gpu")
    has_gpu = is_named or (settings.device == "auto" and gpus.count_visible() > 0)
    return has_gpu and any(map(catalog.uses_tensorflow, settings.models))
