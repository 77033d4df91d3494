from __future__ import annotations

import math
import time
from collections.abc import Iterable
from functools import cache
from itertools import combinations_with_replacement, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xlaserve.engine.buckets.planner import MIN_PLANNED, NEAR_TIE, PADDING_PRICE, Cost, Planner, Sequences, Step

MARGIN = (1 + PADDING_PRICE) * (1 + NEAR_TIE) * (1 + 1e-9)
"""How much dearer a plan may be than the cheapest."""

seconds = st.floats(1e-6, 10.0)
batches = st.integers(1, 40)
one_lane_costs = st.dictionaries(batches, seconds, min_size=1, max_size=6)
measured_costs = st.dictionaries(batches, st.builds(Cost, seconds, seconds), min_size=1, max_size=6)


@st.composite
def situations(draw: st.DrawFn, most_images: int = 150) -> tuple[dict[int, Cost], int, int, int, int]:
    """Costs, lanes, images, free lanes and busy lanes."""
    lanes = draw(st.integers(1, 8))
    free = draw(st.integers(1, lanes))
    busy = draw(st.integers(0, lanes - free))
    return draw(measured_costs), lanes, draw(st.integers(1, most_images)), free, busy


def running_costs(costs: dict[int, Cost], running: int, lanes: int) -> dict[int, float]:
    return {bucket: cost.at(running, lanes) for bucket, cost in costs.items()}


def predicted_s(step: Step, situation: tuple[dict[int, Cost], int, int, int, int]) -> float:
    """When the lane that runs `step` is done with its share, at best."""
    costs, lanes, images, free, busy = situation
    return min(
        at[step.bucket] + Sequences(at).least_s(step.share - step.images)
        for used in range(1, min(free, images) + 1)
        if -(-images // used) == step.share
        for at in [running_costs(costs, busy + used, lanes)]
    )


def least_by_brute_force_s(cost_s: dict[int, float], images: int) -> float:
    """The least cost over every multiset of buckets that holds `images`."""
    most_steps = -(-images // min(cost_s))
    return min(
        math.fsum(cost_s[bucket] for bucket in buckets)
        for steps in range(1, most_steps + 1)
        for buckets in combinations_with_replacement(cost_s, steps)
        if sum(buckets) >= images
    )


def price(bucket: int, images: int) -> float:
    return 1 + PADDING_PRICE * min(1.0, (bucket - images) / images)


def partitions(images: int, parts: int, most: int | None = None) -> list[list[int]]:
    """Every way to split `images` into `parts` numbers above 0, the largest first."""
    if parts == 0:
        return [[]] if images == 0 else []
    return [
        [first, *rest]
        for first in range(min(images - parts + 1, most or images), 0, -1)
        for rest in partitions(images - first, parts - 1, first)
    ]


@given(situations())
def test_a_step_takes_its_lanes_share_and_only_the_last_is_padded(
    situation: tuple[dict[int, Cost], int, int, int, int],
) -> None:
    costs, lanes, images, free, busy = situation
    step = Planner(costs, lanes).next_step(images, free, busy)
    assert -(-images // free) <= step.share <= images
    assert step.bucket in costs
    assert step.images == min(step.bucket, step.share)


@given(one_lane_costs, st.integers(1, MIN_PLANNED))
def test_a_sequence_goes_from_large_buckets_to_small_ones(cost_s: dict[int, float], images: int) -> None:
    *whole, last = Sequences(cost_s).buckets(images)
    assert sum(whole) < images <= sum(whole) + last
    assert whole == sorted(whole, reverse=True)


@given(situations(most_images=40))
def test_a_plan_never_costs_more_than_padding_to_the_next_bucket_up(
    situation: tuple[dict[int, Cost], int, int, int, int],
) -> None:
    costs, lanes, images, free, busy = situation
    bucket = min((bucket for bucket in costs if bucket >= images), default=None)
    if bucket is not None:
        step = Planner(costs, lanes).next_step(images, free, busy)
        padded_s = costs[bucket].at(busy + 1, lanes)
        assert predicted_s(step, situation) <= padded_s * MARGIN


@given(st.dictionaries(st.integers(1, 9), seconds, min_size=1, max_size=4), st.integers(1, 9))
def test_one_lanes_sequence_is_as_cheap_as_any_multiset_of_buckets(cost_s: dict[int, float], images: int) -> None:
    sequences = Sequences(cost_s)
    least_s = least_by_brute_force_s(cost_s, images)
    assert sequences.least_s(images) == pytest.approx(least_s, rel=1e-9)
    assert math.fsum(cost_s[bucket] for bucket in sequences.buckets(images)) <= least_s * MARGIN
    first = sequences.first(images, NEAR_TIE)
    assert cost_s[first] + sequences.least_s(max(0, images - first)) <= least_s * MARGIN


@given(st.dictionaries(st.integers(1, 9), seconds, min_size=1, max_size=4), st.integers(1, 9))
def test_the_cheapest_of_all_multisets_is_run_with_its_padding_priced(cost_s: dict[int, float], images: int) -> None:
    def priced_s(whole: Iterable[int], last: int, left: int) -> float:
        return math.fsum(cost_s[bucket] for bucket in whole) + cost_s[last] * price(last, left)

    least_s = math.inf
    for count in range(-(-images // min(cost_s))):
        for whole in combinations_with_replacement(cost_s, count):
            if (left := images - sum(whole)) > 0:
                least_s = min(least_s, *(priced_s(whole, last, left) for last in cost_s if last >= left), math.inf)
    *chosen, last = Sequences(cost_s).buckets(images)
    assert priced_s(chosen, last, images - sum(chosen)) == pytest.approx(least_s, rel=1e-9)


@given(one_lane_costs)
def test_more_images_never_cost_less(cost_s: dict[int, float]) -> None:
    sequences = Sequences(cost_s)
    assert all(one <= other for one, other in pairwise(sequences.least_s(images) for images in range(200)))


@given(situations(most_images=14))
def test_a_plan_ends_as_soon_as_the_best_of_all_splits(situation: tuple[dict[int, Cost], int, int, int, int]) -> None:
    costs, lanes, images, free, busy = situation

    @cache
    def least_s(share: int, running: int) -> float:
        return Sequences(running_costs(costs, running, lanes)).least_s(share)

    best_s = min(
        max(least_s(share, busy + used) for share in shares)
        for used in range(1, min(free, images) + 1)
        for shares in partitions(images, used)
    )
    step = Planner(costs, lanes).next_step(images, free, busy)
    assert best_s * (1 - 1e-9) <= predicted_s(step, situation) <= best_s * MARGIN


@given(situations(), st.integers(1, 20))
def test_more_images_than_the_largest_bucket_holds_are_split(
    situation: tuple[dict[int, Cost], int, int, int, int], times: int
) -> None:
    costs, lanes, images, _, busy = situation
    images += times * max(costs)
    step = Planner(costs, lanes).next_step(images, 1, busy)
    assert step.images == step.bucket < step.share == images


@given(measured_costs)
def test_the_best_bucket_runs_nearly_the_most_images_a_second_under_load(costs: dict[int, Cost]) -> None:
    best = Planner(costs, lanes=2).best
    image_s = costs[best].loaded_s / best
    assert all(image_s <= (1 + NEAR_TIE + 1e-9) * cost.loaded_s / bucket for bucket, cost in costs.items())
    larger = [cost.loaded_s / bucket for bucket, cost in costs.items() if bucket > best]
    assert all(image_s * (1 + 1e-9) < other_s * (1 + NEAR_TIE) for other_s in larger)


def test_a_single_image_is_not_padded_for_a_difference_that_is_noise() -> None:
    costs = {1: Cost(0.197e-3, 0.197e-3), 2: Cost(0.182e-3, 0.182e-3)}
    for lanes, free in ((1, 1), (2, 2), (2, 1)):
        assert Planner(costs, lanes).next_step(1, free, lanes - free).bucket == 1
    costs[1] = Cost(0.25e-3, 0.25e-3)
    assert Planner(costs, 1).next_step(1, 1).bucket == 2


@pytest.mark.parametrize("noise", [0.98, 1.0, 1.02])
def test_noise_does_not_choose_small_batches_where_all_lanes_are_busy(noise: float) -> None:
    costs = {2: Cost(4.5, 4.5), 4: Cost(9.0 * noise, 9.0 * noise), 8: Cost(18.0 * noise, 18.0 * noise)}
    planner = Planner(costs, lanes=2)
    assert planner.best == 8
    assert [planner.next_step(images, 1, 1).bucket for images in (4, 6, 8, 20)] == [4, 4, 8, 8]


def test_of_plans_of_similar_cost_free_lanes_run_the_one_that_pads_less() -> None:
    costs = {1: Cost(1.0, 1.0), 2: Cost(1.5, 1.5), 4: Cost(2.45, 2.45)}
    assert Planner(costs, 1).next_step(3, 1) == Step(3, 4, 3)  # one batch, where no other lane is free
    planner = Planner({bucket: Cost(cost.alone_s, 100.0) for bucket, cost in costs.items()}, 2)
    assert planner.next_step(3, 2) == Step(2, 2, 3)


def test_a_larger_bucket_measured_cheaper_does_not_win_by_padding_more() -> None:
    planner = Planner({6: Cost(5.0, 5.0), 8: Cost(4.9, 4.9)}, 1)
    assert planner.next_step(5, 1).bucket == 6


@given(one_lane_costs, st.integers(MIN_PLANNED, 5000))
def test_sequences_for_more_images_than_are_tabled_are_nearly_the_cheapest(
    cost_s: dict[int, float], images: int
) -> None:
    sequences = Sequences(cost_s)
    image_s = min(seconds / bucket for bucket, seconds in cost_s.items())
    # No sequence is cheaper than that of the best bucket without padding; one batch more is always enough.
    assert images * image_s * (1 - 1e-9) <= sequences.least_s(images) <= images * image_s + max(cost_s.values()) * 2
    *whole, last = sequences.buckets(images)
    assert sum(whole) < images <= sum(whole) + last


def test_a_large_plan_takes_little_time_of_the_event_loop() -> None:
    costs = {2**power: Cost(1e-3 + 2**power * 1e-3, 2e-3 + 2**power * 2e-3) for power in range(8)}

    def plan_s() -> float:
        began = time.thread_time()
        Planner(costs, lanes=16).next_step(2048, 16)
        return time.thread_time() - began

    assert min(plan_s() for _ in range(5)) < 0.01  # 1 ms; growing tables took 20


def test_costs_that_are_a_million_times_apart_have_a_sequence_as_well() -> None:
    sequences = Sequences({1: 9.667250187320024, 33: 9.631834571864932e-06, 31: 4.295508759864672e-06})
    assert [sequences.buckets(images) for images in range(2, 32)] == [[31]] * 30


def test_images_are_padded_where_that_is_cheaper_and_split_where_that_is() -> None:
    assert Sequences({1: 1.0, 8: 2.0}).buckets(5) == [8]
    assert Sequences({1: 1.0, 4: 2.0, 8: 8.0}).buckets(5) == [4, 1]


def test_of_equal_costs_the_larger_bucket_wins_for_fewer_batches() -> None:
    assert Sequences({1: 1.0, 2: 2.0, 4: 4.0}).buckets(4) == [4]


def test_lanes_that_slow_each_other_down_are_left_free() -> None:
    planner = Planner({1: Cost(1.0, 3.0), 2: Cost(1.5, 4.0)}, lanes=2)
    assert planner.next_step(2, free_lanes=2) == Step(2, 2, 2)


def test_lanes_that_do_not_slow_each_other_down_share_the_images() -> None:
    planner = Planner({1: Cost(1.0, 1.0), 2: Cost(1.5, 1.5)}, lanes=2)
    assert planner.next_step(2, free_lanes=2) == Step(1, 1, 1)


def test_images_are_split_evenly_over_the_lanes() -> None:
    # A device whose lanes speed each other up, as a noisy measurement may claim.
    planner = Planner({1: Cost(1.0, 0.5)}, lanes=4)
    assert [planner.next_step(images, free_lanes=4).share for images in (1, 4, 5, 9)] == [1, 1, 2, 3]


def test_what_runs_in_other_lanes_counts_as_load() -> None:
    # Alone one batch of 4 is best; with another running, two of 2.
    costs = {2: Cost(3.0, 3.0), 4: Cost(4.0, 8.0)}
    assert Planner(costs, lanes=2).next_step(4, free_lanes=1, busy_lanes=0).bucket == 4
    assert Planner(costs, lanes=2).next_step(4, free_lanes=1, busy_lanes=1).bucket == 2


def test_costs_between_alone_and_loaded_are_interpolated() -> None:
    assert [Cost(1.0, 4.0).at(running, lanes=4) for running in (1, 2, 3, 4)] == [1.0, 2.0, 3.0, 4.0]
    assert Cost(1.0, 4.0).at(1, lanes=1) == 1.0


@pytest.mark.parametrize(("images", "free", "busy"), [(0, 1, 0), (1, 0, 1), (1, 2, 1)])
def test_a_plan_for_nothing_or_for_lanes_that_are_not_there_is_refused(images: int, free: int, busy: int) -> None:
    with pytest.raises(ValueError, match="no plan for"):
        Planner({1: Cost(1.0, 1.0)}, lanes=2).next_step(images, free, busy)


def test_a_planner_without_buckets_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one bucket"):
        Planner({}, lanes=1)
