"""Observed times of the latest batches of a bucket, part by part, for simulations (`xlaserve.planning`).

Plans expect whole turns, in which the newest count most and none counts for much. A simulation of waiting requests
needs the time of a batch's own run, its dependence on the other lanes, and the distribution of deviations from it.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xlaserve.engine.buckets.planner import Cost

REMEMBERED: Final = 256
"""The number of latest batches of a bucket that are remembered."""
POINTS: Final = 65
"""Quantiles of a distribution, from the least value to the largest."""
PRIOR: Final = 0.25
"""The weight of warm-up's ratio of a loaded device to one lane alone in the fit, as a sum of squares of the load:
traffic that always finds the same number of lanes busy shows nothing of that ratio."""
LEAST_S: Final = 1e-9


class Parts(NamedTuple):
    """The seconds of a batch's parts."""

    started_s: float
    """Seconds from being taken from its queue until a thread had it."""
    own_s: float
    """Seconds to gather and run it."""
    returned_s: float
    """Seconds from its end until the event loop gave its rows back."""
    lanes: float
    """Lanes that were busy meanwhile, its own included, on average."""


class Observed(NamedTuple):
    """Statistics of the latest batches of a bucket. Plain data."""

    batches: int = 0
    """Their number, REMEMBERED at most; where it is 0 the other fields have no meaning."""
    own: Cost = Cost(0.0, 0.0)
    """The typical time of a batch's own part, while no other lane is busy, and while all are."""
    deviations: tuple[float, ...] = ()
    """Quantiles of the ratio of batches' own parts to the typical time."""
    started_s: tuple[float, ...] = ()
    returned_s: tuple[float, ...] = ()
    """Quantiles of the other parts."""


class Recent:
    """The latest batches of one bucket on a device with `lanes` lanes; `warmed` is its cost as measured at warm-up."""

    def __init__(self, warmed: Cost, lanes: int) -> None:
        self._slope = math.log(warmed.loaded_s / warmed.alone_s)
        self._lanes = lanes
        self._parts = np.empty((REMEMBERED, len(Parts._fields)))
        self._batches = 0
        self._observed: Observed | None = Observed()

    def add(self, parts: Parts) -> None:
        """Adds a batch, in place of the oldest where REMEMBERED are there."""
        self._parts[self._batches % REMEMBERED] = parts
        self._batches += 1
        self._observed = None

    def observed(self) -> Observed:
        """Returns the statistics of the latest batches."""
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
