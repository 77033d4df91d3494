"""Intervals over blocks: do they hold the truth as often as they say, how wide are they, and what do they find?"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Final

import numpy as np
from tests.prove.registry import Row, Trials, part, share

from xlaserve_loadtest.analysis.intervals import (
    Estimate,
    Floats,
    estimate,
    percentile_ratio,
    ratio,
    unpaired_ratio,
)
from xlaserve_loadtest.analysis.percentiles import Nanoseconds

Draw = Callable[[np.random.Generator, int], Floats]

COVERAGE: Final = 0.93
"""Least coverage that is claimed where 95% is said."""
STALL_SHARE: Final = 0.1
"""Share of blocks in which a server stalls and loses 30 to 80% of its rate."""


def stalls(random: np.random.Generator, count: int) -> Floats:
    """Returns logarithms of the rates of blocks, a tenth of which stalled."""
    lost = np.log1p(-random.uniform(0.3, 0.8, count)) * (random.random(count) < STALL_SHARE)
    logs: Floats = random.normal(0, 0.015, count) + lost
    return logs


def drifting_pairs(random: np.random.Generator, count: int) -> Floats:
    """Returns logarithms of the ratios of mirrored pairs (A B, B A) on a machine whose speed wanders by 5%."""
    speed, noise = 0.0, random.normal(0, 0.015, 2 * count)
    for place in range(noise.size):
        speed = 0.9 * speed + random.normal(0, 0.05 * math.sqrt(1 - 0.9**2))
        noise[place] += speed
    first, second = noise[::2], noise[1::2]
    logs: Floats = (first - second) * np.where(np.arange(count) % 2, -1, 1)
    return logs


RATIOS: Final[Mapping[str, Draw]] = {
    "normal, 1%": lambda random, count: random.normal(0, 0.01 * math.sqrt(2), count),
    "normal, 3%": lambda random, count: random.normal(0, 0.03 * math.sqrt(2), count),
    "normal, 5%": lambda random, count: random.normal(0, 0.05 * math.sqrt(2), count),
    "Student's t, 3 degrees": lambda random, count: 0.03 * random.standard_t(3, count),
    "10% outliers at 5 deviations": lambda random, count: (
        0.03 * (random.normal(0, 1, count) + 5 * (random.random(count) < 0.1) * random.choice([-1, 1], count))
    ),
    "lognormal blocks": lambda random, count: (
        0.05 * (random.lognormal(0, 0.5, count) - random.lognormal(0, 0.5, count))
    ),
    "steps of 1%": lambda random, count: np.round(random.normal(0, 0.006, count), 2),
    "all equal but 10%": lambda random, count: (
        random.normal(0, 1e-6, count) + 0.3 * (random.random(count) < 0.1) * random.choice([-1, 1], count)
    ),
    "all equal but 10%, which lose 80%": lambda random, count: (
        random.normal(0, 1e-6, count) + math.log(0.2) * (random.random(count) < 0.1)
    ),
    "drift, mirrored pairs": drifting_pairs,
    "a tenth of blocks stalls": lambda random, count: stalls(random, count) - stalls(random, count),
}
"""Logarithms of ratios of pairs of blocks of equal arms."""

RATES: Final[Mapping[str, Draw]] = {
    "normal, 3%": lambda random, count: random.normal(100, 3, count),
    "lognormal, 10%": lambda random, count: 100 * random.lognormal(0, 0.1, count),
    "a tenth of blocks stalls": lambda random, count: 100 * np.exp(stalls(random, count)),
}
"""Rates of one arm's blocks."""


def holds(found: Estimate | None, truth: float) -> bool:
    """Whether an interval holds the truth; the value must lie inside it."""
    assert found is not None
    assert found.low is not None
    assert found.high is not None
    assert found.low <= found.value <= found.high
    # Equal blocks give an interval without width, which rounding must not move off the truth.
    return found.low <= truth + 1e-9 and truth - 1e-9 <= found.high


def width(found: Estimate) -> float:
    """Returns how much the upper bound of a ratio is above the lower, as a logarithm."""
    assert found.low is not None
    assert found.high is not None
    return math.log(found.high / found.low)


@part
def ratios(trials: Trials) -> Iterator[Row]:
    """Ratios of equal arms over pairs of blocks: coverage and greatest width."""
    runs = trials.number(1000)
    for scenario, draw in RATIOS.items():
        for count in trials.some(4, 5, 6, 8, 12, 16, 24):
            logs = [draw(trials.random, count) for _ in range(runs)]
            found = [ratio(sample) for sample in logs]
            hits = sum(holds(one, 1.0) for one in found)
            yield share("95% interval of a ratio", f"{scenario}, {count} pairs", hits, runs, at_least=COVERAGE)
            widest = max(width(one) / np.ptp(sample) for one, sample in zip(found, logs, strict=True) if np.ptp(sample))
            name = "greatest width, in ranges of the pairs' logarithms"
            yield Row(name, f"{scenario}, {count} pairs", 3.0 if count == 4 else 1.7, False, widest, 0.0)


@part
def unpaired_ratios(trials: Trials) -> Iterator[Row]:
    """Ratios of equal runs whose blocks are no pairs, as `loadtest compare` has them: coverage."""
    runs = trials.number(1000)
    for scenario in ("normal, 5%", "Student's t, 3 degrees", "10% outliers at 5 deviations", "steps of 1%"):
        for own, other in trials.some((4, 4), (5, 16), (8, 8), (16, 16)):
            draw = RATIOS[scenario]
            hits = sum(
                holds(unpaired_ratio(draw(trials.random, own), draw(trials.random, other)), 1.0) for _ in range(runs)
            )
            where = f"{scenario}, {own} and {other} blocks"
            yield share("95% interval of an unpaired ratio", where, hits, runs, at_least=0.9)


@part
def rates(trials: Trials) -> Iterator[Row]:
    """Images/s of one arm: coverage of its typical block."""
    runs = trials.number(1000)
    for scenario, draw in RATES.items():
        truth = typical(scenario)
        for count in trials.some(4, 6, 8, 16, 24):
            hits = sum(holds(estimate(draw(trials.random, count)), truth) for _ in range(runs))
            yield share("95% interval of a rate", f"{scenario}, {count} blocks", hits, runs, at_least=0.9)


@cache
def typical(scenario: str) -> float:
    """Returns what a rate would be estimated as from any number of blocks."""
    return estimate(RATES[scenario](np.random.default_rng(1), 100_000)).value


@part
def power(trials: Trials) -> Iterator[Row]:
    """Differences that are found: they are the more, the more pairs of blocks there are."""
    runs = trials.number(1000)
    for scenario, difference, least in (
        ("normal, 3%", 0.05, {4: 0.3, 8: 0.7, 16: 0.95}),
        ("normal, 3%", 0.02, {8: 0.15, 16: 0.35, 24: 0.5}),
        ("normal, 3%", 0.10, {4: 0.7, 8: 0.98, 16: 0.99}),
        ("a tenth of blocks stalls", 0.05, {4: 0.3, 8: 0.6, 16: 0.85, 24: 0.9}),
    ):
        draw = RATIOS[scenario]
        for count in least:
            found = [ratio(math.log1p(difference) + draw(trials.random, count)) for _ in range(runs)]
            hits = sum(one.low is not None and one.low > 1 for one in found)
            where = f"{difference:.0%}, {scenario}, {count} pairs"
            yield share("a true difference is found", where, hits, runs, at_least=least[count])


@part
def percentile_ratios(trials: Trials) -> Iterator[Row]:
    """Ratios of p50 and p99 of equal arms: coverage."""
    runs = trials.number(600)
    for percentile in (50.0, 99.0):
        for count, requests in trials.some((4, 200), (8, 60), (8, 600), (16, 100)):
            if count * requests < 4 * 100 and percentile == 99:
                continue
            hits = tried = 0
            for _ in range(runs):
                arm, baseline = (_blocks(trials.random, count, requests) for _ in range(2))
                found = percentile_ratio(arm, baseline, percentile)
                if found is not None and found.low is not None:
                    tried += 1
                    hits += holds(found, 1.0)
            if tried:
                where = f"p{percentile:g}, {count} pairs of {requests} answers"
                yield share("95% interval of a percentile's ratio", where, hits, tried, at_least=COVERAGE)


def _blocks(random: np.random.Generator, count: int, requests: int) -> list[Nanoseconds]:
    """Returns latencies of blocks, each 3% slower or faster than the others, and a tenth of them with a long tail."""
    speeds = np.exp(random.normal(0, 0.03, (count, 1))) * 10e6
    latencies = speeds * random.lognormal(0, 0.3, (count, requests))
    latencies *= np.where(random.random((count, 1)) < 0.1, random.lognormal(0, 0.5, (count, requests)), 1)
    return list(latencies.astype(np.int64))
