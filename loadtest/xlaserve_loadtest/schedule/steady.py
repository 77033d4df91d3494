"""When a run may end early: pure functions of its answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

WINDOWS: Final = 5
"""How many windows must agree."""
MIN_WINDOWS: Final = 10
"""A run does not end before this many windows: an agreement at the start may be chance."""
TOLERANCE: Final = 0.05


@dataclass(frozen=True, slots=True)
class Window:
    """What was answered in a stretch of time."""

    images_per_s: float
    p50_ms: float | None
    """None where nothing was answered."""


def is_steady(windows: Sequence[Window]) -> bool:
    """Whether the last WINDOWS agree: each one's throughput and median latency within TOLERANCE of their mean.

    It looks at one arm at a time and never at a difference between arms, so that ending a run on it favours none.
    """
    last = windows[-WINDOWS:]
    medians = [window.p50_ms for window in last if window.p50_ms is not None]
    if len(medians) < WINDOWS:
        return False
    return _agree([window.images_per_s for window in last]) and _agree(medians)


def may_end(windows: Sequence[Window]) -> bool:
    """Whether a run may end early: steady, after at least MIN_WINDOWS."""
    return len(windows) >= MIN_WINDOWS and is_steady(windows)


def _agree(values: Sequence[float]) -> bool:
    mean = sum(values) / len(values)
    return mean > 0 and all(abs(value - mean) <= TOLERANCE * mean for value in values)
