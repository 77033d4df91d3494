from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy import stats

from xlaserve_loadtest.schedule import arrivals
from xlaserve_loadtest.schedule.arrivals import (
    ArrivalsError,
    OpenLoop,
    Process,
    Profile,
    Replay,
    Schedule,
    schedule,
    split,
    with_margins,
)


def seconds(times: Schedule) -> np.ndarray[Any, np.dtype[np.float64]]:
    return times / 1e9


def test_constant_arrivals_are_evenly_spaced_from_the_start() -> None:
    times = schedule(OpenLoop(50, "constant"), 10, (0,))
    assert len(times) == 500
    np.testing.assert_array_equal(times, np.arange(500) * 20_000_000)


@pytest.mark.parametrize("rate", [3.0, 100.0, 2500.0])
def test_poisson_arrivals_have_the_rate_that_was_asked_for(rate: float) -> None:
    duration_s = 20_000 / rate
    counts = [len(schedule(OpenLoop(rate), duration_s, (seed,))) for seed in range(20)]
    # The sum of 20 Poisson counts of mean 20,000 has a deviation of 632.
    assert abs(sum(counts) - 400_000) < 4 * 632


def test_poisson_gaps_are_exponential_and_independent() -> None:
    gaps = np.diff(seconds(schedule(OpenLoop(100.0), 200, (7,))))
    assert stats.kstest(gaps, "expon", args=(0, 1 / 100)).pvalue > 0.01
    assert abs(np.corrcoef(gaps[:-1], gaps[1:])[0, 1]) < 4 / np.sqrt(len(gaps))
    counts, _ = np.histogram(seconds(schedule(OpenLoop(100.0), 200, (8,))), bins=400, range=(0, 200))
    # A Poisson process is as varied as it is frequent.
    assert counts.var() / counts.mean() == pytest.approx(1, abs=0.3)


@pytest.mark.parametrize("process", ["poisson", "constant"])
@pytest.mark.parametrize(("first", "last"), [(50, 200), (200, 50), (10, 10.0000001)])
def test_a_ramp_goes_from_one_rate_to_the_other(process: Process, first: int, last: float) -> None:
    load = OpenLoop(first, process, last)
    times = seconds(np.concatenate([schedule(load, 100, (seed,)) for seed in range(10)]))
    counts, edges = np.histogram(times, bins=10, range=(0, 100))
    middle = (edges[:-1] + edges[1:]) / 2
    expected = (first + (last - first) * middle / 100) * 10 * 10
    np.testing.assert_allclose(counts, expected, atol=4.5 * np.sqrt(expected).max())
    assert (np.diff(schedule(load, 100, (0,))) >= 0).all()


def test_a_schedule_depends_on_its_arguments_and_nothing_else() -> None:
    first = schedule(OpenLoop(100), 10, (3, 1))
    np.testing.assert_array_equal(first, schedule(OpenLoop(100), 10, (3, 1)))
    assert len(np.intersect1d(first, schedule(OpenLoop(100), 10, (3, 2)))) < 10
    assert first.dtype == np.int64
    assert first.max() < 10e9


def test_margins_surround_the_measured_part_and_do_not_change_it() -> None:
    load = OpenLoop(100, "poisson", 300)
    whole = seconds(with_margins(load, before_s=2, duration_s=10, after_s=1, seed=5).due_ns)
    assert (np.diff(whole) >= 0).all()
    measured = whole[(whole >= 2) & (whole < 12)] - 2
    np.testing.assert_allclose(measured, seconds(schedule(load, 10, (5, arrivals.MEASURED_PART))), atol=1e-9)
    assert (whole < 2).sum() == pytest.approx(200, abs=60)
    assert (whole >= 12).sum() == pytest.approx(300, abs=80)


@pytest.mark.parametrize("workers", [1, 2, 3, 7])
def test_a_split_loses_nothing_and_repeats_nothing(workers: int) -> None:
    whole = with_margins(OpenLoop(100), before_s=1, duration_s=5, after_s=1, seed=0)
    shares = split(whole, workers)
    pairs = [pair for share in shares for pair in zip(*(part.tolist() for part in share), strict=True)]
    assert sorted(pairs) == sorted(zip(*(part.tolist() for part in whole), strict=True))
    sizes = [share.due_ns.size for share in shares]
    assert max(sizes) - min(sizes) <= 1


def test_measured_requests_are_sent_in_order_and_those_of_margins_drawn() -> None:
    whole, again, other = (
        with_margins(OpenLoop(100), before_s=5, duration_s=5, after_s=5, seed=seed) for seed in (0, 0, 1)
    )
    inside = (whole.due_ns >= 5e9) & (whole.due_ns < 10e9)
    assert whole.requests[inside].tolist() == list(range(inside.sum()))
    drawn = whole.requests[~inside] % 4
    assert np.bincount(drawn) == pytest.approx(drawn.size / 4, rel=0.3)
    np.testing.assert_array_equal(whole.requests, again.requests)
    assert whole.requests[:100].tolist() != other.requests[:100].tolist()


def test_a_seed_of_samples_draws_the_measured_part_too_and_changes_no_time() -> None:
    one, other = (
        with_margins(OpenLoop(100), before_s=1, duration_s=5, after_s=1, seed=0, sample_seed=seed) for seed in (3, 4)
    )
    np.testing.assert_array_equal(one.due_ns, other.due_ns)
    assert one.requests.tolist() != other.requests.tolist()
    assert np.bincount(one.requests % 3) == pytest.approx(one.requests.size / 3, rel=0.3)


def test_a_replay_is_sent_at_its_times_and_its_margins_at_its_mean_rate() -> None:
    replay = Replay(np.array([0, 5, 5, 4_000_000_000]))
    whole = with_margins(replay, before_s=100, duration_s=replay.duration_s(), after_s=50, seed=0)
    first = int(np.searchsorted(whole.due_ns, 100e9))
    assert (whole.due_ns[first : first + 4] - 100 * 10**9).tolist() == [0, 5, 5, 4 * 10**9]
    assert whole.requests[first : first + 4].tolist() == [0, 1, 2, 3]
    assert first == pytest.approx(100, abs=40)
    assert whole.due_ns.size - first - 4 == pytest.approx(50, abs=30)


def test_a_replay_that_is_due_at_once_has_margins_that_can_be_sent() -> None:
    replay = Replay(np.zeros(3, np.int64))
    whole = with_margins(replay, before_s=10, duration_s=replay.duration_s(), after_s=2, seed=0)
    assert 10 < whole.due_ns.size < 90


@pytest.mark.parametrize("process", ["poisson", "constant"])
def test_a_profile_goes_through_its_stages(process: Process) -> None:
    load = replace(Profile.parse("0..100:10,100:20,0:10,100..20:10"), process=process)
    assert (load.duration_s(), load.mean_rate_per_s()) == (50, (500 + 2000 + 0 + 600) / 50)
    times = seconds(np.concatenate([schedule(load, 50, (seed,)) for seed in range(10)]))
    counts, _ = np.histogram(times, bins=10, range=(0, 50))
    expected = np.array([125, 375, 500, 500, 500, 500, 0, 0, 400, 200]) * 10
    np.testing.assert_allclose(counts, expected, atol=4.5 * np.sqrt(5000))
    assert (np.diff(schedule(load, 50, (0,))) >= 0).all()


def test_a_profile_of_one_stage_is_a_ramp() -> None:
    ramp, profile = OpenLoop(50, "poisson", 200), Profile.parse("50..200:30")
    np.testing.assert_array_equal(schedule(ramp, 30, (1,)), schedule(profile, 30, (1,)))


@pytest.mark.parametrize("process", ["poisson", "constant"])
def test_bursts_come_at_once_and_keep_the_rate(process: Process) -> None:
    times = schedule(OpenLoop(200, process, burst=8), 100, (0,))
    moments, counts = np.unique(times, return_counts=True)
    assert set(counts.tolist()) == {8}
    assert len(moments) == pytest.approx(200 * 100 / 8, rel=0.06)


@pytest.mark.parametrize(
    "text",
    ["", "100", "100:", ":10", "a:1", "1..:", "-1:10", "0:10", "10:0", "10:-1", "inf:1", "nan:1", "1:inf", "1:2,"],
)
def test_a_wrong_profile_is_refused(text: str) -> None:
    with pytest.raises(ArrivalsError, match="profile: expected"):
        Profile.parse(text)


def test_margins_of_a_profile_are_at_its_first_and_last_rate() -> None:
    load = Profile.parse("0..100:10,100:10")
    whole = seconds(with_margins(load, before_s=2, duration_s=20, after_s=2, seed=5).due_ns)
    assert (whole < 2).sum() == 0
    assert (whole >= 22).sum() == pytest.approx(200, abs=60)
