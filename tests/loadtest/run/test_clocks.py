"""Generators whose clocks are hours apart and drift, in virtual time, where every request's true time is known."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any, cast

import numpy as np
import pytest
from tests.loadtest.conftest import FakeTarget

from xlaserve_loadtest.record.requests import Status
from xlaserve_loadtest.run import clocks, crew
from xlaserve_loadtest.run.clocks import RemoteGenerator
from xlaserve_loadtest.run.crew import Outcome
from xlaserve_loadtest.run.generator import Generator
from xlaserve_loadtest.schedule.arrivals import ClosedLoop, Load, OpenLoop, Replay
from xlaserve_loadtest.schedule.payload import Request
from xlaserve_loadtest.schedule.plan import BlockPlan
from xlaserve_loadtest.targets.target import ModelInfo, Reply

SERVICE_S = 0.02

InVirtualTime = Callable[[Callable[[], Coroutine[Any, Any, Any]]], Any]


class Distant:
    """A generator on a machine with a clock of its own, at the end of a slow and uneven way."""

    def __init__(self, target: FakeTarget, info: ModelInfo, *, offset_s: float, drift: float, seed: int) -> None:
        self.random = random.Random(seed)
        self.loop = asyncio.get_running_loop()
        self.offset_s, self.drift = offset_s, drift
        requests = {"xla": [Request(b"", 1, "xla")]}
        self.generator = Generator(
            target=target, models={"xla": [info]}, requests=requests, clock=self.own_ns, spin_s=0, offset=seed
        )

    def own_ns(self) -> int:
        return round((self.offset_s + self.loop.time() * (1 + self.drift)) * 1e9)

    async def read(self) -> int:
        await asyncio.sleep(self.random.uniform(0.0001, 0.003))
        now_ns = self.own_ns()
        await asyncio.sleep(self.random.uniform(0.0001, 0.001))
        return now_ns

    def __getattr__(self, method: str) -> Any:
        async def call(*arguments: Any, **options: Any) -> Any:
            await asyncio.sleep(self.random.uniform(0.0001, 0.003))
            answer = await getattr(self.generator, method)(*arguments, **options)
            await asyncio.sleep(self.random.uniform(0.0001, 0.001))
            return answer

        return call


@pytest.mark.parametrize("load", [OpenLoop(100.0, "constant"), ClosedLoop(4)])
def test_requests_timed_by_drifting_clocks_come_out_at_their_true_times(
    in_virtual_time: InVirtualTime, fake_target: type[FakeTarget], model_info: ModelInfo, load: Load
) -> None:
    arrived_ns: list[int] = []

    async def handle(request: Request) -> Reply:
        arrived_ns.append(round(asyncio.get_running_loop().time() * 1e9))
        await asyncio.sleep(SERVICE_S)
        return Reply(Status.OK)

    async def main() -> Outcome:
        loop = asyncio.get_running_loop()
        clock = lambda: round(loop.time() * 1e9)  # noqa: E731
        target, block = fake_target(handle), BlockPlan("xla", load, 1.0, 30.0)
        generators = []
        for seed, (offset_s, drift) in enumerate([(5 * 3600.0, 200e-6), (-0.5, -100e-6)]):
            distant = Distant(target, model_info, offset_s=offset_s, drift=drift, seed=seed)
            remote = RemoteGenerator(cast(Generator, distant), distant.read, f"gen{seed}:7070", clock)
            generators.append(cast(Generator, remote))
        shares = crew.tasks(block, ("fake",), 2, seed=0, max_in_flight=100)
        return await crew.run_block(block, generators, shares, clock=clock)

    outcome = in_virtual_time(main)
    first, second = outcome.machines
    assert (first.generator, second.generator) == ("gen0:7070", "gen1:7070")
    error_ms = max(first.clock_error_ms, second.clock_error_ms)
    seconds = (outcome.end_ns - outcome.start_ns) / 1e9
    assert first.clock_drift_ms == pytest.approx(200e-3 * seconds, abs=2 * error_ms)
    assert second.clock_drift_ms == pytest.approx(-100e-3 * seconds, abs=2 * error_ms)
    assert 0.1 <= error_ms <= 2
    rows = np.sort(outcome.rows["start_ns"])
    assert np.abs(rows - np.sort(arrived_ns)).max() <= error_ms * 1e6
    # A latency is a difference of one clock: only the drift, 0.2 per mille, is in it.
    assert (outcome.rows["end_ns"] - outcome.rows["start_ns"]) / 1e9 == pytest.approx(SERVICE_S, rel=0.0003)
    assert outcome.images_per_s() == pytest.approx(100 if isinstance(load, OpenLoop) else 200, rel=0.01)
    if isinstance(load, OpenLoop):
        np.testing.assert_allclose(np.diff(rows), 10_000_000, atol=2 * (error_ms * 1e6 + 7e6))
        assert outcome.late_sends == 0


@pytest.mark.parametrize("drift", [200e-6, -200e-6])
@pytest.mark.parametrize("due_ns", [[0] * 20, [number * 10_000_000 for number in range(200)]])
def test_a_replay_measures_each_of_its_requests_though_clocks_drift(
    in_virtual_time: InVirtualTime,
    fake_target: type[FakeTarget],
    model_info: ModelInfo,
    due_ns: list[int],
    drift: float,
) -> None:
    async def handle(request: Request) -> Reply:
        return Reply(Status.OK)

    async def main() -> Outcome:
        loop = asyncio.get_running_loop()
        clock = lambda: round(loop.time() * 1e9)  # noqa: E731
        distant = Distant(fake_target(handle), model_info, offset_s=3600.0, drift=drift, seed=0)
        remote = cast(Generator, RemoteGenerator(cast(Generator, distant), distant.read, "gen:7070", clock))
        load = Replay(np.array(due_ns))
        block = BlockPlan("xla", load, 1.0, load.duration_s())
        shares = crew.tasks(block, ("fake",), 1, seed=0, max_in_flight=5)
        return await crew.run_block(block, [remote], shares, clock=clock)

    outcome = in_virtual_time(main)
    assert outcome.measured.size + outcome.dropped == len(due_ns)


@pytest.mark.parametrize(("up_s", "down_s"), [(0.001, 0.001), (0.005, 0.0001), (0.0001, 0.005)])
def test_the_error_of_a_comparison_holds_however_unequal_the_ways_are(
    in_virtual_time: InVirtualTime, up_s: float, down_s: float
) -> None:
    async def main() -> clocks.Comparison:
        loop = asyncio.get_running_loop()

        async def read() -> int:
            await asyncio.sleep(up_s)
            now_ns = round((loop.time() + 3600) * 1e9)
            await asyncio.sleep(down_s)
            return now_ns

        return await clocks.compare(read, lambda: round(loop.time() * 1e9))

    found = in_virtual_time(main)
    assert found.error_ns == pytest.approx((up_s + down_s) / 2 * 1e9, abs=2)
    assert abs(found.offset_ns - 3600 * 10**9) <= found.error_ns


def test_a_slow_way_does_not_lengthen_a_comparison_without_end(in_virtual_time: InVirtualTime) -> None:
    async def main() -> float:
        loop = asyncio.get_running_loop()

        async def read() -> int:
            await asyncio.sleep(2)
            return 0

        await clocks.compare(read, lambda: round(loop.time() * 1e9))
        return loop.time()

    assert in_virtual_time(main) == pytest.approx(2)
