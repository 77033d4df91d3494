"""Results of a search: the highest rate under a condition, and the metrics of MLPerf's scenarios."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from xlaserve_loadtest.analysis import conditions
from xlaserve_loadtest.analysis.points import Point
from xlaserve_loadtest.record.lines import Header
from xlaserve_loadtest.schedule.conditions import RATIO, VERDICT, Condition, ConditionError, parse
from xlaserve_loadtest.schedule.search import REPEATS

MINIMUM_S: Final = 600.0
"""What LoadGen's default configuration asks of every scenario."""
MINIMUM_OFFLINE_IMAGES: Final = 24_576


@dataclass(frozen=True, slots=True)
class HighestRate:
    """The highest rate at which an arm met the condition."""

    arm: str
    slo: str
    """The condition, as it was written: "p99<50ms"."""
    rate_per_s: float | None
    """Requests due each second; None where no rate that was tried met the condition."""
    images_per_s: float | None
    blocks: int
    """Runs at that rate."""
    tried: int
    """Rates that were tried."""


@dataclass(frozen=True, slots=True)
class ScenarioResult:
    """The metric of an MLPerf scenario."""

    arm: str
    scenario: str
    metric: str
    """The metric's name with its unit: "p90 latency, ms"."""
    value: float | None
    is_official: bool
    """Whether it ran for the scenario's minimum duration."""
    why_not: str
    """What was missing; empty where it is official."""


def slo_of(header: Header) -> Condition | None:
    """Returns the configuration's `slo`."""
    text = header.configuration.get("slo")
    try:
        return parse(text) if isinstance(text, str) else None
    except ConditionError:
        return None


def highest_rates(header: Header, points: Sequence[Point]) -> tuple[HighestRate, ...]:
    """Returns the highest rate of each arm that met the configuration's `slo`, in all of its blocks together.

    A rate with errors or drops, or which the generator could not keep up with, does not count, nor does one that a
    search measured only once.
    """
    if (slo := slo_of(header)) is None:
        return ()
    rates = []
    for arm in header.arms:
        tried: dict[float, list[Point]] = {}
        for point in points:
            if point.arm == arm.name and point.load.rate_per_s is not None:
                tried.setdefault(point.load.rate_per_s, []).append(point)
        if not tried:
            continue
        kept = [
            rate
            for rate, at_rate in tried.items()
            if all(_keeps(point, slo) for point in at_rate) and sum(point.blocks for point in at_rate) >= REPEATS
        ]
        best = max(kept, default=None)
        at_best = [] if best is None else tried[best]
        images = [point.images_per_s.value for point in at_best if point.images_per_s]
        rates.append(
            HighestRate(
                arm=arm.name,
                slo=slo.text,
                rate_per_s=best,
                images_per_s=sum(images) / len(images) if images else None,
                blocks=sum(point.blocks for point in at_best),
                tried=len(tried),
            )
        )
    return tuple(rates)


def results(header: Header, points: Sequence[Point], rates: Sequence[HighestRate]) -> tuple[ScenarioResult, ...]:
    """Returns the metric of the run's scenario for each arm; nothing where the run had no scenario."""
    by_arm = {rate.arm: rate for rate in rates}
    scenario_results = []
    for point in _longest(points):
        match header.scenario:
            case "server" if rate := by_arm.get(point.arm):
                scenario_results.append(_result(header, point, f"highest rate with {rate.slo}, 1/s", rate.rate_per_s))
            case "single-stream" | "multi-stream" as scenario:
                name = "p90" if scenario == "single-stream" else "p99"
                scenario_results.append(_result(header, point, f"{name} latency, ms", point.percentile(name).value_ms))
            case "offline":
                scenario_results.append(
                    _result(header, point, "images/s", point.images_per_s.value if point.images_per_s else None)
                )
    return tuple(scenario_results)


def _keeps(point: Point, slo: Condition) -> bool:
    value = conditions.value_of(point, slo) if slo.metric not in (RATIO, VERDICT) else None
    return (
        value is not None
        and slo.holds(value)
        and not point.errors
        and not point.dropped
        and not point.generator.is_limited
    )


def _longest(points: Sequence[Point]) -> list[Point]:
    """Returns for each arm the point that was measured longest."""
    longest: dict[str, Point] = {}
    for point in points:
        if point.arm not in longest or point.measured_s > longest[point.arm].measured_s:
            longest[point.arm] = point
    return list(longest.values())


def _result(header: Header, point: Point, metric: str, value: float | None) -> ScenarioResult:
    missing = []
    if point.measured_s < MINIMUM_S:
        missing.append(f"{point.measured_s:.3g} s instead of {MINIMUM_S:.0f} s")
    if header.scenario == "offline" and point.images < MINIMUM_OFFLINE_IMAGES:
        missing.append(f"{point.images:,} images instead of {MINIMUM_OFFLINE_IMAGES:,}")
    return ScenarioResult(point.arm, str(header.scenario), metric, value, not missing, ", ".join(missing))
