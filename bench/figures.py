"""What a benchmark says: ratios of interleaved arms."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn


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


def ratio(name: str, ours: Iterable[float], theirs: Iterable[float], least: float | None) -> Figure:
    """Returns the figure of the ratios of each block's two values."""
    ratios = [our / their for our, their in zip(ours, theirs, strict=True)]
    median = statistics.median(ratios)
    target = f">= {least:.2f}" if least else ""
    return Figure(name, median, min(ratios), max(ratios), target, least is None or median >= least)


def at_least(name: str, values: Sequence[float], least: float | None) -> Figure:
    """Returns the figure for values whose median is to reach `least`."""
    median = statistics.median(values)
    target = "" if least is None else f">= {least:g}"
    return Figure(name, median, min(values), max(values), target, least is None or median >= least)


def at_most(name: str, values: Sequence[float], most: float | None) -> Figure:
    """Returns the figure for values whose median is to stay at `most` or below."""
    median = statistics.median(values)
    target = "" if most is None else f"<= {most:g}"
    return Figure(name, median, min(values), max(values), target, most is None or median <= most)


def finish(file: Path, figures: Iterable[Figure], *, is_sound: bool = True, **more: object) -> NoReturn:
    """Prints `figures` as they come, and writes them and `more` as JSON.

    Ends the process, with 1 when a target is missed or it is not sound.
    """
    found = []
    for figure in figures:
        found.append(figure)
        print(figure.line(), flush=True)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({**more, "figures": [figure._asdict() for figure in found]}, indent=2) + "\n")
    sys.exit(0 if is_sound and all(figure.is_met for figure in found) else 1)
