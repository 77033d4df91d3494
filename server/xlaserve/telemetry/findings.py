"""Results of comparing answers with those of a shadow: another version, or another mode."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from xlaserve.config import Mode

KEPT_PAIRS: Final = 256
"""Pairs of batches whose ratio of times is kept."""


class Likeness(NamedTuple):
    """How alike two answers to one image are."""

    agreement: float
    """From 0 to 1: whether the likeliest class is the same; the share of objects that are in both answers, or of pixels
    with the same class; the cosine of two vectors, 0 where it is negative; the share of elements of tensors that are
    equal, of floats up to a thousandth of the largest."""
    iou: float | None = None
    """Mean intersection over union: of the boxes of the objects that are in both, or of the classes of pixels."""
    difference: float | None = None
    """Largest difference of two scores, or of two numbers of a vector; None where they can't be subtracted."""


@dataclass(slots=True)
class Mean:
    """The mean of numbers that are added one by one."""

    count: int = 0
    total: float = 0.0

    def add(self, value: float) -> None:
        """Adds one number."""
        self.count += 1
        self.total += value

    @property
    def value(self) -> float | None:
        """The mean; None where no number was added."""
        return self.total / self.count if self.count else None


class Pair(NamedTuple):
    """A mode that answers, and the version and mode that its answers are compared with."""

    mode: Mode
    """The mode that answered."""
    shadow_version: str
    shadow_mode: Mode


class TimeRatio(NamedTuple):
    """The time of the shadow's batch over the time of the batch that answered, both of the same images."""

    at_s: float
    """Time of the comparison, in seconds since the epoch."""
    ratio: float
    """Seconds of the shadow's batch over seconds of the other."""


@dataclass(slots=True)
class Findings:
    """Results of comparing one pair, since the version that answers was loaded."""

    agreement: Mean = field(default_factory=Mean)
    """Mean over images of `Likeness.agreement`; `iou` likewise."""
    iou: Mean = field(default_factory=Mean)
    largest_difference: float | None = None
    time_ratios: deque[TimeRatio] = field(default_factory=lambda: deque(maxlen=KEPT_PAIRS))
    """Ratios of the latest KEPT_PAIRS pairs of batches."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Number of requests that were drawn for the shadow but not compared, by reason."""

    def add(self, found: Likeness) -> None:
        """Adds the comparison of one image."""
        self.agreement.add(found.agreement)
        if found.iou is not None:
            self.iou.add(found.iou)
        if found.difference is not None:
            self.largest_difference = max(self.largest_difference or 0.0, found.difference)
