"""Traffic, new resolutions and compilations of several models on the lanes of one device, with failures and cancels."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st
from tests.fakes import Executable, FakeWorker, Observer, lanes_are_free, outputs_of

from xlaserve.config import Bucket, Mode
from xlaserve.engine.batching.batcher import Batcher
from xlaserve.engine.batching.lanes import Lanes
from xlaserve.engine.batching.worker import Batch, Run
from xlaserve.engine.buckets.planner import Cost
from xlaserve.engine.inputs import Images
from xlaserve.engine.program import Outputs, Warmed
from xlaserve.engine.request import EngineRequest
from xlaserve.engine.warmup.beside_traffic import BesideTraffic
from xlaserve.engine.warmup.ledger import Ledger
from xlaserve.errors import ExecutionFailed
from xlaserve.planning.virtual_time import VirtualTimeLoop

COST_S = {1: 1.0, 2: 1.5, 4: 2.0}
SIZES = [(2, 2), (2, 4), (4, 2), (4, 4)]


class Event(NamedTuple):
    """Something that one of the models is asked to do."""

    at: float
    model: int
    size: tuple[int, int]
    is_timing: bool
    """Whether it compiles a program, as for a new resolution; else it is a request."""
    images: int
    fails: bool
    cancel_after: float | None


def quarters(most: int) -> st.SearchStrategy[float]:
    """Seconds whose ends virtual time meets exactly."""
    return st.integers(0, 4 * most).map(lambda quarter: quarter / 4)


events = st.lists(
    st.builds(
        Event,
        at=quarters(4),
        model=st.integers(0, 2),
        size=st.sampled_from(SIZES),
        is_timing=st.booleans(),
        images=st.integers(1, 9),
        fails=st.booleans(),
        cancel_after=st.none() | quarters(6),
    ),
    min_size=1,
    max_size=25,
)


class Worker(FakeWorker):
    """Refuses every `refuses`th batch."""

    refuses = 0
    submitted = 0

    def submit(self, batch: Batch, done: Callable[[Run | BaseException], object]) -> None:
        self.submitted += 1
        if self.refuses and self.submitted % self.refuses == 0:
            raise RuntimeError("can't start new thread")
        super().submit(batch, done)


def answer(images: Images) -> Outputs:
    return (images[:, 0, 0, 0].astype(np.float32),)


def three_new_sizes_at_once() -> list[Event]:
    return [Event(0.0, 0, size, True, 1, False, None) for size in SIZES[:3]]


@given(events, st.integers(1, 3), st.sampled_from([0, 0, 2, 5]))
@example(three_new_sizes_at_once(), 1, 0)
def test_everything_ends_and_every_lane_comes_back(asked: list[Event], lane_count: int, refuses: int) -> None:
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner, ThreadPoolExecutor(1) as compiling:
        runner.run(play(asked, lane_count, refuses, compiling))


async def play(asked: list[Event], lane_count: int, refuses: int, compiling: ThreadPoolExecutor) -> None:
    loop = asyncio.get_running_loop()
    lanes = Lanes(lane_count)
    worker = Worker(loop, lane_count, COST_S)
    worker.refuses = refuses
    failing = {number for number, event in enumerate(asked) if event.fails}
    worker.error_of = lambda batch: ValueError() if failing & set(batch.numbers) else None
    executable = Executable(Mode.XLA, answer)
    batchers, makers = [], []
    for number in range(3):
        programs = {
            (Mode.XLA, Bucket(batch, *size)): Warmed(executable, Cost(seconds, seconds))
            for batch, seconds in COST_S.items()
            for size in SIZES
        }
        batchers.append(
            Batcher(
                name=str(number),
                programs=programs,
                lanes=lanes,
                worker=worker,
                observer=Observer(),
                max_images=10_000,
                max_bytes=10_000_000,
                clock=loop.time,
            )
        )
        makers.append(
            BesideTraffic(
                program=None,  # type: ignore[arg-type]
                lanes=lanes,
                worker=worker,
                ledger=Ledger(str(number), "1"),
                compiling=compiling,
            )
        )

    async def do(number: int, event: Event) -> None:
        await asyncio.sleep(event.at)
        if event.is_timing:
            images = np.full((1, *event.size, 3), number, np.uint8)
            assert await makers[event.model].time(executable, Bucket(1, *event.size), (images,)) > 0
            return
        images = np.full((event.images, *event.size, 3), number, np.uint8)
        result = await batchers[event.model].run(EngineRequest((images,), Mode.XLA, math.inf))
        assert set(outputs_of(result)[0]) == {number}

    tasks = []
    for number, event in enumerate(asked):
        tasks.append(task := asyncio.create_task(do(number, event)))
        if event.cancel_after is not None:
            loop.call_later(event.at + event.cancel_after, task.cancel)
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    for event, outcome in zip(asked, outcomes, strict=True):
        if isinstance(outcome, asyncio.CancelledError):
            assert event.cancel_after is not None
        elif isinstance(outcome, ValueError | RuntimeError):
            assert event.is_timing
            assert event.fails or refuses
        elif outcome is not None:
            assert isinstance(outcome, ExecutionFailed)
            assert failing or refuses
    await asyncio.sleep(1000)  # what still runs ends
    assert not any(batcher.waiting_images for batcher in batchers)
    assert not worker.running
    assert lanes_are_free(lanes)
    await asyncio.gather(*(batcher.drain(0.0) for batcher in batchers))
