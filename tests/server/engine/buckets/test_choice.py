from __future__ import annotations

import math
import time
from collections import Counter
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xlaserve.config import AutoBuckets
from xlaserve.engine.buckets.choice import (
    MARGIN,
    Candidate,
    Limits,
    choose,
    expected_cost_s,
    in_order_of_use,
    powers_of_two,
)
from xlaserve.engine.buckets.demand import MAX_DEMAND, Demand, even, note
from xlaserve.engine.buckets.planner import Sequences

seconds = st.floats(1e-3, 10.0)
demands = st.dictionaries(st.integers(1, 40), st.integers(1, 1000), min_size=1, max_size=8).map(Counter)
memory = st.integers(0, 100)
candidates = st.lists(
    st.builds(Candidate, st.integers(1, 24), seconds, memory, memory),
    min_size=1,
    max_size=7,
    unique_by=lambda candidate: candidate.batch,
)
limits = st.builds(Limits, st.integers(1, 5), st.sampled_from([40, 100, 250, math.inf]))


def batch_sizes(most: int) -> tuple[int, ...]:
    return AutoBuckets(max_batch=most).candidates


def cost_of(batches: dict[int, float], demand: Demand) -> float:
    """Returns the cost by the planner's own sequences, which know nothing of how sets are searched."""
    sequences = Sequences(batches)
    total = sum(images * sequences.least_s(n) / n for n, images in demand.items())
    return total / demand.total()


def admissible_sets(of: list[Candidate], limits: Limits) -> list[tuple[Candidate, ...]]:
    sets = [chosen for size in range(1, len(of) + 1) for chosen in combinations(of, size)]
    return [
        chosen
        for chosen in sets
        if len(chosen) <= limits.buckets
        and sum(one.held_bytes for one in chosen) + max(one.run_bytes for one in chosen) <= limits.memory_bytes
    ]


def costs(chosen: tuple[Candidate, ...] | list[Candidate]) -> dict[int, float]:
    return {candidate.batch: candidate.cost_s for candidate in chosen}


@given(st.dictionaries(st.integers(1, 30), seconds, min_size=1, max_size=6), demands)
def test_an_expected_cost_is_that_of_the_planners_sequences(batches: dict[int, float], demand: Demand) -> None:
    assert expected_cost_s(batches, demand) == pytest.approx(cost_of(batches, demand), rel=1e-9)


@given(candidates, demands, limits)
def test_the_chosen_set_is_the_smallest_close_to_the_cheapest_of_all(
    measured: list[Candidate], demand: Demand, limit: Limits
) -> None:
    sets = {chosen: cost_of(costs(chosen), demand) for chosen in admissible_sets(measured, limit)}
    chosen = choose(measured, demand, limit)
    if not sets:
        assert chosen == ()
        return
    cost_s = cost_of(costs(chosen), demand)
    least_s = min(sets.values())
    slack = 1 + 1e-9
    assert cost_s <= least_s * (1 + MARGIN) * slack
    assert limit.admit(chosen)
    assert chosen == tuple(sorted(chosen, key=lambda candidate: candidate.batch))
    assert set(chosen) <= set(measured)
    of_the_same_size = [sets[other] for other in sets if len(other) == len(chosen)]
    assert cost_s <= min(of_the_same_size) * slack
    smaller = [sets[other] for other in sets if len(other) < len(chosen)]
    assert all(other_s * slack >= least_s * (1 + MARGIN) for other_s in smaller)


def linear(batch: int, once_s: float = 1.0, image_s: float = 1.0) -> Candidate:
    return Candidate(batch, once_s + image_s * batch)


def test_buckets_follow_the_demand() -> None:
    measured = [linear(batch) for batch in batch_sizes(16)]
    assert [one.batch for one in choose(measured, Counter({3: 90, 12: 10}), Limits(2))] == [3, 12]
    assert [one.batch for one in choose(measured, Counter({1: 100}), Limits(8))] == [1]


def test_a_bucket_that_other_buckets_make_up_for_is_not_taken() -> None:
    # 4 + 1 takes 5.6 s and a padded 6 takes 6.3 s.
    measured = [linear(batch, once_s=0.3) for batch in (1, 4, 6)]
    assert [one.batch for one in choose(measured, Counter({5: 100}), Limits(3))] == [1, 4]


def test_a_bucket_that_gains_less_than_the_margin_is_not_taken() -> None:
    measured = [Candidate(1, 1.0), Candidate(2, 2.0 * (1 - MARGIN / 2))]
    assert [one.batch for one in choose(measured, Counter({2: 100}), Limits(2))] == [2]
    assert [one.batch for one in choose(measured, Counter({1: 100, 2: 100}), Limits(2))] == [1]


def test_what_does_not_fit_into_memory_is_left_out() -> None:
    measured = [Candidate(1, 1.0, 10, 1), Candidate(8, 2.0, 10, 80), Candidate(4, 1.5, 10, 40)]
    demand = Counter({1: 1, 8: 100})
    assert [one.batch for one in choose(measured, demand, Limits(3, memory_bytes=1000))] == [1, 8]
    assert [one.batch for one in choose(measured, demand, Limits(3, memory_bytes=99))] == [8]
    assert [one.batch for one in choose(measured, demand, Limits(3, memory_bytes=60))] == [1, 4]
    assert choose(measured, demand, Limits(3, memory_bytes=5)) == ()


def test_demand_above_the_largest_bucket_is_priced_as_the_split_that_runs() -> None:
    assert expected_cost_s({1: 1.0, 8: 2.0}, Counter({20: 7})) == pytest.approx(6.0 / 20)


def test_even_the_most_candidates_are_searched_in_no_time() -> None:
    measured = [Candidate(batch, 0.3 + batch**0.8 + (batch % 3) * 0.05) for batch in batch_sizes(256)]
    began = time.process_time()
    chosen = choose(measured, even(256), Limits(8))
    assert 4 <= len(chosen) <= 8
    assert time.process_time() - began < 5


def test_a_choice_without_demand_is_refused() -> None:
    with pytest.raises(ValueError, match="no demand"):
        choose([linear(1)], Counter(), Limits(1))


def test_candidates_are_measured_so_that_the_first_ones_make_a_good_set() -> None:
    assert in_order_of_use(batch_sizes(16)) == (1, 16, 4, 8, 2, 12, 6, 3)
    assert in_order_of_use([8]) == (8,)
    assert powers_of_two(20) == (1, 2, 4, 8, 16)
    assert in_order_of_use([]) == ()


def test_demand_counts_each_image_once_and_bounds_its_record() -> None:
    demand = Demand()
    note(demand, waiting=20, taken=16)
    note(demand, waiting=20, taken=4)
    note(demand, waiting=5000, taken=16)
    assert demand == {20: 20, MAX_DEMAND: 16}
    assert even(3) == {1: 1, 2: 1, 3: 1}
