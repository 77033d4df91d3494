"""What a comparison's figures mean: the measure that decides, and the verdict."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final, Literal

from xlaserve_loadtest.analysis.intervals import MIN_BLOCKS, Estimate, percentile_ratio
from xlaserve_loadtest.analysis.overload import overload
from xlaserve_loadtest.analysis.percentiles import Nanoseconds, nearest_rank
from xlaserve_loadtest.analysis.samples import Sample
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


def judge(
    images_per_s: Estimate | None,
    own_ns: Sequence[Nanoseconds],
    other_ns: Sequence[Nanoseconds],
    own: Sequence[Sample],
    other: Sequence[Sample],
    *,
    seed: int,
    paired: bool = True,
    unit: Unit = "blocks",
) -> tuple[dict[Measure, Estimate | None], Measure, Verdict, str]:
    """Returns the ratios of an arm over another, the measure that decides, and the verdict with its reason.

    Of latencies, those of unanswered requests included, there is one array for each `unit`. `own` and `other` are all
    blocks of both arms, those in which nothing was answered included.
    """
    answered = [Share.answered(samples) for samples in (own, other)]
    ratios: dict[Measure, Estimate | None] = {"images_per_s": images_per_s}
    for measure, percentile in _PERCENTILE_MEASURES.items():
        is_known = all(_is_answered(share, percentile) for share in answered)
        found = percentile_ratio(own_ns, other_ns, percentile, paired=paired) if is_known else None
        ratios[measure] = found
    is_open = own[0].block.load.type == "open"
    # Where the load sets the rate, images/s say nothing about the arms; where neither keeps up, they set it.
    sets_rate = is_open and not (overload(own) and overload(other))
    decides: Measure = "p50" if sets_rate else "images_per_s"
    verdict, reason = _verdict(ratios[decides], decides, unit)
    return ratios, decides, *_mind_served(verdict, reason, answered, own, other, is_open=is_open, seed=seed)


def _is_answered(share: Share, percentile: float) -> bool:
    """Whether a percentile falls among requests that were answered."""
    return nearest_rank(sum(share.due), percentile) <= sum(share.served)


def _mind_served(
    verdict: Verdict,
    reason: str,
    answered: Sequence[Share],
    own: Sequence[Sample],
    other: Sequence[Sample],
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
    in_time = [Share.in_time(samples) for samples in (own, other)]
    more, chance = difference(*in_time, seed=seed)
    if chance > _CONCLUDED_AT:
        return verdict, reason
    within = f" within {own[0].limit_ns / 1e6:g} ms" if math.isfinite(own[0].limit_ns) else ""
    shares = f"{in_time[0].value:.1%} of its requests were answered{within}, against {in_time[1].value:.1%}"
    found: Verdict = "faster" if more > 0 else "slower"
    return (found if verdict in (found, "inconclusive") else "inconclusive"), shares


def _verdict(estimate: Estimate | None, measure: Measure, unit: Unit) -> tuple[Verdict, str]:
    if estimate is None:
        return "inconclusive", f"too few answers to compare {MEASURE_NAMES[measure]}, or it falls among the unanswered"
    if estimate.low is None or estimate.high is None:
        return "inconclusive", f"an interval takes {MIN_BLOCKS} pairs of {unit}; {_MORE[unit]}"
    if estimate.low <= 1 <= estimate.high:
        return "inconclusive", "the interval contains 1"
    is_more = estimate.low > 1
    return ("faster" if is_more == (measure == "images_per_s") else "slower"), ""
