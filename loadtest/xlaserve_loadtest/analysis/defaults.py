"""Conditions that fail every run: errors and differing outputs, unless a condition limits the same figure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Final

from xlaserve_loadtest.analysis.conditions import Judged, judge
from xlaserve_loadtest.analysis.points import Point
from xlaserve_loadtest.record.lines import Equality
from xlaserve_loadtest.record.requests import Status
from xlaserve_loadtest.schedule.conditions import DIFFERING, ERRORS, Condition, parse

DEFAULTS: Final = tuple(parse(f"{metric}>0") for metric in (ERRORS, DIFFERING))
OPTION: Final = "default --fail-if"
"""The name under which they are reported."""
_LIMITS: Final = frozenset({">", ">=", "!="})
"""Operators of conditions that more of a figure meets."""
_OVERLOAD: Final = {Status.RESOURCE_EXHAUSTED.name, Status.DEADLINE_EXCEEDED.name, Status.UNAVAILABLE.name}
"""Statuses by which a server refuses more load than it can take."""


def judge_by_default(
    points: Sequence[Point], equalities: Sequence[Equality], named: Sequence[Condition]
) -> list[Judged]:
    """Judges a run by the default conditions, without the arms for which one of `named` limits the same figure.

    A condition that is met by less of it, such as `differing<1%`, limits nothing and stands beside the default.
    A search goes beyond what the target can take, so refusals of load don't count there. What can't be judged passes.
    """
    judged = []
    for default in DEFAULTS:
        arms = {one.arm for one in named if one.metric == default.metric and one.op in _LIMITS}
        if None in arms:
            continue
        own = [_without_overload(point) for point in points if point.arm not in arms]
        (found,) = judge(own, (), [default], [each for each in equalities if each.arm not in arms])
        judged.append(dataclasses.replace(found, is_met=found.is_met and found.is_judged, option=OPTION))
    return judged


def _without_overload(point: Point) -> Point:
    if point.role == "measure":
        return point
    errors = {status: count for status, count in point.errors.items() if status not in _OVERLOAD}
    return dataclasses.replace(point, errors=errors)
