"""Steady states, in which a run may end early: pure functions of its answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

WINDOWS: Final = 5
"""Number of windows that must agree."""
MIN_WINDOWS: Final = 10
"""Least number of windows of a run: an agreement at the start may be chance."""
TOLERANCE: Final = 0.05
"""Largest relative difference of a window from the mean."""


@dataclass(frozen=True, slots=True)
class Window:
    """Throughput and median latency of the answers in an interval of time."""

    images_per_s: float
    p50_ms: float | None
    """None where nothing was answered."""


def is_steady(windows: Sequence[Window]) -> bool:
    """Returns whether the last WINDOWS agree: throughput and median latency of each are within TOLERANCE of their mean.

    Windows of one arm are compared, never the difference between arms, so that ending a run early favours no arm.
    """
    last = windows[-WINDOWS:]
    medians = [window.p50_ms for window in last if window.p50_ms is not None]
    if len(medians) < WINDOWS:
        return False
    return _agree([window.images_per_s for window in last]) and _agree(medians)


def may_end(windows: Sequence[Window]) -> bool:
    """Returns whether a run may end early: it is steady and has at least MIN_WINDOWS."""
    return len(windows) >= MIN_WINDOWS and is_steady(windows)


def _agree(values: Sequence[float]) -> bool:
    mean = sum(values) / len(values)
    return mean > 0 and all(abs(value - mean) <= TOLERANCE * mean for value in values)
