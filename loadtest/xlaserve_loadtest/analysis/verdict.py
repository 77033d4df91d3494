"""The verdict of a comparison of two arms, and the measure that decides it.

`compare` withdraws it where controls or the number of comparisons leave it in doubt; `conclusion` puts it into words.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from xlaserve_loadtest.analysis.intervals import (
    MIN_BLOCKS,
    Estimate,
    Floats,
    percentile_ratio,
    ratio,
    ratio_over_time,
    unpaired_ratio,
)
from xlaserve_loadtest.analysis.percentiles import Nanoseconds, at_nearest_rank, nearest_rank
from xlaserve_loadtest.analysis.samples import Sample, is_too_much, work_of
from xlaserve_loadtest.analysis.served import Share, difference

Verdict = Literal["faster", "slower", "inconclusive"]
Measure = Literal["images_per_s", "p50", "p99"]
Unit = Literal["blocks", "server processes"]

_PERCENTILE_MEASURES: Final[Mapping[Measure, float]] = {"p50": 50.0, "p99": 99.0}
_MORE: Final[Mapping[Unit, str]] = {"blocks": "run longer", "server processes": "choose more with --processes"}
_WITHHELD_AT: Final = 0.05
"""Probability of a difference between equal arms' answered shares from which on neither is faster."""
_CONCLUDED_AT: Final = 0.01
"""Probability of a difference in goodput, or in p99, that is a verdict: less, since p50 is judged as well."""
TWO_PROCESSES: Final = "of these two processes"
"""The scope of a verdict where each side had one server process: another start may differ by more than blocks do."""
MEASURE_NAMES: Final[Mapping[Measure, str]] = {"images_per_s": "images/s", "p50": "p50", "p99": "p99"}


@dataclass(frozen=True, slots=True)
class Side:
    """Measurements of one of two arms, under one load."""

    blocks: Sequence[Sample]
    """All of them, those in which nothing was answered included."""
    units: Sequence[Sequence[Sample]]
    """Blocks in which something was answered, by what was drawn independently."""

    def waits_ns(self) -> list[Nanoseconds]:
        """Returns the latencies of each unit, those of unanswered requests included."""
        return [np.concatenate([sample.waits_ns for sample in unit]) for unit in self.units]

    def log_rates(self) -> Floats:
        """Returns the mean logarithm of the images/s of each unit's blocks."""
        works = [work_of([[sample] for sample in unit], "images") for unit in self.units]
        return np.array([np.log(work.amounts / work.seconds).mean() for work in works])


@dataclass(frozen=True, slots=True)
class Judgement:
    """The comparison of one arm with another."""

    ratios: Mapping[Measure, Estimate | None]
    """The ratio of images/s is over the whole time; those of percentiles are of typical blocks."""
    typical: Estimate | None
    """The ratio of images/s of a typical pair of units, however slow a few of them were."""
    decides: Measure
    verdict: Verdict
    reason: str


def judge(own: Side, other: Side, *, unit: Unit, seed: int, paired: bool) -> Judgement:
    """Returns the ratios of an arm over another, the measure that decides, and the verdict with its reason."""
    answered = [Share.answered(side.blocks) for side in (own, other)]
    own_ns, other_ns = own.waits_ns(), other.waits_ns()
    ratios: dict[Measure, Estimate | None] = {"images_per_s": None}
    typical: Estimate | None = None
    if own.units and other.units:
        ratios["images_per_s"] = ratio_over_time(
            work_of(own.units, "images"), work_of(other.units, "images"), paired=paired
        )
        logs = own.log_rates(), other.log_rates()
        typical = ratio(logs[0] - logs[1]) if paired else unpaired_ratio(*logs)
    whole: dict[Measure, float] = {}
    for measure, percentile in _PERCENTILE_MEASURES.items():
        is_known = all(_is_answered(share, percentile) for share in answered)
        ratios[measure] = percentile_ratio(own_ns, other_ns, percentile, paired=paired) if is_known else None
        if is_known and own_ns and other_ns:
            waits = [at_nearest_rank(np.sort(np.concatenate(side)), percentile) for side in (own_ns, other_ns)]
            whole[measure] = waits[0] / waits[1]
    is_open = own.blocks[0].block.load.type == "open"
    # Where the load sets the rate, images/s say nothing about the arms; where neither keeps up, they set it.
    if is_open and not (is_too_much(own.blocks) and is_too_much(other.blocks)):
        decides, verdict, reason = _by_latency(ratios, whole, unit)
    else:
        decides, (verdict, reason) = "images_per_s", _by_images(ratios["images_per_s"], typical, unit)
    verdict, reason = _mind_served(verdict, reason, answered, (own, other), is_open=is_open, seed=seed)
    return Judgement(ratios, typical, decides, verdict, reason)


def _by_images(over_time: Estimate | None, typical: Estimate | None, unit: Unit) -> tuple[Verdict, str]:
    """Judges by images/s over the whole time, with which a typical pair must agree."""
    verdict, reason = _verdict(over_time, "images_per_s", unit)
    if verdict == "inconclusive" or typical is None or (typical.value > 1) == (verdict == "faster"):
        return verdict, reason
    return "inconclusive", f"a typical pair of {unit} does {typical.value:.3f} times the images/s, the other way"


def _by_latency(
    ratios: Mapping[Measure, Estimate | None], whole: Mapping[Measure, float], unit: Unit
) -> tuple[Measure, Verdict, str]:
    """Judges by p50 and p99 together: p99 decides where p50 does not, and neither may lose more than the other gains.

    `whole` are ratios of the percentiles of all answers, in which a stall counts that no typical block shows, and which
    are known where answers are too few for an interval of p99.
    """
    p50, p99 = ratios["p50"], ratios["p99"]
    verdict, reason = _verdict(p50, "p50", unit)
    decides: Measure = "p50"
    if verdict == "inconclusive" and p99 is not None and p99.p_value is not None and p99.p_value <= _CONCLUDED_AT:
        decides = "p99"
        verdict, reason = _verdict(p99, "p99", unit)
    if verdict == "inconclusive":
        return decides, verdict, reason
    typical = {measure: ratio.value for measure, ratio in (("p50", p50), ("p99", p99)) if ratio is not None}
    for values, of in ((typical, ""), (whole, " over all answers")):
        if len(values) < len(_PERCENTILE_MEASURES):
            continue
        both = math.log(values["p50"]) + math.log(values["p99"])
        if (both < 0) != (verdict == "faster"):
            return decides, "inconclusive", f"p50 is {values['p50']:.3f} times, but p99 {values['p99']:.3f} times{of}"
    if p50 is None or p99 is None:
        return decides, verdict, reason
    other = p50 if decides == "p99" else p99
    if conclude(other, more_is_faster=False) not in (verdict, "inconclusive"):
        return decides, "inconclusive", f"p50 is {p50.value:.3f} times, but p99 {p99.value:.3f} times"
    return decides, verdict, reason


def _is_answered(share: Share, percentile: float) -> bool:
    """Whether a percentile falls among requests that were answered."""
    return nearest_rank(sum(share.due), percentile) <= sum(share.served)


def _mind_served(
    verdict: Verdict,
    reason: str,
    answered: Sequence[Share],
    sides: Sequence[Side],
    *,
    is_open: bool,
    seed: int,
) -> tuple[Verdict, str]:
    """Judges by what was answered, too: an arm that serves less is never the faster one."""
    more, chance = difference(*answered, seed=seed)
    shares = f"{answered[0].value:.1%} of its requests were answered, against {answered[1].value:.1%}"
    if chance <= _WITHHELD_AT and (more > 0 or verdict == "faster"):
        return "inconclusive", shares
    if not is_open:
        return verdict, reason
    in_time = [Share.in_time(side.blocks) for side in sides]
    more, chance = difference(*in_time, seed=seed)
    if chance > _CONCLUDED_AT:
        return verdict, reason
    limit_ns = sides[0].blocks[0].limit_ns
    within = f" within {limit_ns / 1e6:g} ms" if math.isfinite(limit_ns) else ""
    shares = f"{in_time[0].value:.1%} of its requests were answered{within}, against {in_time[1].value:.1%}"
    found: Verdict = "faster" if more > 0 else "slower"
    return (found if verdict in (found, "inconclusive") else "inconclusive"), shares


def _verdict(estimate: Estimate | None, measure: Measure, unit: Unit) -> tuple[Verdict, str]:
    if estimate is None:
        return "inconclusive", f"too few answers to compare {MEASURE_NAMES[measure]}, or it falls among the unanswered"
    if estimate.low is None or estimate.high is None:
        return "inconclusive", f"an interval takes {MIN_BLOCKS} pairs of {unit}; {_MORE[unit]}"
    verdict = conclude(estimate, more_is_faster=measure == "images_per_s")
    return verdict, "the interval contains 1" if verdict == "inconclusive" else ""


def conclude(ratio: Estimate, *, more_is_faster: bool) -> Verdict:
    """Returns the verdict on the numerator of a ratio, by the ratio's interval."""
    if ratio.low is None or ratio.high is None or ratio.low <= 1 <= ratio.high:
        return "inconclusive"
    return "faster" if (ratio.low > 1) == more_is_faster else "slower"
