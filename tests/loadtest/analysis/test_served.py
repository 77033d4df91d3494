from __future__ import annotations

import numpy as np
import pytest

from xlaserve_loadtest.analysis.served import Share, difference


def share(failed: np.ndarray[tuple[int], np.dtype[np.int64]], due: int = 100) -> Share:
    return Share((due,) * failed.size, tuple((due - failed).tolist()))


def test_an_arm_that_fails_more_is_found_and_by_how_much() -> None:
    more, chance = difference(share(np.full(8, 48)), share(np.zeros(8, np.int64)), seed=0)
    assert more == pytest.approx(-0.48)
    assert chance < 0.01


@pytest.mark.parametrize("failures", [[0, 0, 0, 0], [1, 0, 0, 0], [3, 2, 4, 3]])
def test_what_chance_alone_gives_is_no_difference(failures: list[int]) -> None:
    _, chance = difference(share(np.array(failures)), share(np.array(failures[::-1])), seed=0)
    assert chance > 0.5


@pytest.mark.parametrize("blocks", [4, 8])
def test_clustered_failures_are_a_difference_in_at_most_one_of_twenty_runs(blocks: int) -> None:
    random = np.random.default_rng(blocks)
    found = 0
    for seed in range(200):
        # In a fifth of the blocks something goes wrong, and then for half of the requests.
        failed = np.where(random.random((2, blocks)) < 0.2, random.binomial(100, 0.5, (2, blocks)), 0)
        found += difference(share(failed[0]), share(failed[1]), seed=seed)[1] <= 0.05
    assert found <= 0.05 * 200 + 6


def test_nothing_that_was_due_is_no_difference() -> None:
    assert difference(Share((), ()), share(np.zeros(4, np.int64)), seed=0) == (0.0, 1.0)
