"""What a comparison's figures mean: the measure that decides, and the verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Literal

from xlaserve_loadtest.analysis.intervals import MIN_BLOCKS, Estimate, pooled_percentile_ratio
from xlaserve_loadtest.analysis.percentiles import Nanoseconds

Verdict = Literal["faster", "slower", "inconclusive"]
Measure = Literal["images_per_s", "p50", "p99"]
Unit = Literal["blocks", "server processes"]

_PERCENTILE_MEASURES: Final[Mapping[Measure, float]] = {"p50": 50.0, "p99": 99.0}
_MORE: Final[Mapping[Unit, str]] = {"blocks": "run longer", "server processes": "choose more with --processes"}
MEASURE_NAMES: Final[Mapping[Measure, str]] = {"images_per_s": "images/s", "p50": "p50", "p99": "p99"}


def judge(
    images_per_s: Estimate | None,
    own_ns: Sequence[Nanoseconds],
    other_ns: Sequence[Nanoseconds],
    load_type: str,
    *,
    seed: int,
    paired: bool = True,
    unit: Unit = "blocks",
) -> tuple[dict[Measure, Estimate | None], Measure, Verdict, str]:
    """Returns the ratios of an arm over another, the measure that decides, and the verdict with its reason.

    Of latencies there is one array for each `unit`.
    """
    ratios: dict[Measure, Estimate | None] = {"images_per_s": images_per_s}
    for measure, percentile in _PERCENTILE_MEASURES.items():
        ratios[measure] = pooled_percentile_ratio(own_ns, other_ns, percentile, seed=seed, paired=paired)
    # Where the load sets the rate, images/s say nothing about the arm.
    decides: Measure = "p50" if load_type == "open" else "images_per_s"
    return ratios, decides, *_verdict(ratios[decides], decides, unit)


def _verdict(estimate: Estimate | None, measure: Measure, unit: Unit) -> tuple[Verdict, str]:
    if estimate is None:
        return "inconclusive", f"too few answers to compare {MEASURE_NAMES[measure]}"
    if estimate.low is None or estimate.high is None:
        return "inconclusive", f"an interval takes {MIN_BLOCKS} pairs of {unit}; {_MORE[unit]}"
    if estimate.low <= 1 <= estimate.high:
        return "inconclusive", "the interval contains 1"
    is_more = estimate.low > 1
    return ("faster" if is_more == (measure == "images_per_s") else "slower"), ""
