"""The number of fronts that a server needs.

It follows from the processor time that each process takes for a request, as an event loop of Python uses one core at
most.
"""

from __future__ import annotations

import math
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


class Costs(NamedTuple):
    """Microseconds of processor time that each part of a server takes for a request."""

    front_us: float
    engine_us: float


TYPICAL: Final = Costs(front_us=500.0, engine_us=100.0)
"""Costs of an encoded image of 150 KB, measured on two shared cores (docs/operations.md), rounded up for the front."""


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
