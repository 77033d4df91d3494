"""The fewest servers that answer a load within a limit."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import partial
from typing import Final, NamedTuple

from xlaserve.errors import ConfigError
from xlaserve.planning.load import Load
from xlaserve.planning.measured_profile import Profile
from xlaserve.planning.simulation import Outcome

TRIES: Final = 3
"""Simulations of each number of servers; the worst of them decides."""
MODEL_ERROR: Final = 0.15
"""The largest relative error of simulated percentiles, measured on a device of its own (docs/planning.md)."""

_SLO: Final = re.compile(r"p(?P<percent>\d{1,2}(?:\.\d+)?)\s*<=?\s*(?P<limit>\d+(?:\.\d+)?)\s*(?P<unit>us|ms|s)")
_UNITS: Final = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


Simulate = Callable[[Profile, int, int], Outcome]
"""Takes a server, the number of servers, and a seed; returns the result of the simulated load."""


class Slo(NamedTuple):
    """A limit for a percentile of the latencies. Requests that are refused or late are over every limit."""

    percent: float
    limit_s: float

    def __str__(self) -> str:
        return f"p{self.percent:g} < {self.limit_s * 1000:g} ms"

    def is_met(self, outcome: Outcome) -> bool:
        """Returns whether the percentile is below the limit."""
        return outcome.percentile_s(self.percent) < self.limit_s


def parse_slo(text: str) -> Slo:
    """Parses a limit such as `p99<50ms`. Raises ConfigError."""
    match = _SLO.fullmatch(text.strip())
    if match is None or not 0 < float(match["percent"]) < 100 or not float(match["limit"]):
        raise ConfigError(f"--slo: expected a percentile and its limit such as p99<50ms, got {text!r}")
    return Slo(float(match["percent"]), float(match["limit"]) * _UNITS[match["unit"]])


class Found(NamedTuple):
    """The number of servers that is enough, and the simulations on the way."""

    servers: int | None
    """None where not even the most were enough."""
    tried: dict[int, Outcome]
    """The worst simulation of each number of servers, by the percentile of the limit."""


def fewest(profile: Profile, load: Load, slo: Slo, most: int, simulate: Callable[[int, int], Outcome]) -> Found:
    """Returns the fewest servers, at most `most`, with which `load` meets `slo`.

    `simulate(servers, seed)` returns the result of the load. More servers are taken never to be worse, so that the
    least number that is enough is found by doubling and then halving what is left.
    """
    tried: dict[int, Outcome] = {}

    def is_enough(servers: int) -> bool:
        worst = max((simulate(servers, seed) for seed in range(TRIES)), key=lambda it: it.percentile_s(slo.percent))
        tried[servers] = worst
        return slo.is_met(worst)

    enough = min(most, max(1, math.ceil(load.rate * float(load.images.mean()) / profile.capacity)))
    too_few = enough - 1
    while not is_enough(enough):
        if enough == most:
            return Found(None, tried)
        too_few, enough = enough, min(most, 2 * enough)
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        if is_enough(middle):
            enough = middle
        else:
            too_few = middle
    return Found(enough, tried)


class ErrorBounds(NamedTuple):
    """The error of a simulated percentile and of a number of servers."""

    least_s: float
    most_s: float
    """Bounds of the percentile: TRIES simulations with costs at their least and most, and the model's own error."""
    surely: int | None
    """The number of servers that is enough even with costs and the model's error at their worst; None where none is."""


def error(
    profile: Profile, load: Load, slo: Slo, servers: int, *, most: int, costs: float, simulate: Simulate
) -> ErrorBounds:
    """Returns the error of the result that `servers` are enough, where costs may be off by the part `costs`."""
    cheap, dear = (profile.scaled(1 - costs), profile.scaled(1 + costs)) if costs else (profile, profile)
    at_worst = Slo(slo.percent, slo.limit_s / (1 + MODEL_ERROR))
    surely = fewest(dear, load, at_worst, most, partial(simulate, dear))
    least_s, most_s = (
        [simulate(one, servers, seed).percentile_s(slo.percent) for seed in range(TRIES)] for one in (cheap, dear)
    )
    return ErrorBounds(min(least_s) * (1 - MODEL_ERROR), max(most_s) * (1 + MODEL_ERROR), surely.servers)
