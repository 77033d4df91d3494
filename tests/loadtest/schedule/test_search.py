from __future__ import annotations

import random

import pytest

from xlaserve_loadtest.schedule.search import PRECISION, USUAL_STEPS, Slo, TriedRate, highest_rate

SLO = Slo(99, 50)


class Target:
    """A queue whose latency grows as it nears its capacity; `noise` is a deviation of latency, as a share."""

    def __init__(self, capacity_per_s: float, *, noise: float = 0.0, seed: int = 0) -> None:
        self.capacity_per_s = capacity_per_s
        self.tried: list[float] = []
        self._noise = noise
        self._random = random.Random(seed)

    async def __call__(self, rate_per_s: float) -> TriedRate:
        self.tried.append(rate_per_s)
        load = rate_per_s / self.capacity_per_s
        latency_ms = 5 / (1 - load) if load < 1 else 10_000
        latency_ms *= 1 + self._random.gauss(0, self._noise) if self._noise else 1
        return TriedRate(rate_per_s, min(rate_per_s, self.capacity_per_s), latency_ms, 0)


# 5 / (1 - load) is 50 at a load of 0.9.
@pytest.mark.parametrize("capacity_per_s", [3, 100, 5000])
@pytest.mark.parametrize("guess", [0.05, 0.5, 20])
async def test_the_highest_rate_is_found_from_any_start(capacity_per_s: float, guess: float) -> None:
    target = Target(capacity_per_s)
    found = await highest_rate(target, SLO, guess * capacity_per_s)
    assert found is not None
    assert 0.9 * capacity_per_s / (1 + PRECISION) <= found <= 0.9 * capacity_per_s
    assert len(target.tried) < 30


@pytest.mark.parametrize("capacity_per_s", [10, 330, 4000])
@pytest.mark.parametrize("guess", [0.3, 0.5, 0.7])
async def test_a_search_takes_about_as_many_steps_as_its_estimate_counts(capacity_per_s: float, guess: float) -> None:
    target = Target(capacity_per_s)
    await highest_rate(target, SLO, guess * capacity_per_s)
    assert len(target.tried) == pytest.approx(USUAL_STEPS, abs=3)


async def test_what_is_found_holds_when_it_is_repeated() -> None:
    target = Target(100, noise=0.2)
    found = await highest_rate(target, SLO, 50)
    assert target.tried[-2:] == [found, found]
    assert found is not None
    assert 60 < found < 95


async def test_a_target_that_holds_no_rate_is_given_up() -> None:
    tried = []

    async def too_slow(rate_per_s: float) -> TriedRate:
        tried.append(rate_per_s)
        return TriedRate(rate_per_s, rate_per_s, 60, 0)

    async def dead(rate_per_s: float) -> TriedRate:
        tried.append(rate_per_s)
        return TriedRate(rate_per_s, 0, None, 50)

    assert await highest_rate(too_slow, SLO, 50) is None
    assert len(tried) < 10
    tried.clear()
    assert await highest_rate(dead, SLO, 50) is None
    assert tried == [50]


@pytest.mark.parametrize(
    "point",
    [
        TriedRate(100, 100, 50.0, 0),
        TriedRate(100, 100, None, 0),
        TriedRate(100, 100, 10, 1),
        TriedRate(100, 80, 10, 0),
    ],
)
def test_a_rate_that_is_late_untold_failed_or_piles_up_does_not_hold(point: TriedRate) -> None:
    assert not point.holds(SLO)
    assert TriedRate(100, 99, 49, 0).holds(SLO)


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
