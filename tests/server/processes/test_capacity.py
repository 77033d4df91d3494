from __future__ import annotations

import pytest

from xlaserve.config import Settings
from xlaserve.processes.capacity import MOST_FRONTS, Capacity, Costs, Limit, advised, capacity, most_useful, needed

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


def test_engines_that_share_the_work_carry_more_until_something_else_is_busy_first() -> None:
    assert capacity(COSTS, 8, 32, engines=2) == (8, 20_000, Limit.ENGINE)
    assert capacity(COSTS, 8, 32, engines=4) == (8, 20_000, Limit.FRONTS)
    assert capacity(COSTS, 8, 8, engines=4) == (8, 16_000, Limit.CORES)
    assert most_useful(COSTS, 32, engines=4) == (16, 40_000, Limit.ENGINE)
    assert capacity(COSTS, 0, 32, engines=4) == capacity(COSTS, 0, 32), "without fronts there is one process"


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


@pytest.mark.parametrize(
    ("images_per_s", "cores", "engines", "expected"),
    [
        (0.0, 16, 1, 1),
        (2_500, 16, 1, 1),
        (2_501, 16, 1, 2),
        (2_501, 16, 2, 3),
        (9_000, 16, 1, 4),
        (90_000, 16, 1, 4),
        (90_000, 16, 8, 15),
        (9_000, 3, 1, 2),
        (9_000, 2, 1, 1),
        (9_000, 1, 1, 1),
        (1e9, 512, 64, MOST_FRONTS),
    ],
)
def test_fronts_are_as_many_as_bring_what_engines_compute_beside_one_core(
    images_per_s: float, cores: int, engines: int, expected: int
) -> None:
    assert needed(images_per_s, cores, engines, COSTS) == expected


def test_as_many_fronts_as_can_be_set_are_looked_at() -> None:
    assert Settings(fronts=MOST_FRONTS).fronts == MOST_FRONTS
    with pytest.raises(ValueError, match="fronts"):
        Settings(fronts=MOST_FRONTS + 1)
