"""The highest rate: how often is what a search finds too high, and how far below the truth is it?"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import numpy as np
from tests.loadtest.queues import QUEUES, SimulatedTarget, quantile
from tests.prove.registry import Row, Trials, part, share

from xlaserve_loadtest.schedule.early_stopping import TailCount, variance_inflation
from xlaserve_loadtest.schedule.search import Search, Slo

MIN_RUN_S = 5.0
CASES = (
    # queue, load at which the limit is met exactly, percentile, requests/s that a busy server serves
    ("M/M/1", 0.5, 99.0, 2000.0),
    ("M/M/1", 0.7, 99.0, 200.0),
    ("M/M/1", 0.9, 99.0, 2000.0),
    ("M/M/1", 0.9, 90.0, 200.0),
    ("M/M/1", 0.7, 95.0, 2000.0),
    ("M/D/1", 0.7, 99.0, 200.0),
    ("M/D/1", 0.9, 95.0, 2000.0),
    ("M/M/4", 0.7, 99.0, 200.0),
    ("M/M/4", 0.9, 90.0, 200.0),
    ("batches of 8", 0.7, 99.0, 200.0),
    ("batches of 8", 0.9, 95.0, 2000.0),
    ("batches of 8", 0.7, 90.0, 2000.0),
    ("stalls", 0.5, 99.0, 2000.0),
    ("stalls", 0.5, 90.0, 2000.0),
)


@part
def find_max(trials: Trials) -> Iterator[Row]:
    """The highest rate found on servers of known times: too high, too low, and its interval."""
    searches = trials.number(100)
    for name, load, percentile, speed in trials.some(*CASES):
        slo = Slo(percentile, quantile(QUEUES[name], load, percentile, 3_000_000) / speed * 1000)
        truth = load * speed
        found, minutes, held = [], [], 0
        for _ in range(searches):
            target = SimulatedTarget(QUEUES[name], speed, slo, trials.random)
            one = asyncio.run(Search(target, slo, MIN_RUN_S).run(speed / 2))
            found.append((one.confirmed_per_s or 0.0) / truth)
            minutes.append(target.seconds / 60)
            held += (one.confirmed_per_s or 0.0) <= truth <= (one.rejected_per_s or np.inf)
        where = f"p{percentile:g}, {name}, {load:.0%} of {speed:g}/s"
        yield share("rates found that are too high", where, sum(one > 1 for one in found), searches, at_most=0.05)
        yield share("between found and rejected", where, held, searches, at_least=0.9)
        # Where the truth is barely below the limit over a wide range of rates, a confident rate is far below it.
        least = 0.7 if name == "stalls" else 0.8
        yield Row("median of found over true", where, least, is_least=True, measured=float(np.median(found)), error=0.0)
        yield Row(
            "median minutes of a search", where, 30.0, is_least=False, measured=float(np.median(minutes)), error=0.0
        )


@part
def over_limit(trials: Trials) -> Iterator[Row]:
    """Runs exactly at the limit that pass: LoadGen's rule with this loadtest's factor for queues."""
    runs = trials.number(1000)
    for name, load, percentile in trials.some(
        ("M/M/1", 0.5, 99.0), ("M/M/1", 0.7, 99.0), ("M/M/1", 0.9, 99.0), ("M/D/1", 0.9, 90.0), ("stalls", 0.5, 99.0)
    ):
        limit = quantile(QUEUES[name], load, percentile, 3_000_000)
        passed = 0
        for _ in range(runs):
            arrivals = np.cumsum(trials.random.exponential(1 / load, 31_500))
            latencies = QUEUES[name](arrivals, trials.random)[1_500:]
            inflation = variance_inflation(latencies, percentile)
            tail = TailCount(latencies.size, int((latencies > limit).sum()), inflation)
            passed += tail.is_surely_within(percentile)
        where = f"p{percentile:g}, {name}, {load:.0%}"
        yield share("runs at the limit that pass", where, passed, runs, at_most=0.05 if name == "stalls" else 0.02)
