"""The style of a run's measured points in charts: colour, dash and name, the same in each chart."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from xlaserve_loadtest.analysis.points import Point
from xlaserve_loadtest.analysis.summary import Summary
from xlaserve_loadtest.reports.chart import Key, label, mode_colours, pale, short_names

DASHES: Final = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot", "2px,9px", "15px,3px,3px,3px,3px,3px")


@dataclass(frozen=True)
class Drawn:
    """A measured point and its style."""

    point: Point
    colour: str
    """Colour of its arm."""
    dash: str
    """Dash of its load."""
    has_load: bool
    """Whether the run has several loads, so that names include the load."""
    short: str
    """Its arm's name, short enough for an axis."""

    @property
    def row(self) -> str:
        """Its name next to a bar, in HTML."""
        name = label(self.short)
        return f"{name}<br>{label(self.point.label)}" if self.has_load else name

    @property
    def name(self) -> str:
        """Its name in a sentence."""
        return f"{self.point.arm}, {self.point.label}" if self.has_load else self.point.arm

    @property
    def keys(self) -> list[str]:
        """The names of its legend entries."""
        return [self.point.arm, self.point.label] if self.has_load else [self.point.arm]


def drawn(summary: Summary) -> list[Drawn]:
    """Returns the measured points of a run, by load."""
    colours, short = arm_colours(summary), short_names(arm.name for arm in summary.header.arms)
    loads = list(dict.fromkeys(point.label for point in summary.points))
    return [
        Drawn(point, colours[point.arm], DASHES[place % len(DASHES)], len(loads) > 1, short[point.arm])
        for place, load in enumerate(loads)
        for point in summary.points
        if point.label == load
    ]


def arm_colours(summary: Summary) -> dict[str, str]:
    """Returns the colour of each arm on the whole page; a control has a paler colour of its arm."""
    arms = [arm for arm in summary.header.arms if arm.is_control_of is None]
    colours = dict(zip((arm.name for arm in arms), mode_colours([arm.mode for arm in arms]), strict=True))
    controls = {arm.name: arm.is_control_of for arm in summary.header.arms if arm.is_control_of is not None}
    return colours | {name: pale(colours[repeated]) for name, repeated in controls.items()}


def arm_keys(points: Iterable[Drawn], mark: str) -> list[Key]:
    """Returns a legend entry for each arm."""
    return list({each.point.arm: Key(each.point.arm, each.colour, mark) for each in points}.values())
