"""Results of a search: the highest rate at which each arm met the condition."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from xlaserve_loadtest.analysis.points import Point
from xlaserve_loadtest.analysis.samples import Sample
from xlaserve_loadtest.record.lines import Header
from xlaserve_loadtest.schedule.conditions import Condition, ConditionError, parse
from xlaserve_loadtest.schedule.search import Slo, TriedRate, lowest_rejected


@dataclass(frozen=True, slots=True)
class HighestRate:
    """The highest rate at which an arm met the condition."""

    arm: str
    slo: str
    """The condition, as it was written: "p99<50ms"."""
    rate_per_s: float | None
    """Requests due each second in the run that confirmed it, with 99% confidence; None where no run did."""
    rejected_per_s: float | None
    """The lowest rate above it that missed the condition, with 99% confidence; None where no rate did."""
    images_per_s: float | None
    over: int
    """Requests of the confirming run that were over the limit, failed or were dropped."""
    requests: int
    """All requests that were due in the confirming run."""
    tried: int
    """Runs of the search."""
    covered_s: float = 0.0
    """Length of the confirming run: spells that come less often are not covered."""
    is_generator_limited: bool = False
    """Whether the generator did not keep up in the confirming run: the target may sustain more."""


def slo_of(header: Header) -> Condition | None:
    """Returns the configuration's `slo`."""
    text = header.configuration.get("slo")
    try:
        return parse(text) if isinstance(text, str) else None
    except ConditionError:
        return None


def highest_rates(header: Header, samples: Sequence[Sample], points: Sequence[Point]) -> tuple[HighestRate, ...]:
    """Returns what the search found for each arm. Only the last confirming run decides."""
    text = header.configuration.get("slo")
    try:
        slo = Slo.parse(text if isinstance(text, str) else "")
    except ValueError:
        return ()
    rates = []
    for arm in header.arms:
        tried = [
            (sample.block.role, _tried(sample, rate_per_s, slo))
            for sample in samples
            if sample.block.arm == arm.name
            and sample.block.role in ("search", "confirm")
            and (rate_per_s := sample.block.load.rate_per_s) is not None
        ]
        if not tried:
            continue
        last = next((rate for role, rate in reversed(tried) if role == "confirm" and rate.is_confirmed), None)
        found = None if last is None else last.rate_per_s
        own = [
            point for point in points if (point.arm, point.role, point.load.rate_per_s) == (arm.name, "confirm", found)
        ]
        rates.append(
            HighestRate(
                arm=arm.name,
                slo=str(text),
                rate_per_s=found,
                rejected_per_s=lowest_rejected((rate for _, rate in tried), above=found or 0.0),
                images_per_s=next((point.images_per_s.value for point in own if point.images_per_s), None),
                over=last.tail.over if last else 0,
                requests=last.tail.requests if last else 0,
                tried=len(tried),
                covered_s=max((point.measured_s for point in own), default=0.0),
                is_generator_limited=any(point.generator.is_limited for point in own),
            )
        )
    return tuple(rates)


def _tried(sample: Sample, rate_per_s: float, slo: Slo) -> TriedRate:
    block = sample.block
    return TriedRate.of(rate_per_s, slo, sample.rows, block.window_ns, block.generator.dropped)
