from __future__ import annotations

import math

import numpy as np
import pytest
from tests.required import required

from xlaserve_loadtest.analysis.intervals import (
    MIN_BLOCKS,
    estimate,
    percentile_ratio,
    ratio,
    share,
    t_quantile,
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


def test_a_ratio_is_the_geometric_mean_of_its_pairs() -> None:
    assert ratio(np.log([2.0, 8.0, 2.0, 8.0])).value == pytest.approx(4)
    assert unpaired_ratio(np.log([2.0, 8.0] * 2), np.log([1.0] * 5)).value == pytest.approx(4)


def test_a_percentile_ratio_is_that_of_a_typical_pair_of_blocks() -> None:
    random = np.random.default_rng(0)
    baseline = blocks_of(random, 8)
    arm = [block * 2 for block in baseline[:-1]] + [block * 90 for block in baseline[-1:]]
    found = required(percentile_ratio(arm, baseline, 99))
    assert found.value == pytest.approx(2, rel=0.05)
    assert required(found.low) <= 2 <= required(found.high) < 4


def test_blocks_that_are_too_short_for_a_percentile_join_their_neighbours() -> None:
    # 60 answers a block: two of them have one answer above p99, and the last four fill the fourth group.
    blocks = [np.full(60, (place // 2 + 1) * MS) for place in range(8)] + [np.full(60, 4 * MS)]
    found = required(percentile_ratio(blocks, [np.full(60, MS)] * 9, 99))
    assert found.value == pytest.approx(24 ** (1 / 4))
    assert found.low is not None
    assert required(percentile_ratio(blocks[:8], [np.full(70, MS)] * 8, 99)).low is not None
    few = required(percentile_ratio([np.full(70, MS)] * 7, [np.full(70, MS)] * 7, 99))
    assert (few.value, few.low) == (1.0, None)


def test_an_outlying_block_moves_neither_a_figure_nor_its_interval_far() -> None:
    found = estimate([94.3] * 7 + [20.0])
    assert 93 < required(found.low) < found.value < required(found.high) < 95
    pairs = ratio([0.05, 0.06, 0.04, 0.05, 0.055, 0.045, 0.05, -1.5])
    assert required(pairs.low) > 1.02
    assert required(pairs.high) < 1.08


@pytest.mark.parametrize(
    ("mean", "count", "low", "high"),
    [(0.95, 100, 0.8882, 0.9785), (1.0, 10, 0.7225, 1.0), (0.0, 10, 0.0, 0.2775), (0.5, 4, 0.15, 0.85)],
)
def test_a_share_has_wilsons_interval(mean: float, count: int, low: float, high: float) -> None:
    found = share(mean, count)
    assert found.value == mean
    assert found.low == pytest.approx(low, abs=1e-4)
    assert found.high == pytest.approx(high, abs=1e-4)


def test_a_share_of_nothing_has_no_interval() -> None:
    found = share(0.0, 0)
    assert math.isnan(found.value)
    assert (found.low, found.high) == (None, None)


def test_where_no_block_is_far_off_the_figure_is_the_mean() -> None:
    values = [1.0, 2.0, 3.0, 4.0, 5.0]
    assert estimate(values).value == pytest.approx(3)
    # Student's t with 4 degrees of freedom: 2.776 standard errors.
    assert required(estimate(values).high) == pytest.approx(3 + 2.776 * np.std(values, ddof=1) / 5**0.5, rel=1e-3)


def test_a_p_value_is_below_a_twentieth_where_the_interval_leaves_1_out() -> None:
    random = np.random.default_rng(0)
    for _ in range(50):
        found = ratio(random.normal(0.02, 0.03, 6))
        assert (required(found.p_value) < 0.05) == (not required(found.low) <= 1 <= required(found.high))
    assert ratio([0.1, 0.2]).p_value is None
    assert estimate([1.0, 2.0, 3.0, 4.0]).p_value is None


@pytest.mark.parametrize(
    ("degrees", "distance"), [(1, 12.706), (2, 4.303), (3, 3.182), (7, 2.365), (10, 2.228), (30, 2.042)]
)
def test_quantiles_of_students_t_are_those_of_the_tables(degrees: int, distance: float) -> None:
    assert t_quantile(degrees, 0.95) == pytest.approx(distance, abs=0.001)


def test_too_few_blocks_or_answers_give_no_interval() -> None:
    assert MIN_BLOCKS == 4
    assert estimate([1.0, 2.0, 3.0]).low is None
    assert unpaired_ratio(np.zeros(3), np.zeros(9)).low is None
    few = [np.full(10, MS)] * 8
    assert percentile_ratio(few, few, 99) is None
    assert required(percentile_ratio(few[:3], few[:3], 50)).low is None


def test_blocks_that_are_all_alike_give_an_interval_without_width() -> None:
    found = estimate([3.0] * 6)
    assert (found.low, found.high) == (3.0, 3.0)
    same = [np.full(100, 10 * MS)] * 6
    assert required(percentile_ratio(same, same, 50)).low == pytest.approx(1)


def test_wild_blocks_give_wide_bounds_and_no_overflow() -> None:
    found = ratio([-400.0, 500.0, 300.0, -200.0])
    assert found.low == pytest.approx(1e-6)
    assert found.high == pytest.approx(1e6)
