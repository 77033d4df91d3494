"""What the latest batches of a bucket took, part by part, for who simulates them (`oracle`).

Plans expect whole turns, of which the newest count most and none counts for much. To foresee how long requests wait,
it is to be known what batches take themselves, how far that depends on what else runs, and how far they stray from it.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xlaserve.engine.buckets.planner import Cost

REMEMBERED: Final = 256
"""Batches of a bucket."""
POINTS: Final = 65
"""Quantiles of a distribution, from the least value to the largest."""
PRIOR: Final = 0.25
"""How much warm-up's ratio of a loaded device to one lane alone counts: as much as a batch for each of which 1/4 lies
between both. Traffic that always finds the same number of lanes busy says nothing of it."""
LEAST_S: Final = 1e-9


class Parts(NamedTuple):
    """What a batch took, in seconds."""

    started_s: float
    """From being taken from its queue until a thread had it."""
    own_s: float
    """To be gathered, and to run."""
    returned_s: float
    """From its end until the event loop gave its rows back."""
    lanes: float
    """Lanes that were busy meanwhile, its own included, on average."""


class Observed(NamedTuple):
    """What the last batches of a bucket took. Plain data."""

    batches: int = 0
    """How many these were, REMEMBERED at most; without any the rest says nothing."""
    own: Cost = Cost(0.0, 0.0)
    """What a batch takes itself as a rule, while no other lane is busy, and while all are."""
    deviations: tuple[float, ...] = ()
    """How far batches stray from it, as quantiles of their ratio to it."""
    started_s: tuple[float, ...] = ()
    returned_s: tuple[float, ...] = ()
    """Quantiles of the other parts."""


class Recent:
    """The last batches of one bucket on a device with `lanes` lanes; `warmed` is what warm-up measured of it."""

    def __init__(self, warmed: Cost, lanes: int) -> None:
        self._slope = math.log(warmed.loaded_s / warmed.alone_s)
        self._lanes = lanes
        self._parts = np.empty((REMEMBERED, len(Parts._fields)))
        self._batches = 0
        self._observed: Observed | None = Observed()

    def add(self, parts: Parts) -> None:
        """Takes a batch into account."""
        self._parts[self._batches % REMEMBERED] = parts
        self._batches += 1
        self._observed = None

    def observed(self) -> Observed:
        """Returns what is known by now."""
        if self._observed is None:  # engines tell fronts of all buckets each second, whether they ran or not
            self._observed = self._observe()
        return self._observed

    def _observe(self) -> Observed:
        started_s, own_s, returned_s, lanes = self._parts[: self._batches].T
        logs = np.log(np.maximum(own_s, LEAST_S))
        loaded = (lanes - 1) / (self._lanes - 1) if self._lanes > 1 else np.zeros_like(lanes)
        off = loaded - loaded.mean()
        slope = max(0.0, (off @ logs + PRIOR * self._slope) / (off @ off + PRIOR))
        alone = logs.mean() - slope * loaded.mean()
        return Observed(
            len(logs),
            Cost(math.exp(alone), math.exp(alone + slope)),
            _quantiles(np.exp(logs - alone - slope * loaded)),
            _quantiles(started_s),
            _quantiles(returned_s),
        )


def _quantiles(values: NDArray[np.float64]) -> tuple[float, ...]:
    # Several times as fast as np.quantile, on an event loop that has to serve.
    at = np.linspace(0, len(values) - 1, POINTS)
    return tuple(np.interp(at, np.arange(len(values)), np.sort(values)).tolist())
