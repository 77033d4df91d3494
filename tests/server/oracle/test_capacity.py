from __future__ import annotations

import pytest

from xlaserve.config import Settings
from xlaserve.oracle.capacity import MOST_FRONTS, Capacity, Costs, Limit, advised, capacity, most_useful

COSTS = Costs(front_us=400, engine_us=100, process_us=500)


@pytest.mark.parametrize(
    ("fronts", "cores", "expected"),
    [
        (0, 1, (2000, Limit.CORES)),
        (0, 2, (2000, Limit.PROCESS)),
        (0, 32, (2000, Limit.PROCESS)),
        (1, 1, (2000, Limit.CORES)),
        (1, 2, (2500, Limit.FRONTS)),
        (2, 2, (4000, Limit.CORES)),
        (2, 4, (5000, Limit.FRONTS)),
        (3, 32, (7500, Limit.FRONTS)),
        (4, 32, (10_000, Limit.ENGINE)),
        (5, 32, (10_000, Limit.ENGINE)),
    ],
)
def test_what_is_busy_first_is_the_limit(fronts: int, cores: int, expected: tuple[float, Limit]) -> None:
    assert capacity(COSTS, fronts, cores) == Capacity(fronts, *expected)


@pytest.mark.parametrize(
    ("cores", "expected"),
    [
        (2, (2, 4000, Limit.CORES)),
        (4, (4, 8000, Limit.CORES)),
        (8, (4, 10_000, Limit.ENGINE)),
        (32, (4, 10_000, Limit.ENGINE)),
    ],
)
def test_no_front_more_is_of_use(cores: int, expected: tuple[int, float, Limit]) -> None:
    assert most_useful(COSTS, cores) == expected


@pytest.mark.parametrize("cores", [1, 2, 3, 5, 7, 8, 16, 61])
@pytest.mark.parametrize("costs", [COSTS, Costs(345, 155, 430), Costs(333.3, 0.7, 400, 123), Costs(50, 60, 70)])
def test_as_many_as_are_of_use_carry_as_much_as_any_and_one_less_does_not(costs: Costs, cores: int) -> None:
    useful = most_useful(costs, cores)
    rates = [capacity(costs, fronts, cores).requests_per_s for fronts in range(1, MOST_FRONTS + 1)]
    assert useful.requests_per_s == pytest.approx(max(rates))
    assert useful.fronts <= cores
    assert useful.fronts == 1 or rates[useful.fronts - 2] < max(rates) * (1 - 1e-6)


def test_what_runs_models_on_the_same_cores_leaves_less_for_the_others() -> None:
    assert capacity(COSTS._replace(lanes_us=500), 2, 2) == (2, 2000, Limit.CORES)
    assert capacity(COSTS._replace(lanes_us=500), 0, 1) == (0, 1000, Limit.CORES)


def test_one_process_is_advised_where_several_are_hardly_faster() -> None:
    assert advised(COSTS, 2).fronts == 2
    assert advised(COSTS, 1).fronts == 0
    assert advised(COSTS._replace(lanes_us=7000), 8).fronts == 0


def test_as_many_fronts_as_can_be_set_are_looked_at() -> None:
    assert Settings(fronts=MOST_FRONTS).fronts == MOST_FRONTS
    with pytest.raises(ValueError, match="fronts"):
        Settings(fronts=MOST_FRONTS + 1)
