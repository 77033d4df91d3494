from __future__ import annotations

import math
import random

import pytest

from xlaserve.engine.batching.observed import POINTS, REMEMBERED, Observed, Parts, Recent
from xlaserve.engine.buckets.planner import Cost

WARMED = Cost(0.010, 0.015)
OTHERWISE = Cost(0.030, 0.036)
"""Times of batches in traffic."""
SPREAD = 0.2


def batch(own_s: float, lanes: float) -> Parts:
    return Parts(0.001, own_s, 0.002, lanes)


@pytest.mark.parametrize("lanes", [2, 5])
def test_what_batches_take_is_told_apart_by_what_ran_meanwhile(lanes: int) -> None:
    recent, chance = Recent(WARMED, lanes), random.Random(1)
    for _ in range(2 * REMEMBERED):
        busy = chance.uniform(1, lanes)
        own_s = OTHERWISE.alone_s * (OTHERWISE.loaded_s / OTHERWISE.alone_s) ** ((busy - 1) / (lanes - 1))
        recent.add(batch(own_s * math.exp(chance.gauss(0.0, SPREAD)), busy))
    observed = recent.observed()
    assert observed.batches == REMEMBERED
    assert observed.own == pytest.approx(OTHERWISE, rel=0.06)


def test_without_a_difference_in_what_ran_warm_up_says_what_it_makes() -> None:
    recent = Recent(WARMED, 2)
    for _ in range(20):
        recent.add(batch(0.045, 2.0))
    assert recent.observed().own == pytest.approx((0.030, 0.045))


def test_one_lane_has_one_cost() -> None:
    recent = Recent(Cost(0.010, 0.010), 1)
    for own_s in (0.02, 0.08):
        recent.add(batch(own_s, 1.0))
    assert recent.observed().own == pytest.approx((0.04, 0.04))


def test_how_far_batches_stray_is_kept_as_it_was_with_the_rare_slow_ones() -> None:
    recent = Recent(WARMED, 1)
    for number in range(100):
        recent.add(Parts(0.001, 0.1 if number == 7 else 0.01, 0.002 * number, 1.0))
    observed = recent.observed()
    assert len(observed.deviations) == POINTS
    assert observed.deviations[-1] / observed.deviations[0] == pytest.approx(10)
    assert observed.deviations[POINTS // 2] == observed.deviations[0]
    assert observed.started_s == pytest.approx([0.001] * POINTS)
    assert observed.returned_s[POINTS // 2] == pytest.approx(0.099)
    assert math.prod(observed.deviations) ** (1 / POINTS) == pytest.approx(1, rel=0.1)


def test_only_the_latest_batches_count() -> None:
    recent = Recent(WARMED, 1)
    for own_s in [1.0] * 1000 + [0.01] * REMEMBERED:
        recent.add(batch(own_s, 1.0))
    assert recent.observed().own.alone_s == pytest.approx(0.01)


def test_before_any_batch_nothing_is_known() -> None:
    assert Recent(WARMED, 2).observed() == Observed()
