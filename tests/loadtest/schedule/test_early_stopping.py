from __future__ import annotations

import math

import numpy as np
import pytest
from tests.loadtest.queues import MM1, quantile

from xlaserve_loadtest.schedule.early_stopping import (
    TailCount,
    grows,
    inflation_of_run,
    least_requests_to_pass,
    max_over,
    percentile_estimate,
    probability_of_at_most,
    variance_inflation,
)


@pytest.mark.parametrize(("over", "requests", "share"), [(0, 459, 0.01), (3, 20, 0.3), (200, 24_576, 0.01)])
def test_the_probability_is_the_binomial_one(over: int, requests: int, share: float) -> None:
    exact = sum(math.comb(requests, k) * share**k * (1 - share) ** (requests - k) for k in range(min(over, 3) + 1))
    if over <= 3:
        assert probability_of_at_most(over, requests, share) == pytest.approx(exact, rel=1e-9)
    else:
        assert probability_of_at_most(over, requests, share) == pytest.approx(0.0014108776, rel=1e-6)
    assert probability_of_at_most(-1, requests, share) == 0
    assert probability_of_at_most(requests, requests, share) == 1


# LoadGen's own counts: 459 requests pass p99 with none over the limit, 64 and 662 are the least for an estimate.
@pytest.mark.parametrize(
    ("requests", "percentile", "allowed"),
    [(458, 99, -1), (459, 99, 0), (63, 90, 0), (64, 90, 1), (661, 99, 0), (662, 99, 1)],
)
def test_as_many_may_be_over_the_limit_as_loadgen_allows(requests: int, percentile: float, allowed: int) -> None:
    assert max_over(requests, percentile) == allowed


def test_the_estimate_of_a_percentile_is_an_upper_bound_by_rank() -> None:
    # LoadGen's p90 of 1,000 is their 92.3rd percentile.
    assert percentile_estimate(np.random.default_rng(0).permutation(1000).astype(float), 90) == 922
    assert percentile_estimate(np.arange(63.0), 90) is None
    assert percentile_estimate(np.arange(64.0), 90) == 63


def test_least_requests_pass_with_the_share_that_they_are_planned_for() -> None:
    requests = least_requests_to_pass(99, 0.5)
    assert max_over(requests, 99) >= requests * 0.01 * 0.5


def test_requests_of_a_queue_tell_less_than_independent_ones() -> None:
    random = np.random.default_rng(0)
    independent = random.exponential(size=20_000)
    arrivals = np.cumsum(random.exponential(1 / 0.9, 20_000))
    assert variance_inflation(independent, 99) < 4
    assert variance_inflation(MM1(arrivals, random), 99) > 30
    # A queue that grows: all of its latest requests are over its own percentile.
    assert variance_inflation(np.arange(20_000.0), 99) == pytest.approx(376, abs=5)


def test_too_few_requests_or_equal_ones_are_judged_safely() -> None:
    assert variance_inflation(np.arange(199.0), 90) == math.inf
    assert not TailCount(199, 0, math.inf).is_surely_within(50)
    assert not TailCount(0, 0, math.inf).is_surely_beyond(50)
    assert TailCount(0, 0, math.inf).share == 1
    assert variance_inflation(np.full(1000, 5.0), 99) == 1


def test_a_count_within_beyond_or_between_is_told_apart() -> None:
    assert TailCount(10_000, 50, 1).is_surely_within(99)
    assert TailCount(10_000, 150, 1).is_surely_beyond(99)
    for count in (TailCount(10_000, 95, 1), TailCount(10_000, 50, 20), TailCount(10_000, 105, 1)):
        assert not count.is_surely_within(99)
        assert not count.is_surely_beyond(99)


@pytest.mark.parametrize("load", [0.5, 0.9])
def test_a_run_exactly_at_the_limit_seldom_passes(load: float) -> None:
    limit = quantile(MM1, load, 99, 2_000_000)
    random = np.random.default_rng(1)
    naive = passed = 0
    for _ in range(200):
        arrivals = np.cumsum(random.exponential(1 / load, 10_500))
        latencies = MM1(arrivals, random)[500:]
        over = int((latencies > limit).sum())
        naive += TailCount(latencies.size, over, 1.0).is_surely_within(99)
        passed += TailCount(latencies.size, over, inflation_of_run(latencies, limit, 99)).is_surely_within(99)
    assert naive >= 30
    assert passed <= 6


@pytest.mark.parametrize(("failing_from", "is_growing"), [(0, False), (300, True), (1000, False)])
def test_a_run_in_which_requests_fail_for_good_grows(failing_from: int, *, is_growing: bool) -> None:
    latencies = np.full(1000, 5.0)
    latencies[failing_from:] = math.inf
    assert grows(latencies) == is_growing
