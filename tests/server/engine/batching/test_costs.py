from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xlaserve.engine.batching import costs as costs_module
from xlaserve.engine.batching.costs import BRIEF_S, REPLAN_S, Costs
from xlaserve.engine.batching.observed import Parts
from xlaserve.engine.buckets.choice import OVERHEAD_S
from xlaserve.engine.buckets.planner import Cost, Planner

LANES = 2
WARMED = {1: Cost(0.010, 0.012), 4: Cost(0.020, 0.024), 8: Cost(0.030, 0.040)}


class Traffic:
    """Batches that take what they take, one a second."""

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self.now = 0.0

    def run(self, bucket: int, seconds: float, *, running: int = LANES, times: int = 1, every_s: float = 1.0) -> None:
        for _ in range(times):
            self.now += every_s
            self.costs.observe(bucket, running, turn_s=seconds, execute_s=seconds - OVERHEAD_S, now=self.now)


def test_before_traffic_a_turn_takes_its_warm_up_cost_and_the_overhead() -> None:
    costs = Costs(WARMED, LANES)
    assert costs.turn_s(4, 1) == pytest.approx(0.020 + OVERHEAD_S)
    assert costs.turn_s(4, 2) == pytest.approx(0.024 + OVERHEAD_S)


@pytest.mark.parametrize("lanes", [1, 2, 5])
@pytest.mark.parametrize("times", [0.2, 0.9, 3.0])
def test_estimates_approach_what_batches_take_with_each_number_of_lanes(lanes: int, times: float) -> None:
    costs = Costs(WARMED, lanes)
    traffic = Traffic(costs)
    for _ in range(300):
        for running in {1, lanes}:
            traffic.run(4, WARMED[4].at(running, lanes) * times, running=running)
    for running in {1, lanes}:
        assert costs.turn_s(4, running) == pytest.approx(WARMED[4].at(running, lanes) * times, rel=0.05)


@given(st.lists(st.tuples(st.integers(1, 5), st.floats(0.0, 1000.0)), max_size=200))
def test_whatever_batches_take_estimates_stay_above_nothing(batches: list[tuple[int, float]]) -> None:
    costs = Costs(WARMED, 5)
    for number, (running, seconds) in enumerate(batches):
        costs.observe(4, running, turn_s=seconds, execute_s=seconds, now=float(number))
        assert costs.turn_s(4, 1) > 0
        assert costs.turn_s(4, 5) > 0
        assert costs.planner.next_step(5, 5).images


def test_a_batch_that_took_long_once_changes_no_plan() -> None:
    costs = Costs(WARMED, LANES)
    traffic, planner = Traffic(costs), costs.planner
    for _ in range(10):
        traffic.run(4, 0.024, times=30)
        traffic.run(4, 5.0)
        assert costs.turn_s(4, LANES) < 0.024 * 1.1
    assert costs.planner is planner


def test_a_slowed_bucket_gives_way_until_the_others_are_no_better() -> None:
    costs = Costs({4: Cost(0.020, 0.020), 8: Cost(0.030, 0.030)}, LANES)
    traffic = Traffic(costs)
    assert costs.planner.next_step(8, 1, 1).bucket == 8
    traffic.run(8, 0.080, times=30)
    assert costs.planner.next_step(8, 1, 1).bucket == 4
    traffic.run(4, 0.060, times=60)
    assert costs.planner.next_step(8, 1, 1).bucket == 8


@pytest.mark.parametrize("times", [0.3, 0.7, 1.3, 2.0])
def test_a_change_of_speed_makes_no_bucket_win_that_did_not_run(times: float) -> None:
    costs = Costs(WARMED, LANES)
    assert [costs.planner.next_step(images, 1, 1).bucket for images in (1, 4, 8)] == [1, 4, 8]
    Traffic(costs).run(4, WARMED[4].loaded_s * times, times=100)
    assert [costs.planner.next_step(images, 1, 1).bucket for images in (1, 4, 8)] == [1, 4, 8]


def test_plans_are_made_anew_rarely_however_fast_costs_change(monkeypatch: pytest.MonkeyPatch) -> None:
    made = itertools.count()

    class Counted(Planner):
        def __init__(self, *args: object) -> None:
            next(made)
            super().__init__(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(costs_module, "Planner", Counted)
    costs = Costs(WARMED, LANES)
    traffic = Traffic(costs)
    assert next(made) == 0, "a model with many resolutions would make many at once"
    for number in range(10_000):
        assert costs.planner.largest == 8
        traffic.run(4, 0.001 if number // 50 % 2 else 1.0, every_s=0.01)
    assert traffic.now == pytest.approx(100.0)
    assert 10 < next(made) <= 2 + 100.0 / REPLAN_S


def test_no_batch_makes_less_seem_possible_than_was_seen() -> None:
    costs = Costs(WARMED, LANES)
    assert costs.cheapest_s == 0.010
    traffic = Traffic(costs)
    traffic.run(1, 10.0, times=100)
    assert costs.cheapest_s == 0.010
    traffic.run(1, 0.004 + OVERHEAD_S)
    traffic.run(1, 10.0)
    assert costs.cheapest_s == pytest.approx(0.004)
    costs.add({16: Cost(0.1, 0.1)})
    assert costs.cheapest_s == pytest.approx(0.004)


def test_a_cost_measured_too_high_refuses_requests_only_until_one_is_tried() -> None:
    costs = Costs({1: Cost(1.0, 1.0)}, LANES)
    refused = 0
    while costs.cheapest_s > 0.1:
        costs.lower_cheapest()
        refused += 1
    assert refused < 50
    Traffic(costs).run(1, 0.02 + OVERHEAD_S)
    assert costs.cheapest_s == pytest.approx(0.02)


def test_adding_a_bucket_keeps_the_costs_measured_of_the_others() -> None:
    costs = Costs(WARMED, LANES)
    Traffic(costs).run(4, 0.05, times=50)
    before_s = costs.turn_s(4, LANES)
    costs.add({16: Cost(0.06, 0.08)})
    assert costs.turn_s(4, LANES) == before_s
    assert costs.planner.largest == 16


def test_brief_buckets_are_those_of_warm_up_whatever_turns_take_later() -> None:
    costs = Costs({1: Cost(BRIEF_S, BRIEF_S), 2: Cost(BRIEF_S, BRIEF_S * 1.1)}, LANES)
    Traffic(costs).run(1, 1.0, times=50)
    assert costs.brief == {1}


def test_the_parts_of_batch_times_are_kept_for_buckets_that_serve() -> None:
    costs = Costs(WARMED, LANES)
    costs.retire(8)
    for bucket in (4, 8):
        costs.note(bucket, Parts(0.001, 0.03, 0.002, 1.0))
    turns = costs.turns()
    assert {bucket: turn.observed.batches for bucket, turn in turns.items()} == {1: 0, 4: 1}
    assert turns[4].observed.own.alone_s == pytest.approx(0.03)
    assert turns[4].cost.alone_s == pytest.approx(0.020 + OVERHEAD_S), "plans learn of whole turns"
