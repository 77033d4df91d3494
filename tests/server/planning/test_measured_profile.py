from __future__ import annotations

import math
from random import Random
from statistics import fmean, quantiles, stdev

import pytest

from xlaserve.engine.buckets.planner import Cost
from xlaserve.planning.measured_profile import Profile, draw, lognormal

PROFILE = Profile({1: Cost(0.010, 0.020), 8: Cost(0.040, 0.090)}, lanes=3, planned={1: Cost(0.01, 0.01)})


def test_values_are_drawn_between_quantiles() -> None:
    chance = Random(0)
    drawn = [draw((0.0, 1.0, 5.0), chance) for _ in range(4000)]
    assert quantiles(drawn, n=4) == pytest.approx([0.5, 1.0, 3.0], rel=0.1)
    assert max(drawn) <= 5
    assert draw((), chance) == 0
    assert draw((0.7,), chance) == 0.7


def test_the_logarithm_of_a_lognormal_ratio_is_normal() -> None:
    logs = [math.log(ratio) for ratio in lognormal(0.2)]
    assert fmean(logs) == pytest.approx(0.0, abs=1e-9)
    assert stdev(logs) == pytest.approx(0.2, rel=0.05)
    assert {*lognormal(0.0)} == {1.0}


def test_fewer_lanes_slow_each_other_down_less() -> None:
    fewer = PROFILE.with_lanes(2)
    assert [*fewer.costs[1], *fewer.costs[8]] == pytest.approx([0.010, 0.015, 0.040, 0.065])
    assert PROFILE.with_lanes(1).capacity == pytest.approx(8 / 0.040)
    assert PROFILE.capacity == pytest.approx(3 * 8 / 0.090)


def test_a_server_may_have_some_of_its_buckets() -> None:
    profile = PROFILE.with_buckets([8])
    assert (profile.costs, profile.planned) == ({8: PROFILE.costs[8]}, {})


def test_costs_may_be_off() -> None:
    assert PROFILE.scaled(1.5).costs[8] == pytest.approx((0.060, 0.135))
