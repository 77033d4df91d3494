from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from tests.loadtest.queues import MM1, QUEUES, SimulatedTarget, quantile, with_spells

from xlaserve_loadtest.record.requests import REQUEST, Status
from xlaserve_loadtest.schedule.early_stopping import TailCount, grows, inflation_with_spells, variance_inflation
from xlaserve_loadtest.schedule.search import (
    BACK_OFF,
    MAX_RUN_S,
    PRECISION,
    Found,
    Search,
    Slo,
    TriedRate,
    confirming_run_s,
    estimate_s,
    short_run_s,
)

SLO = Slo(99, 50)


class Target:
    """Holds every rate up to `highest_per_s`; a confirming run only up to `confirms_per_s`."""

    def __init__(self, highest_per_s: float, confirms_per_s: float = math.inf) -> None:
        self.highest_per_s = highest_per_s
        self.confirms_per_s = min(confirms_per_s, highest_per_s)
        self.tried: list[tuple[float, bool]] = []

    async def __call__(self, rate_per_s: float, seconds: float, confirms: bool) -> TriedRate:
        self.tried.append((rate_per_s, confirms))
        holds = rate_per_s <= (self.confirms_per_s if confirms else self.highest_per_s)
        return TriedRate(rate_per_s, SLO, TailCount(10_000, 0 if holds else 5_000, 2.0), 1.0)

    async def search(self, guess_per_s: float) -> Found:
        return await Search(self, SLO, 5.0).run(guess_per_s)


@pytest.mark.parametrize("highest_per_s", [3, 100, 5000])
@pytest.mark.parametrize("guess", [0.05, 0.5, 20])
async def test_the_highest_rate_is_found_from_any_start(highest_per_s: float, guess: float) -> None:
    target = Target(highest_per_s)
    found = await target.search(guess * highest_per_s)
    assert found.confirmed_per_s is not None
    assert BACK_OFF[0] / (1 + PRECISION) * highest_per_s <= found.confirmed_per_s <= highest_per_s
    assert found.rejected_per_s is not None
    assert highest_per_s < found.rejected_per_s <= (1 + PRECISION) * highest_per_s
    assert len(target.tried) < 30
    assert [rate.rate_per_s for rate in found.tried] == [rate for rate, _ in target.tried]


async def test_an_unconfirmed_rate_is_lowered_until_confirmed_or_tries_run_out() -> None:
    target = Target(100, confirms_per_s=85)
    found = await target.search(50)
    assert found.confirmed_per_s is not None
    assert 75 < found.confirmed_per_s <= 85
    confirming = [rate for rate, confirms in target.tried if confirms]
    assert confirming[-1] == found.confirmed_per_s
    assert found.rejected_per_s == confirming[-2]
    target = Target(100, confirms_per_s=10)
    assert (await target.search(50)).confirmed_per_s is None
    assert sum(confirms for _, confirms in target.tried) == len(BACK_OFF)


@pytest.mark.parametrize("disturbed", range(8))
async def test_a_disturbance_of_one_run_does_not_bound_the_search(disturbed: int) -> None:
    target = Target(100)

    async def measure(rate_per_s: float, seconds: float, confirms: bool) -> TriedRate:
        point = await target(rate_per_s, seconds, confirms)
        if len(target.tried) == disturbed + 1:
            return replace(point, tail=TailCount(10_000, 5_000, 2.0))
        return point

    found = await Search(measure, SLO, 5.0).run(40)
    assert found.confirmed_per_s is not None
    assert found.confirmed_per_s > 80
    assert found.rejected_per_s is not None
    assert 100 < found.rejected_per_s < 110


async def test_a_target_that_holds_no_rate_is_given_up() -> None:
    target = Target(0)
    found = await target.search(50)
    assert found.confirmed_per_s is None
    assert found.rejected_per_s == target.tried[-1][0]
    assert 5 < len(target.tried) < 20

    async def dead(rate_per_s: float, seconds: float, confirms: bool) -> TriedRate:
        return TriedRate(rate_per_s, SLO, TailCount(50, 50, math.inf), 0.0)

    assert len((await Search(dead, SLO, 5.0).run(50)).tried) == 1


def rows_of(latencies_ms: np.ndarray, failed: int = 0) -> np.ndarray:
    rows = np.zeros(latencies_ms.size, REQUEST)
    rows["measured"] = True
    rows["scheduled_ns"] = np.arange(latencies_ms.size) * 1_000_000
    rows["end_ns"] = rows["scheduled_ns"] + (latencies_ms * 1e6).astype(np.int64)
    rows["status"][:failed] = Status.DEADLINE_EXCEEDED
    return rows


def test_failed_and_dropped_requests_are_over_the_limit() -> None:
    latencies_ms = np.full(10_000, 5.0)
    latencies_ms[:20] = 50.0  # the limit itself is not under it
    tried = TriedRate.of(1000, SLO, rows_of(latencies_ms[::-1].copy(), failed=30), (0, 10**10), dropped=7)
    assert tried.tail.over == 20 + 30 + 7
    assert tried.tail.requests == 10_007


def test_a_growing_queue_neither_holds_nor_is_confirmed() -> None:
    steady = TriedRate.of(1000, SLO, rows_of(np.full(10_000, 5.0)), (0, 10**10), 0)
    assert steady.holds
    assert steady.is_confirmed
    assert not steady.is_rejected
    growing = TriedRate.of(1000, Slo(99, 60_000), rows_of(np.linspace(0, 1000, 10_000)), (0, 10**10), 0)
    assert growing.tail.over == 0
    assert growing.is_rejected
    assert not growing.holds
    assert not growing.is_confirmed
    # Slow enough to keep up in the window: its last requests alone are over its own percentile.
    slowly = TriedRate.of(1000, Slo(99, 60_000), rows_of(np.linspace(0, 200, 10_000)), (0, 10**10), 0)
    assert slowly.keeps_up
    assert not slowly.is_confirmed


def test_few_requests_do_not_hold() -> None:
    point = TriedRate(100, SLO, TailCount(458, 0, 2.0), 1.0)
    assert not point.holds
    assert replace(point, tail=TailCount(459, 0, 2.0)).holds


def test_runs_are_long_enough_for_their_percentile_and_limit() -> None:
    assert short_run_s(SLO, 1e6, 5.0) == 5.0
    assert short_run_s(SLO, 10, 5.0) * 10 >= 459
    assert short_run_s(Slo(99, 1000), 1e6, 5.0) == 20.0
    assert confirming_run_s(SLO, 100, 5.0, 2.0) * 100 >= 2 * 459
    assert confirming_run_s(SLO, 1, 5.0, 2.0) == MAX_RUN_S
    assert confirming_run_s(SLO, 1e6, 2 * MAX_RUN_S, 2.0) == 2 * MAX_RUN_S
    usual_s, most_s = estimate_s(SLO, 100, 5.0)
    assert usual_s < most_s


@pytest.mark.parametrize("name", ["M/M/1", "M/D/1", "batches of 8", "stalls"])
async def test_a_search_is_seldom_too_high_and_not_much_too_low(name: str) -> None:
    load, speed, searches = 0.7 if name != "stalls" else 0.5, 1000.0, 12
    slo = Slo(95, quantile(QUEUES[name], load, 95, 600_000) / speed * 1000)
    random = np.random.default_rng(7)
    found = [
        await Search(SimulatedTarget(QUEUES[name], speed, slo, random), slo, 5.0).run(speed / 2)
        for _ in range(searches)
    ]
    shares = [(one.confirmed_per_s or 0.0) / (load * speed) for one in found]
    assert sum(share > 1 for share in shares) <= 1
    assert np.median(shares) > (0.65 if name == "stalls" else 0.8)
    assert all(one.rejected_per_s is None or one.rejected_per_s > 0.97 * load * speed for one in found)


@pytest.mark.parametrize(("name", "load"), [("M/M/1", 0.5), ("M/D/1", 0.8), ("batches of 8", 0.7)])
async def test_a_search_takes_about_as_long_as_was_said_before(name: str, load: float) -> None:
    speed, lengths_s = 1000.0, []
    slo = Slo(99, quantile(QUEUES[name], load, 99, 600_000) / speed * 1000)
    for seed in range(7):
        target = SimulatedTarget(QUEUES[name], speed, slo, np.random.default_rng(seed))
        await Search(target, slo, 5.0).run(speed / 2)
        lengths_s.append(target.seconds)
    usual_s, most_s = estimate_s(slo, load * speed, 5.0)
    assert usual_s / 3 < np.median(lengths_s) < 3 * usual_s
    assert max(lengths_s) < most_s


@pytest.mark.parametrize(
    ("text", "slo"), [("p99<50ms", Slo(99, 50)), (" p99.9 < 1.5 s", Slo(99.9, 1500)), ("p99<50", Slo(99, 50))]
)
def test_a_promise_is_read(text: str, slo: Slo) -> None:
    assert Slo.parse(text) == slo


@pytest.mark.parametrize(
    "text", ["p99", "p99>50ms", "p0<5ms", "p100<5ms", "mean<5ms", "p99<0ms", "p99 upper<5ms", "xla:p99<5ms"]
)
def test_a_wrong_promise_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected a condition"):
        Slo.parse(text)


@pytest.mark.parametrize(("every_s", "slow_s"), [(600.0, 20.0), (100.0, 10.0)])
async def test_a_search_notices_slow_spells_of_a_server_and_backs_off_enough(every_s: float, slow_s: float) -> None:
    speed, queue_at = 200.0, with_spells(every_s, slow_s, 2.0, 200.0)
    slo = Slo(99, quantile(MM1, 0.7, 99, 600_000) / speed * 1000)
    for seed in range(3):
        target = SimulatedTarget(MM1, speed, slo, np.random.default_rng(seed), queue_at=queue_at, phase_s=150.0 * seed)
        found = (await Search(target, slo, 5.0).run(speed / 2)).confirmed_per_s
        # Half as fast, a server keeps to the limit up to a fifth of its speed; from two fifths on, p99 is over it.
        assert found is not None
        assert 0.1 * speed < found < 0.42 * speed


def test_growing_latency_is_told_from_a_slow_spell() -> None:
    latencies_ms = np.random.default_rng(0).exponential(1.0, 20_000)
    slow = latencies_ms * np.where(np.arange(20_000) % 10_000 < 500, 4, 1)
    assert not grows(latencies_ms)
    assert not grows(slow)
    assert grows(latencies_ms * np.linspace(1, 1.5, 20_000))
    # Far below the limit, a spell says nothing against it; over the limit, it is a cluster.
    assert inflation_with_spells(slow, 1000.0, 99.0) < variance_inflation(slow, 99.0) / 5
    assert inflation_with_spells(slow, 8.0, 99.0) > 10
