from __future__ import annotations

import pytest
from bench.fronts import Block, by_role, compared, least_served, shared


def test_the_time_of_all_fronts_is_that_of_one_role() -> None:
    before = {"server": 1.0, "front 1": 2.0, "front 2": 3.0, "engine": 4.0, "engine's loop": 3.5}
    after = {"server": 1.0, "front 1": 2.1, "front 2": 3.3, "engine": 4.2, "engine's loop": 3.6}
    found = by_role(before, after, 1000)
    assert found == pytest.approx({"server": 0, "fronts": 400, "engine": 200, "engine's loop": 100})


def test_a_process_that_ended_meanwhile_is_not_passed_over() -> None:
    with pytest.raises(KeyError):
        by_role({"server": 1.0, "front 1": 2.0}, {"server": 1.0}, 10)


BLOCKS = {
    "one process": [Block(1000, {"server": 500}), Block(2000, {"server": 600})],
    "1 front": [
        Block(1500, {"server": 1, "fronts": 460, "engine": 90, "engine's loop": 61}),
        Block(2000, {"server": 3, "fronts": 440, "engine": 80, "engine's loop": 63}),
    ],
    "bare": [Block(2000, {"server": 400}), Block(3000, {"server": 400})],
}


def test_arms_are_compared_block_by_block() -> None:
    figures = {figure.name: figure for figure in compared(8, BLOCKS)}
    assert {name: figure[1:4] for name, figure in figures.items()} == {
        "requests/s at 8, 1 front / one process": (1.25, 1.0, 1.5),
        "requests/s at 8, bare / one process": (1.75, 1.5, 2.0),
        "us a request at 8, one process: all": (550, 500, 600),
        "us a request at 8, 1 front: supervisor": (2, 1, 3),
        "us a request at 8, 1 front: fronts": (450, 440, 460),
        "us a request at 8, 1 front: engine": (85, 80, 90),
        "us a request at 8, 1 front: engine's loop": (62, 61, 63),
        "us a request at 8, bare: all": (400, 400, 400),
        "processor time at 8, 1 front: a front / bare": pytest.approx((1.125, 1.1, 1.15)),
    }
    assert not any(figure.target for figure in figures.values())


def test_the_targets_are_those_of_a_busy_server() -> None:
    targets = {figure.name: figure.is_met for figure in compared(32, BLOCKS) if figure.target}
    assert targets == {
        "us a request at 32, 1 front: engine's loop": False,
        "processor time at 32, 1 front: a front / bare": True,
    }


@pytest.mark.parametrize(("cores", "expected"), [(2, [0.80, None, None]), (8, [None, None, 0.95])])
def test_what_is_to_be_served_depends_on_the_cores(cores: int, expected: list[float | None]) -> None:
    assert [least_served(fronts, cores) for fronts in (0, 1, 2)] == expected


@pytest.mark.parametrize(("concurrency", "expected"), [(1, [1]), (8, [3, 3, 2]), (9, [3, 3, 3])])
def test_no_generator_sends_nothing(concurrency: int, expected: list[int]) -> None:
    assert shared(concurrency, 3) == expected
