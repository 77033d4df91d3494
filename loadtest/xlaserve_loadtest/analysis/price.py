"""The price of compiling, and when it has paid for itself."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from xlaserve_loadtest.analysis.compare import Comparison
from xlaserve_loadtest.analysis.points import Point
from xlaserve_loadtest.record.lines import Arm, LedgerEntry, Server


@dataclass(frozen=True, slots=True)
class Price:
    """The cost of making an arm's programs."""

    arm: str
    programs: tuple[LedgerEntry, ...]
    """Programs of one server, smallest bucket first."""
    trace_s: float
    compile_s: float
    extra_s: float | None
    """Seconds of tracing and compiling, less those of the baseline; None without one."""
    gain_ms_per_image: float | None
    """Time that the arm saves for each image over the baseline; below 0 where it is slower."""
    break_even_images: float | None
    """Images after which `extra_s` is paid back; 0 where there is nothing to pay, infinity where it never is; None
    where that is not known."""
    text: str
    """The same in words."""


def prices(
    arms: Sequence[Arm],
    baselines: Mapping[str, str],
    servers: Sequence[Server],
    points: Sequence[Point],
    comparisons: Sequence[Comparison],
) -> tuple[Price, ...]:
    """Returns the price of each arm that has one, against its baseline at the load where it did the most images/s."""
    programs = {arm.name: _programs(arm, arms, servers) for arm in arms if arm.is_control_of is None}
    charged = []
    for arm, entries in programs.items():
        if not entries:
            continue
        baseline = baselines.get(arm)
        base_entries = programs.get(baseline, ()) if baseline else ()
        cost_s = sum(entry.trace_s + entry.compile_s for entry in entries)
        extra_s = cost_s - sum(entry.trace_s + entry.compile_s for entry in base_entries) if base_entries else None
        gain, images, text = None, None, f"{_seconds(cost_s)} to trace and compile"
        if baseline is not None and extra_s is not None:
            gain, images, text = _break_even(arm, baseline, extra_s, points, comparisons)
        trace_s, compile_s = sum(entry.trace_s for entry in entries), sum(entry.compile_s for entry in entries)
        charged.append(Price(arm, entries, trace_s, compile_s, extra_s, gain, images, text))
    return tuple(charged)


def _break_even(
    arm: str, baseline: str, extra_s: float, points: Sequence[Point], comparisons: Sequence[Comparison]
) -> tuple[float | None, float | None, str]:
    """Returns milliseconds gained for an image, the images to break-even, and both in words."""
    extra = f"{_seconds(abs(extra_s))} {'more' if extra_s > 0 else 'less'} than {baseline} to trace and compile"
    # Under a rate that the load sets, both arms do the same images/s: nothing can be learnt there.
    loads = [
        comparison
        for comparison in comparisons
        if (comparison.arm, comparison.baseline) == (arm, baseline) and comparison.decides == "images_per_s"
    ]
    rates = {
        (point.arm, point.label): point.images_per_s.value
        for point in points
        if point.images_per_s and point.images_per_s.value
    }
    both = [
        comparison for comparison in loads if (arm, comparison.label) in rates and (baseline, comparison.label) in rates
    ]
    if not both:
        return None, None, f"{extra}; what an image gains takes a closed loop to tell"
    best = max(both, key=lambda comparison: rates[arm, comparison.label])
    gain_s = 1 / rates[baseline, best.label] - 1 / rates[arm, best.label]
    gain_ms = gain_s * 1000
    if extra_s <= 0:
        return gain_ms, 0.0, f"{extra}: nothing to pay back"
    if best.verdict == "inconclusive":
        return gain_ms, None, f"{extra}; whether it pays is open, as the comparison is inconclusive"
    if gain_s <= 0:
        return gain_ms, math.inf, f"{extra}, and slower: it never pays"
    images = extra_s / gain_s
    full_load_s = images / rates[arm, best.label]
    return gain_ms, images, f"{extra}; paid back after {images:,.0f} images, {_seconds(full_load_s)} of full load"


def _programs(arm: Arm, arms: Sequence[Arm], servers: Sequence[Server]) -> tuple[LedgerEntry, ...]:
    """Returns the programs of the arm, from the first server that compiled them itself, or else the first of all.

    The server may be that of the arm's twin: the first to start fills the compile cache for the others.
    """
    names = {arm.name, *(twin.name for twin in arms if twin.is_control_of == arm.name)}
    reported = [
        [entry for entry in server.ledger if entry.mode == arm.mode and entry.model in (None, *arm.served)]
        for server in servers
        if names & set(server.arms)
    ]
    found = min(filter(None, reported), key=lambda own: any(entry.from_cache for entry in own), default=[])
    return tuple(sorted(found, key=lambda entry: entry.bucket))


def _seconds(value_s: float) -> str:
    if value_s < 120:
        return f"{value_s:.3g} s"
    return f"{value_s / 60:.0f} minutes" if value_s < 7200 else f"{value_s / 3600:.1f} hours"
