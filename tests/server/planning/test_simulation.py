"""Simulations against queues whose answers are known."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from xlaserve.engine.buckets.planner import Cost
from xlaserve.planning.load import Load, poisson
from xlaserve.planning.measured_profile import Profile, lognormal
from xlaserve.planning.simulation import MOST_SERVERS, simulate

SERVICE_S = 0.010
ONE_AT_A_TIME = Profile({1: Cost(SERVICE_S, SERVICE_S)}, max_images=10**6)


def crommelin(waits_s: float, utilisation: float) -> float:
    """The share of requests of M/D/1 that wait for at most `waits_s` (Crommelin, 1932)."""
    x = waits_s / SERVICE_S
    terms = (
        (utilisation * (k - x)) ** k / math.factorial(k) * math.exp(-utilisation * (k - x)) for k in range(int(x) + 1)
    )
    return (1 - utilisation) * sum(terms)


@pytest.mark.parametrize("utilisation", [0.5, 0.8])
def test_one_lane_and_one_bucket_are_the_queue_m_d_1(utilisation: float) -> None:
    load = poisson(utilisation / SERVICE_S, 8_000 * SERVICE_S / utilisation, 1, seed=1)
    outcome = simulate(ONE_AT_A_TIME, 1, load)
    mean_wait_s = utilisation * SERVICE_S / (2 * (1 - utilisation))
    assert np.mean(outcome.latency_s) == pytest.approx(SERVICE_S + mean_wait_s, rel=0.06)
    assert crommelin(outcome.percentile_s(90) - SERVICE_S, utilisation) == pytest.approx(0.90, abs=0.015)
    assert outcome.busy == pytest.approx(utilisation, rel=0.03)
    assert outcome.padding == 0
    assert outcome.fill == 1


def test_batches_fill_as_the_load_grows() -> None:
    profile = Profile({1: Cost(0.010, 0.010), 8: Cost(0.020, 0.020)}, max_images=10**6)
    quiet, busy = (simulate(profile, 1, poisson(rate, 2_000 / rate, 1, seed=1)) for rate in (10, 300))
    assert quiet.fill == pytest.approx(1, abs=0.1)
    assert busy.fill > 4
    assert busy.percentile_s(99) < 0.1, "a lane that took one image at a time would never keep up"


@pytest.mark.parametrize(
    ("gap_s", "expected_s"),
    [(0.0, [0.016, 0.016]), (0.005, [0.013, 0.013]), (0.010, [0.010, 0.010])],
)
def test_lanes_run_side_by_side_and_slow_each_other_down_meanwhile(gap_s: float, expected_s: list[float]) -> None:
    load = Load(np.array([0.0, gap_s]), np.array([1, 1]))
    profile = Profile({1: Cost(0.010, 0.016)}, lanes=2)
    assert simulate(profile, 1, load).latency_s.tolist() == pytest.approx(expected_s)


def test_the_event_loop_serves_one_request_after_the_other() -> None:
    load = Load(np.zeros(10), np.ones(10, np.int64))
    profile = Profile({16: Cost(0.001, 0.001)}, front_s=0.002)
    assert simulate(profile, 1, load).latency_s.max() >= 10 * 0.002


def test_fronts_share_what_one_event_loop_would_do_alone() -> None:
    load = poisson(900, 2_000 / 900, 1, seed=1)
    profile = Profile({16: Cost(0.001, 0.001)}, front_s=0.002, max_images=10**6)
    alone, several = (simulate(replace(profile, fronts=fronts, engine_s=0.0001), 1, load) for fronts in (0, 4))
    assert alone.percentile_s(50) > 0.1, "its event loop takes 500 requests/s"
    assert several.percentile_s(99) < 0.02


def test_the_event_loop_of_the_engine_serves_all_fronts() -> None:
    load = Load(np.zeros(10), np.ones(10, np.int64))
    profile = Profile({16: Cost(0.001, 0.001)}, front_s=0.001, fronts=10, engine_s=0.004)
    assert simulate(profile, 1, load).latency_s.max() >= 10 * 0.004


def test_what_is_between_the_parts_of_a_request_is_part_of_it() -> None:
    load = Load(np.array([0.0, 1.0]), np.array([1, 1]))
    profile = Profile(
        ONE_AT_A_TIME.costs, started_s=(0.001,), returned_s=(0.002,), front_s=0.0005, outside_s=0.003, deviations=(1.5,)
    )
    # The loop wakes up for the call, a thread for the batch, and the loop for its end; then it writes the answer.
    expected_s = 0.002 + 0.0005 + 0.001 + 1.5 * SERVICE_S + 0.002 + 0.003
    assert simulate(profile, 1, load).latency_s == pytest.approx([expected_s] * 2)


def test_a_batch_begins_after_the_answers_of_the_one_before_are_written() -> None:
    load = Load(np.array([0.0, 0.008]), np.array([1, 1]))
    # One image does not fill the best bucket: it is not gathered ahead.
    profile = Profile({1: Cost(SERVICE_S, SERVICE_S), 8: Cost(0.020, 0.020)}, front_s=0.004)
    first, second = simulate(profile, 1, load).latency_s
    assert first == pytest.approx(0.002 + SERVICE_S + 0.002)
    assert second == pytest.approx(first + SERVICE_S + 0.002 - 0.008)


def test_plans_begin_with_warm_up_costs_and_learn_what_batches_take() -> None:
    costs = {1: Cost(0.010, 0.010), 8: Cost(0.100, 0.100)}
    promised = {1: Cost(0.010, 0.010), 8: Cost(0.020, 0.020)}
    load = poisson(50, 4_000 / 50, 1, seed=1)
    wise, misled = (simulate(Profile(costs, planned=planned), 1, load) for planned in ({}, promised))
    assert wise.batches[8] == 0
    assert 0 < misled.batches[8] < 0.1 * misled.batches.total()
    assert misled.percentile_s(99) > 2 * wise.percentile_s(99)


def test_requests_that_are_refused_or_late_are_over_every_limit() -> None:
    load = poisson(1000, 2, 1, seed=1)
    full = simulate(Profile(ONE_AT_A_TIME.costs, max_images=20), 1, load)
    assert full.failed == pytest.approx(0.9, abs=0.05)
    assert full.percentile_s(99) == math.inf
    in_time = simulate(ONE_AT_A_TIME, 1, load, deadline_s=0.2)
    answered = in_time.latency_s[np.isfinite(in_time.latency_s)]
    assert 0.8 < in_time.failed < 0.95
    assert answered.max() <= 0.2


@pytest.mark.parametrize("balancing", ["round-robin", "random", "least-outstanding"])
def test_more_servers_than_are_simulated_have_their_share(balancing: str) -> None:
    servers = 10 * MOST_SERVERS
    load = poisson(servers * 50, 40_000 / (servers * 50), 1, seed=2)
    outcome = simulate(ONE_AT_A_TIME, servers, load, balancing=balancing)  # type: ignore[arg-type]
    assert outcome.busy == pytest.approx(0.5, rel=0.1)


def test_the_same_seed_gives_the_same_outcome() -> None:
    load = poisson(50, 20, 2, seed=3)
    profile = Profile({1: Cost(0.01, 0.01), 4: Cost(0.02, 0.02)}, deviations=lognormal(0.2))
    first, second = (simulate(profile, 2, load, balancing="random", seed=7) for _ in range(2))
    assert (first.latency_s == second.latency_s).all()


def test_queued_work_is_what_the_metric_of_a_server_shows() -> None:
    load = Load(np.concatenate([np.zeros(21), [0.005]]), np.ones(22, np.int64))
    outcome = simulate(ONE_AT_A_TIME, 1, load)
    assert outcome.queued_s * 22 == pytest.approx(0.19, rel=0.02), "one runs, one is gathered; the others wait"
