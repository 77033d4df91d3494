"""The highest rate: how often is what a search finds too high, and how far below the truth is it?"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator

import numpy as np
from tests.loadtest.queues import MM1, QUEUES, Queue, SimulatedTarget, quantile, with_spells
from tests.prove.registry import Row, Trials, part, share

from xlaserve_loadtest.schedule.early_stopping import TailCount, inflation_of_run
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
            one = asyncio.run(Search(target, slo, MIN_RUN_S, covered_s=MIN_RUN_S).run(speed / 2))
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
def slow_spells(trials: Trials) -> Iterator[Row]:
    """Servers that are slow for a part of the time: the highest rate found, with confirming runs of 600 s."""
    searches, speed = trials.number(60), 200.0
    slo = Slo(99.0, quantile(MM1, 0.7, 99.0, 1_000_000) / speed * 1000)
    for every_s, slow_s, times in trials.some((600.0, 20.0, 2.0), (300.0, 20.0, 2.0), (100.0, 10.0, 2.0)):
        queue_at = with_spells(every_s, slow_s, times, speed)
        truth = _highest(queue_at(0.0), speed, slo)
        found, minutes = [], []
        for _ in range(searches if not trials.is_short else 4):
            phase_s = float(trials.random.uniform(0, every_s))
            target = SimulatedTarget(MM1, speed, slo, trials.random, queue_at=queue_at, phase_s=phase_s)
            one = asyncio.run(Search(target, slo, MIN_RUN_S).run(speed / 2))
            found.append((one.confirmed_per_s or 0.0) / truth)
            minutes.append(target.seconds / 60)
        where = f"p99, M/M/1, {times:g} times as slow for {slow_s:g} of {every_s:g} s"
        number = len(found)
        yield share("rates found that are too high", where, sum(one > 1 for one in found), number, at_most=0.05)
        yield share("searches that find a rate", where, sum(one > 0 for one in found), number, at_least=0.9)
        yield Row("median of found over true", where, 0.3, is_least=True, measured=float(np.median(found)), error=0.0)
        yield Row(
            "median minutes of a search", where, 75.0, is_least=False, measured=float(np.median(minutes)), error=0.0
        )


def _highest(queue: Queue, speed: float, slo: Slo) -> float:
    """Returns the rate up to which too few requests are over the limit, to within 1%."""
    low, high = speed / 50, speed
    while high / low > 1.01:
        rate = math.sqrt(low * high)
        is_over = _over(queue, rate / speed, speed, slo) >= 1 - slo.percentile / 100
        low, high = (low, rate) if is_over else (rate, high)
    return math.sqrt(low * high)


def _over(queue: Queue, load: float, speed: float, slo: Slo) -> float:
    """Returns the share of requests over the limit in 100 minutes."""
    random = np.random.default_rng(0)
    arrivals = np.sort(random.random(round(load * speed * 6_000))) * 6_000 * speed
    return float((queue(arrivals, random) / speed * 1000 >= slo.limit_ms).mean())


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
            over = int((latencies > limit).sum())
            tail = TailCount(latencies.size, over, inflation_of_run(latencies, limit, percentile))
            passed += tail.is_surely_within(percentile)
        where = f"p{percentile:g}, {name}, {load:.0%}"
        yield share("runs at the limit that pass", where, passed, runs, at_most=0.05 if name == "stalls" else 0.02)
