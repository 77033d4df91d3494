"""What a benchmark says: ratios of interleaved arms."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple


class Figure(NamedTuple):
    """One line of the result: a ratio of two interleaved arms, over pairs of blocks."""

    name: str
    median: float
    least: float
    most: float
    target: str
    is_met: bool

    def line(self) -> str:
        """Returns it as text."""
        verdict = "" if not self.target else "met" if self.is_met else "MISSED"
        return f"{self.name:<58} {self.median:6.3f}  ({self.least:.3f} to {self.most:.3f})  {self.target} {verdict}"


def ratio(name: str, pairs: Sequence[tuple[float, float]], least: float | None) -> Figure:
    """Returns the figure for pairs of (ours, theirs)."""
    ratios = [ours / theirs for ours, theirs in pairs]
    median = statistics.median(ratios)
    target = f">= {least:.2f}" if least else ""
    return Figure(name, median, min(ratios), max(ratios), target, least is None or median >= least)
