"""What a comparison's figures mean: the measure that decides, and the verdict."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from xlaserve_loadtest.analysis.intervals import MIN_BLOCKS, Estimate, percentile_ratio
from xlaserve_loadtest.analysis.percentiles import Nanoseconds, nearest_rank
from xlaserve_loadtest.analysis.samples import Sample, is_too_much
from xlaserve_loadtest.analysis.served import Share, difference

Verdict = Literal["faster", "slower", "inconclusive"]
Measure = Literal["images_per_s", "p50", "p99"]
Unit = Literal["blocks", "server processes"]

_PERCENTILE_MEASURES: Final[Mapping[Measure, float]] = {"p50": 50.0, "p99": 99.0}
_MORE: Final[Mapping[Unit, str]] = {"blocks": "run longer", "server processes": "choose more with --processes"}
_WITHHELD_AT: Final = 0.05
"""Probability of a difference between equal arms' answered shares from which on neither is faster."""
_CONCLUDED_AT: Final = 0.01
"""That of a difference in goodput that is a verdict: less, since latency is judged as well."""
MEASURE_NAMES: Final[Mapping[Measure, str]] = {"images_per_s": "images/s", "p50": "p50", "p99": "p99"}


@dataclass(frozen=True, slots=True)
class Side:
    """What was measured of one of two arms, under one load."""

    blocks: Sequence[Sample]
    """All of them, those in which nothing was answered included."""
    units: Sequence[Sequence[Sample]]
    """Blocks in which something was answered, by what was drawn independently."""

    def waits_ns(self) -> list[Nanoseconds]:
        """Returns the latencies of each unit, those of unanswered requests included."""
        return [np.concatenate([sample.waits_ns for sample in unit]) for unit in self.units]


def judge(
    images_per_s: Estimate | None, own: Side, other: Side, *, unit: Unit, seed: int, paired: bool
) -> tuple[dict[Measure, Estimate | None], Measure, Verdict, str]:
    """Returns the ratios of an arm over another, the measure that decides, and the verdict with its reason."""
    answered = [Share.answered(side.blocks) for side in (own, other)]
    own_ns, other_ns = own.waits_ns(), other.waits_ns()
    ratios: dict[Measure, Estimate | None] = {"images_per_s": images_per_s}
    for measure, percentile in _PERCENTILE_MEASURES.items():
        is_known = all(_is_answered(share, percentile) for share in answered)
        found = percentile_ratio(own_ns, other_ns, percentile, paired=paired) if is_known else None
        ratios[measure] = found
    is_open = own.blocks[0].block.load.type == "open"
    # Where the load sets the rate, images/s say nothing about the arms; where neither keeps up, they set it.
    sets_rate = is_open and not (is_too_much(own.blocks) and is_too_much(other.blocks))
    decides: Measure = "p50" if sets_rate else "images_per_s"
    verdict, reason = _verdict(ratios[decides], decides, unit)
    return ratios, decides, *_mind_served(verdict, reason, answered, (own, other), is_open=is_open, seed=seed)


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
    """Returns what the interval of a ratio says of the one that stands above the line."""
    if ratio.low is None or ratio.high is None or ratio.low <= 1 <= ratio.high:
        return "inconclusive"
    return "faster" if (ratio.low > 1) == more_is_faster else "slower"
