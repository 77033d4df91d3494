"""Arms against each other: ratios over paired blocks, with intervals, and what may be said of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from xlaserve_loadtest.stats import Estimate

Verdict = Literal["faster", "slower", "inconclusive"]
Measure = Literal["images_per_s", "p50", "p99"]


@dataclass(frozen=True, slots=True)
class Comparison:
    """One arm over its baseline, under one load."""

    arm: str
    baseline: str
    label: str
    """The load in words, as that of the points."""
    pairs: int
    """Pairs of blocks."""
    ratios: dict[Measure, Estimate | None]
    """Arm over baseline; None where the sample does not support it."""
    decides: Measure
    """The measure that the verdict rests on: images/s, or p50 where the load sets the rate."""
    verdict: Verdict
    reason: str
    """Why it is inconclusive; empty otherwise."""
    is_control: bool
    """An A/A control: two arms that are the same."""
