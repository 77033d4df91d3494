"""What comparing answers with those of another version or mode has shown."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from xlaserve.config import Mode

KEPT_PAIRS: Final = 256


class Likeness(NamedTuple):
    """How alike two answers to one image are."""

    agreement: float
    """From 0 to 1: whether the likeliest class is the same; the share of objects that are in both answers, or of pixels
    with the same class; the cosine of two vectors, 0 where it is negative."""
    iou: float | None = None
    """Mean intersection over union: of the boxes of the objects that are in both, or of the classes of pixels."""
    difference: float | None = None
    """Largest difference of two scores, or of two numbers of a vector; None where they can't be subtracted."""


@dataclass(slots=True)
class Mean:
    """The mean of what was added."""

    count: int = 0
    total: float = 0.0

    def add(self, value: float) -> None:
        """Adds one number."""
        self.count += 1
        self.total += value

    @property
    def value(self) -> float | None:
        """The mean; None of nothing."""
        return self.total / self.count if self.count else None


class Pair(NamedTuple):
    """What is compared."""

    mode: Mode
    """The mode that answered."""
    shadow_version: str
    shadow_mode: Mode


class TimeRatio(NamedTuple):
    """Of two batches of the same images, of which the second is the shadow's."""

    at_s: float
    """When they were compared, in seconds since the epoch."""
    ratio: float
    """The seconds that the second took over those of the first."""


@dataclass(slots=True)
class Findings:
    """What comparing the answers of two versions or modes has shown, since the one that answered was loaded."""

    agreement: Mean = field(default_factory=Mean)
    """By image, as in Likeness."""
    iou: Mean = field(default_factory=Mean)
    largest_difference: float | None = None
    time_ratios: deque[TimeRatio] = field(default_factory=lambda: deque(maxlen=KEPT_PAIRS))
    """Of the latest pairs of batches."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Requests that were drawn but not compared, by the reason."""

    def add(self, found: Likeness) -> None:
        """Adds what one image showed."""
        self.agreement.add(found.agreement)
        if found.iou is not None:
            self.iou.add(found.iou)
        if found.difference is not None:
            self.largest_difference = max(self.largest_difference or 0.0, found.difference)
