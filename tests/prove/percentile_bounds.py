"""Bounds of percentiles behind queues: how often are they wrong?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
from tests.prove.queues import Kind, run, true_percentiles_ns
from tests.prove.registry import Row, Trials, part, share

from xlaserve_loadtest.analysis.percentile_bounds import PercentileBounds

PERCENTILES: Final = (50.0, 90.0, 99.0)
QUEUES: Final[tuple[tuple[Kind, float], ...]] = (
    ("independent", 0.9),
    ("M/M/1", 0.5),
    ("M/M/1", 0.7),
    ("M/D/1", 0.9),
    ("batches of 8", 0.9),
    ("M/M/1", 0.9),
)
RUNS: Final = (
    (100.0, 5.0, 1),
    (100.0, 60.0, 1),
    (1000.0, 20.0, 1),
    (100.0, 5.0, 8),
    (100.0, 10.0, 8),
    (100.0, 25.0, 8),
    (1000.0, 5.0, 8),
    (1000.0, 20.0, 8),
)
"""Requests each second, measured seconds, and blocks."""


@part
def percentile_bounds(trials: Trials) -> Iterator[Row]:
    """Bounds of p50, p90 and p99 behind queues: how often are they wrong?"""
    runs = trials.number(300)
    for kind, utilisation in QUEUES:
        for rate, seconds, blocks in trials.some(*RUNS):
            truths_ns = true_percentiles_ns(kind, utilisation, rate, PERCENTILES)
            given, wrong = np.zeros(len(PERCENTILES), int), np.zeros(len(PERCENTILES), int)
            for _ in range(runs):
                found = run(trials.random, kind, utilisation, rate=rate, seconds=seconds, blocks=blocks)
                bounds, ordered_ns = PercentileBounds(found), np.sort(np.concatenate(found))
                for place, (percentile, truth_ns) in enumerate(zip(PERCENTILES, truths_ns, strict=True)):
                    low, high = bounds.ranks(percentile)
                    given[place] += low is not None or high is not None
                    is_below = low is not None and truth_ns < ordered_ns[low - 1]
                    wrong[place] += is_below or (high is not None and truth_ns > ordered_ns[high - 1])
            for percentile, some, bad in zip(PERCENTILES, given.tolist(), wrong.tolist(), strict=True):
                load = f"{kind} at {utilisation:g}" if kind != "independent" else kind
                where = f"p{percentile:g}, {load}, {seconds:g} s at {rate:g}/s, {_pieces(blocks)}"
                where = f"{where} (given in {some / runs:.0%})"
                yield share("runs with wrong bounds", where, bad, runs, at_most=0.1)


def _pieces(blocks: int) -> str:
    return "one piece" if blocks == 1 else f"{blocks} blocks"
