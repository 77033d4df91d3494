from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from tests.required import required

from xlaserve_loadtest.analysis.intervals import (
    MIN_BLOCKS,
    Floats,
    estimate,
    pooled_percentile_ratio,
    ratio,
    unpaired_ratio,
)
from xlaserve_loadtest.analysis.percentiles import Nanoseconds

MS = 1_000_000


def blocks_of(
    random: np.random.Generator, count: int, *, noise: float = 0.03, scale_ms: float = 10.0, requests: int = 100
) -> list[Nanoseconds]:
    return [
        (scale_ms * MS * math.exp(random.normal(0, noise)) * random.lognormal(0, 0.15, requests)).astype(np.int64)
        for _ in range(count)
    ]


@pytest.mark.parametrize("blocks", [4, 8, 12, 24])
@pytest.mark.parametrize("draw", ["normal", "heavy tails", "outliers"])
def test_intervals_hold_the_truth_as_often_as_they_say(blocks: int, draw: str) -> None:
    random = np.random.default_rng(blocks)
    draws: dict[str, Callable[[], Floats]] = {
        "normal": lambda: random.normal(0, 1, blocks),
        "heavy tails": lambda: random.standard_t(3, blocks),
        "outliers": lambda: (
            random.normal(0, 1, blocks) + 5 * (random.random(blocks) < 0.1) * random.choice([-1, 1], blocks)
        ),
    }
    held = 0
    for seed in range(100):
        found = estimate(draws[draw](), seed=seed)
        held += required(found.low) <= 0 <= required(found.high)
    assert held >= 0.9 * 100


@pytest.mark.parametrize("percentile", [50, 99])
@pytest.mark.parametrize("paired", [True, False])
def test_intervals_of_percentile_ratios_hold_the_truth_as_often_as_they_say(percentile: int, paired: bool) -> None:
    random = np.random.default_rng(percentile)
    held = 0
    for seed in range(60):
        arm, baseline = blocks_of(random, 8, scale_ms=20), blocks_of(random, 8)
        found = required(pooled_percentile_ratio(arm, baseline, percentile, seed=seed, paired=paired))
        held += required(found.low) <= 2 <= required(found.high)
    assert held >= 0.9 * 60


def test_a_ratio_is_the_geometric_mean_of_its_pairs() -> None:
    assert ratio(np.log([2.0, 8.0, 2.0, 8.0]), seed=0).value == pytest.approx(4)
    assert unpaired_ratio(np.log([2.0, 8.0] * 2), np.log([1.0] * 5), seed=0).value == pytest.approx(4)


def test_a_percentile_ratio_is_that_of_the_figures_in_the_report() -> None:
    random = np.random.default_rng(0)
    arm, baseline = blocks_of(random, 5), blocks_of(random, 5)
    expected = [np.percentile(np.concatenate(side), 99, method="inverted_cdf") for side in (arm, baseline)]
    assert required(pooled_percentile_ratio(arm, baseline, 99, seed=0)).value == pytest.approx(
        expected[0] / expected[1]
    )


def test_too_few_blocks_or_answers_give_no_interval() -> None:
    assert MIN_BLOCKS == 4
    assert estimate([1.0, 2.0, 3.0], seed=0).low is None
    assert unpaired_ratio(np.zeros(3), np.zeros(9), seed=0).low is None
    few = [np.full(10, MS)] * 8
    assert pooled_percentile_ratio(few, few, 99, seed=0) is None
    assert required(pooled_percentile_ratio(few[:3], few[:3], 50, seed=0)).low is None


def test_blocks_that_are_all_alike_give_an_interval_without_width() -> None:
    found = estimate([3.0] * 6, seed=0)
    assert (found.low, found.high) == (3.0, 3.0)
    same = [np.full(100, 10 * MS)] * 6
    assert required(pooled_percentile_ratio(same, same, 50, seed=0)).low == pytest.approx(1)


def test_the_same_seed_gives_the_same_interval() -> None:
    values = np.random.default_rng(0).normal(0, 1, 10)
    assert estimate(values, seed=3) == estimate(values, seed=3) != estimate(values, seed=4)


def test_wild_blocks_give_wide_bounds_and_no_overflow() -> None:
    found = ratio([-400.0, 500.0, 300.0, -200.0], seed=0)
    assert found.low is not None
    assert found.high == pytest.approx(1e6)
