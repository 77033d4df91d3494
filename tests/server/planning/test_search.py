from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest

from xlaserve.engine.buckets.planner import Cost
from xlaserve.errors import ConfigError
from xlaserve.planning.load import poisson
from xlaserve.planning.measured_profile import Profile
from xlaserve.planning.search import MODEL_ERROR, TRIES, Slo, error, fewest, parse_slo
from xlaserve.planning.simulation import Outcome, simulate

PROFILE = Profile({1: Cost(0.010, 0.010)}, max_images=10**6)
LOAD = poisson(1000, 1, 1, seed=0)
SLO = Slo(99, 0.050)


def outcome(latency_s: float) -> Outcome:
    return Outcome(np.full(100, latency_s), 0.5, 0.0)


@pytest.mark.parametrize("needed", [10, 11, 12, 17, 40, 999, 1000])
def test_the_least_number_that_is_enough_is_found(needed: int) -> None:
    found = fewest(PROFILE, LOAD, SLO, 1000, lambda servers, seed: outcome(0.01 if servers >= needed else 1.0))
    assert found.servers == needed
    assert len(found.tried) < 20


def test_no_less_than_the_capacity_asks_for_is_tried() -> None:
    tried = []

    def note(servers: int, seed: int) -> Outcome:
        tried.append(servers)
        return outcome(0.01)

    assert fewest(PROFILE, LOAD, SLO, 1000, note).servers == math.ceil(LOAD.rate / 100)
    assert set(tried) == {math.ceil(LOAD.rate / 100)}


def test_it_says_where_the_most_are_not_enough() -> None:
    found = fewest(PROFILE, LOAD, SLO, 25, lambda servers, seed: outcome(1.0))
    assert found.servers is None
    assert 25 in found.tried


def test_the_worst_of_several_tries_decides() -> None:
    last = TRIES - 1
    found = fewest(
        PROFILE, LOAD, SLO, 100, lambda servers, seed: outcome(1.0 if seed == last and servers < 30 else 0.01)
    )
    assert found.servers == 30


def test_servers_that_are_found_meet_the_limit_and_one_less_does_not() -> None:
    load = poisson(200, 3, 1, seed=0)

    def simulated(servers: int, seed: int) -> Outcome:
        return simulate(PROFILE, servers, load, seed=seed)

    servers = fewest(PROFILE, load, SLO, 100, simulated).servers
    assert servers is not None
    assert simulate(PROFILE, servers, poisson(200, 3, 1, seed=9)).percentile_s(99) < 0.055
    assert simulate(PROFILE, servers - 1, poisson(200, 3, 1, seed=9)).percentile_s(99) > 0.045


def test_a_figure_has_an_error_and_the_servers_enough_for_its_worst_case() -> None:
    def simulated(profile: Profile, servers: int, seed: int) -> Outcome:
        return outcome(profile.costs[1].alone_s * (40 + seed) / servers)

    nominal = fewest(PROFILE, LOAD, SLO, 100, partial(simulated, PROFILE)).servers
    assert nominal == 10, "no fewer than the capacity asks for"
    found = error(PROFILE, LOAD, SLO, nominal, most=100, costs=0.1, simulate=simulated)
    assert found.least_s == pytest.approx(0.9 * 0.01 * 40 / 10 * (1 - MODEL_ERROR))
    assert found.most_s == pytest.approx(1.1 * 0.01 * (40 + TRIES - 1) / 10 * (1 + MODEL_ERROR))
    assert found.surely == 11
    impossible = error(PROFILE, LOAD, Slo(99, 0.001), nominal, most=20, costs=0.1, simulate=simulated)
    assert impossible.surely is None


@pytest.mark.parametrize(
    ("text", "slo"),
    [("p99<50ms", Slo(99, 0.05)), ("p99.9 <= 1s", Slo(99.9, 1.0)), (" p50<250us ", Slo(50, 0.00025))],
)
def test_limits_are_a_percentile_and_a_time(text: str, slo: Slo) -> None:
    assert parse_slo(text).percent == slo.percent
    assert parse_slo(text).limit_s == pytest.approx(slo.limit_s)


@pytest.mark.parametrize("text", ["", "p99", "p0<1ms", "p100<1ms", "p99>50ms", "p99<0ms", "p99<50", "mean<5ms"])
def test_other_limits_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="expected a percentile and its limit such as p99<50ms"):
        parse_slo(text)
