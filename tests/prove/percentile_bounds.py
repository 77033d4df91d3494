"""Bounds of percentiles behind queues: how many of those that are given hold the truth?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final

import numpy as np
from tests.prove.queues import (
    Kind,
    run,
    run_of_processes,
    true_percentiles_ns,
    true_percentiles_of_processes_ns,
)
from tests.prove.registry import Row, Trials, part, share

from xlaserve_loadtest.analysis.percentile_bounds import PercentileBounds
from xlaserve_loadtest.analysis.percentiles import Nanoseconds
from xlaserve_loadtest.schedule.early_stopping import least_requests

COVERAGE: Final = 0.9
"""Of the bounds that are given, where 95% is said."""
OFTEN: Final = 0.25
"""Share of runs that have an upper bound from which on those are counted by themselves, too."""
PERCENTILES: Final = (50.0, 90.0, 99.0, 99.9)
SERVERS: Final[tuple[tuple[Kind, float], ...]] = (
    ("independent", 0.9),
    ("M/M/1", 0.5),
    ("M/M/1", 0.8),
    ("M/M/1", 0.9),
    ("M/M/1", 0.95),
    ("M/D/1", 0.9),
    ("G/M/1", 0.5),
    ("G/M/1", 0.8),
    ("G/M/1", 0.9),
    ("G/M/1", 0.95),
    ("batches of 8", 0.5),
    ("batches of 8", 0.9),
    ("stalls", 0.5),
    ("closed loop of 16", 1.0),
)
RUNS: Final = (
    (100.0, 5.0, 1),
    (100.0, 20.0, 1),
    (100.0, 60.0, 1),
    (1000.0, 20.0, 1),
    (1000.0, 100.0, 1),
    (100.0, 8.0, 8),
    (100.0, 60.0, 60),
    (1000.0, 20.0, 20),
    (1000.0, 20.0, 8),
)
"""Requests each second, measured seconds, and blocks."""
MANY: Final = 50_000
"""Requests of a run, from which on a third of the runs is simulated."""


@part
def percentile_bounds(trials: Trials) -> Iterator[Row]:
    """Bounds of p50, p90, p99 and p99.9 of servers of known times: how many of those given hold the truth?"""
    for kind, utilisation in SERVERS:
        load = f"{kind} at {utilisation:g}" if utilisation < 1 and kind != "independent" else kind
        for rate, seconds, blocks in trials.some(*RUNS):
            runs = trials.number(300 if rate * seconds < MANY else 100)
            truths_ns = true_percentiles_ns(kind, utilisation, rate, PERCENTILES)
            draw = partial(run, trials.random, kind, utilisation, rate=rate, seconds=seconds, blocks=blocks)
            where = f"{load}, {seconds:g} s at {rate:g}/s, {'one piece' if blocks == 1 else f'{blocks} blocks'}"
            yield from _rows(where, runs, draw, truths_ns, requests=int(rate * seconds))


@part
def percentile_bounds_of_processes(trials: Trials) -> Iterator[Row]:
    """The same of server processes that differ, of which each is a batch."""
    for between in (0.03, 0.1):
        for processes in trials.some(4, 6):
            draw = partial(run_of_processes, trials.random, between, processes=processes, blocks=2, requests=500)
            truths_ns = true_percentiles_of_processes_ns(between, PERCENTILES)
            servers = np.repeat(range(processes), 2).tolist()
            where = f"{processes} processes that differ by {between:.0%}"
            yield from _rows(where, trials.number(400), draw, truths_ns, requests=1000 * processes, servers=servers)


def _rows(
    where: str,
    runs: int,
    draw: Callable[[], Sequence[Nanoseconds]],
    truths_ns: Sequence[float],
    *,
    requests: int,
    servers: Sequence[int] | None = None,
) -> Iterator[Row]:
    given, has_upper, is_over, is_under = (np.zeros((runs, len(PERCENTILES)), bool) for _ in range(4))
    for number in range(runs):
        blocks = draw()
        bounds, ordered_ns = PercentileBounds(blocks, servers), np.sort(np.concatenate(blocks))
        for place, percentile in enumerate(PERCENTILES):
            low, high = bounds.ranks(percentile)
            given[number, place] = low is not None or high is not None
            has_upper[number, place] = high is not None
            is_under[number, place] = low is not None and truths_ns[place] < ordered_ns[low - 1]
            is_over[number, place] = high is not None and truths_ns[place] > ordered_ns[high - 1]
    for place, percentile in enumerate(PERCENTILES):
        if requests < least_requests(percentile):
            continue
        some, upper = given[:, place], has_upper[:, place]
        right = some & ~is_under[:, place] & ~is_over[:, place]
        text = f"p{percentile:g}, {where} (given in {some.mean():.0%}, the upper one in {upper.mean():.0%})"
        if some.any():
            yield share(
                "bounds that are given hold the truth", text, int(right.sum()), int(some.sum()), at_least=COVERAGE
            )
        if upper.mean() >= OFTEN:
            yield share(
                "upper bounds that are given hold the truth",
                text,
                int((upper & ~is_over[:, place]).sum()),
                int(upper.sum()),
                at_least=COVERAGE,
            )
