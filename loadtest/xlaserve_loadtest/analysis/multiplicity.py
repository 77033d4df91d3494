"""Verdicts of several comparisons of one run, corrected for their number; docs/loadtest-method.md gives the reasons."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from xlaserve_loadtest.analysis.intervals import Estimate
from xlaserve_loadtest.analysis.verdict import Verdict

FALSE_SHARE: Final = 0.05
"""Share of runs of equal arms in which chance may give any verdict at all."""


def corrected(found: Sequence[tuple[Estimate | None, Verdict, str]]) -> list[tuple[Verdict, str]]:
    """Returns the verdicts and reasons that are left of comparisons, given with their ratios, by S. Holm's procedure.

    Each comparison alone errs in 5% of runs, so that one of ten would err in 40%. Intervals stay as they are: each is
    about its own comparison.
    """
    # A verdict with a reason rests on goodput, not on the ratio, and on a stricter test.
    by_ratio = [ratio if verdict == "inconclusive" or not reason else None for ratio, verdict, reason in found]
    p_values = [ratio.p_value for ratio in by_ratio if ratio is not None and ratio.p_value is not None]
    number = len(p_values)
    limit = 0.0
    for rank, p_value in enumerate(sorted(p_values)):
        if p_value > FALSE_SHARE / (number - rank):
            break
        limit = p_value
    withdrawn = f"not after correction for {number} comparisons"
    return [
        ("inconclusive", withdrawn)
        if verdict != "inconclusive" and ratio is not None and ratio.p_value is not None and ratio.p_value > limit
        else (verdict, reason)
        for ratio, (_, verdict, reason) in zip(by_ratio, found, strict=True)
    ]
