from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from xlaserve_loadtest.schedule import plan
from xlaserve_loadtest.schedule.arrivals import ClosedLoop, Profile

ARMS = ("xla", "graph", "eager")
LOOP = ClosedLoop(4)


def mirrored(
    arms: Sequence[str] = ARMS, *, duration_s: float = 5.0, warmup_s: float = 1.0, seed: int = 0, **more: Any
) -> tuple[plan.BlockPlan, ...]:
    return plan.mirrored(arms, LOOP, duration_s=duration_s, warmup_s=warmup_s, seed=seed, **more)


@pytest.mark.parametrize("duration_s", [0.1, 1, 5, 60])
def test_each_arm_is_measured_for_the_whole_duration(duration_s: float) -> None:
    blocks = mirrored(duration_s=duration_s)
    for arm in ARMS:
        assert sum(block.duration_s for block in blocks if block.arm == arm) == pytest.approx(duration_s)


@pytest.mark.parametrize(("duration_s", "length_s"), [(5, 3), (24, 3), (60, 3), (27, 3.375)])
def test_blocks_last_as_long_as_is_asked_whatever_the_duration(duration_s: float, length_s: float) -> None:
    assert {block.duration_s for block in mirrored(duration_s=duration_s, block_s=3)} == {length_s}
    assert max(block.duration_s for block in mirrored(duration_s=duration_s)) < 2


def test_rounds_are_mirrored_so_that_drift_hits_each_arm_alike() -> None:
    blocks = mirrored(duration_s=20)
    for arm in ARMS:
        positions = [index for index, block in enumerate(blocks) if block.arm == arm]
        assert sum(positions) / len(positions) == pytest.approx((len(blocks) - 1) / 2)
    for start in range(0, len(blocks), 2 * len(ARMS)):
        turn = blocks[start : start + 2 * len(ARMS)]
        arms = [block.arm for block in turn]
        assert arms == arms[::-1]
        assert set(Counter(arms).values()) == {2}
        assert len({block.round for block in turn}) == 1


def test_a_server_whose_control_runs_on_it_gets_no_more_blocks_than_others() -> None:
    arms, twins = ("new", "old", "old (again)", "other"), {"old": "old (again)"}
    blocks = mirrored(arms, duration_s=20, twins=twins)
    servers = ["old" if block.arm in ("old", "old (again)") else block.arm for block in blocks]
    assert set(Counter(servers).values()) == {len(blocks) // 3}
    for start in range(0, len(blocks), 12):
        turn = servers[start : start + 12]
        assert turn == turn[::-1]
        # Both halves have the servers in one order, so that each has served as much as the others before its turn.
        assert turn[:3] == turn[3:6]
        assert Counter(block.arm for block in blocks[start : start + 12]) == {
            "new": 4,
            "old": 2,
            "old (again)": 2,
            "other": 4,
        }


def test_a_plan_depends_on_its_arguments_and_nothing_else() -> None:
    assert mirrored(seed=7) == mirrored(seed=7)
    orders = {tuple(block.arm for block in mirrored(duration_s=20, seed=seed)) for seed in range(10)}
    assert len(orders) == 10


def test_only_the_first_block_of_an_arm_warms_up_at_length() -> None:
    blocks = mirrored(warmup_s=2)
    for arm in ARMS:
        first, *later = (block.warmup_s for block in blocks if block.arm == arm)
        assert first == 2
        assert set(later) == {0.5}


def test_one_arm_alone_is_measured_in_one_piece() -> None:
    (block,) = mirrored(("xla",), duration_s=60)
    assert (block.arm, block.duration_s, block.round) == ("xla", 60, None)


def test_rounds_of_several_loads_are_numbered_on() -> None:
    first = mirrored()
    second = mirrored(first_round=plan.rounds_of(first))
    assert not {block.round for block in first} & {block.round for block in second}


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.4, "0 s"), (43.2, "43 s"), (99.4, "99 s"), (720, "12 min"), (12_600, "3.5 h")]
)
def test_a_length_of_time_is_told_in_words(seconds: float, words: str) -> None:
    assert plan.lasting(seconds) == words


@pytest.mark.parametrize("arms", [("xla",), ARMS])
def test_each_block_goes_through_all_of_a_load_that_has_a_duration(arms: Sequence[str]) -> None:
    profile = Profile.parse("0..10:3,10:4")
    blocks = plan.mirrored(arms, profile, duration_s=5, warmup_s=1, seed=0, min_rounds=2)
    assert {block.duration_s for block in blocks} == {7.0}
    assert len(blocks) == (1 if len(arms) == 1 else 2 * 2 * len(arms))


def test_the_expected_time_follows_what_blocks_and_starts_took() -> None:
    blocks, pace = mirrored(duration_s=20), plan.Pace()
    planned_s = sum(map(plan.length_s, blocks))
    assert (pace.blocks_s(blocks), pace.start_s(9.0)) == (planned_s, 9.0)
    pace.add(blocks[0], plan.length_s(blocks[0]) + 0.5)
    pace.add(blocks[1], plan.length_s(blocks[1]) + 0.3)
    assert pace.blocks_s(blocks[2:]) == pytest.approx(sum(map(plan.length_s, blocks[2:])) + 0.4 * len(blocks[2:]))
    pace.starts_s += [10.0, 12.0]
    assert pace.start_s(9.0) == 11.0
