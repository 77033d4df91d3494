"""Batches that take less than a hand-over to a thread run on the event loop."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import numpy as np
import pytest
from tests.fakes import lanes_are_free, outputs_of

from xlaserve.config import Bucket, Mode
from xlaserve.engine.batching.batcher import Batcher
from xlaserve.engine.batching.costs import BRIEF_S
from xlaserve.engine.batching.lanes import Lanes, Share
from xlaserve.engine.batching.worker import Run, Worker
from xlaserve.engine.buckets.planner import Cost
from xlaserve.engine.inputs import Images
from xlaserve.engine.program import Outputs, Warmed
from xlaserve.engine.request import EngineRequest
from xlaserve.errors import DeadlineExceeded, DeadlineUnreachable, ExecutionFailed

BRIEF = Cost(BRIEF_S, BRIEF_S)
LONG = Cost(BRIEF_S * 2, BRIEF_S * 2)


class Noted:
    """An executable that notes the threads it runs on, and an observer of batches."""

    def __init__(self) -> None:
        self.threads: list[int] = []
        self.batches: list[int] = []
        self.failed = 0
        self.error: BaseException | None = None
        self.observing_error: Exception | None = None

    def __call__(self, images: Images) -> Outputs:
        self.threads.append(threading.get_ident())
        if self.error:
            raise self.error
        return (images[:, 0, 0, 0].astype(np.float32),)

    def batch_ran(self, mode: Mode, bucket: Bucket, images: int, run: Run) -> None:
        if self.observing_error:
            raise self.observing_error
        self.batches.append(images)

    def batch_failed(self, mode: Mode, bucket: Bucket, images: int) -> None:
        self.failed += 1


Serve = Callable[..., AbstractAsyncContextManager[tuple[Batcher, Noted, Lanes]]]


@pytest.fixture
def serve() -> Serve:
    @asynccontextmanager
    async def serving(
        costs: dict[int, Cost], max_queue_delay_s: float = 0.0
    ) -> AsyncIterator[tuple[Batcher, Noted, Lanes]]:
        worker, lanes, noted = Worker(1), Lanes(1), Noted()
        batcher = Batcher(
            name="brief",
            programs={(Mode.XLA, Bucket(batch, 2, 2)): Warmed(noted, cost) for batch, cost in costs.items()},
            lanes=lanes,
            worker=worker,
            observer=noted,
            max_images=100,
            max_bytes=10**9,
            max_queue_delay_s=max_queue_delay_s,
        )
        yield batcher, noted, lanes
        await batcher.drain(30.0)
        await asyncio.to_thread(worker.stop)

    return serving


def pictures(numbers: Iterable[int]) -> Images:
    return np.stack([np.full((2, 2, 3), number, np.uint8) for number in numbers])


async def ask(batcher: Batcher, numbers: Iterable[int]) -> list[float]:
    result = await batcher.run(EngineRequest((pictures(numbers),), Mode.XLA, math.inf))
    outputs: list[float] = outputs_of(result)[0].tolist()
    return outputs


async def test_a_request_that_fills_a_brief_bucket_runs_on_the_event_loop(serve: Serve) -> None:
    async with serve({1: BRIEF}) as (batcher, noted, _):
        assert await ask(batcher, [7]) == [7]
    assert noted.threads == [threading.get_ident()]
    assert noted.batches == [1]


async def test_a_brief_batch_whose_deadline_has_passed_never_runs(serve: Serve) -> None:
    async with serve({1: BRIEF}) as (batcher, noted, _):
        with pytest.raises((DeadlineExceeded, DeadlineUnreachable)):
            await batcher.run(EngineRequest((pictures([7]),), Mode.XLA, batcher.clock() - 1e-6))
    assert noted.threads == []


@pytest.mark.parametrize(("costs", "images"), [({1: LONG}, 1), ({4: BRIEF}, 3)])
async def test_what_takes_longer_or_must_be_gathered_runs_on_a_thread(
    serve: Serve, costs: dict[int, Cost], images: int
) -> None:
    async with serve(costs) as (batcher, noted, _):
        assert await ask(batcher, range(images)) == list(range(images))
    assert noted.threads
    assert threading.get_ident() not in noted.threads


async def test_a_brief_batch_waits_for_more_images_where_that_is_configured(serve: Serve) -> None:
    async with serve({1: BRIEF, 2: BRIEF}, max_queue_delay_s=300.0) as (batcher, noted, _):
        answers = await asyncio.gather(ask(batcher, [7]), ask(batcher, [8]))
    assert list(answers) == [[7], [8]]
    assert noted.batches == [2]


async def test_requests_at_once_are_each_answered_with_their_own(serve: Serve) -> None:
    async with serve({1: BRIEF, 2: BRIEF, 4: LONG}) as (batcher, noted, _):
        sizes = [1, 2, 3, 4, 1, 1, 2]
        answers = await asyncio.gather(*(ask(batcher, [number] * size) for number, size in enumerate(sizes)))
    assert answers == [[number] * size for number, size in enumerate(sizes)]
    assert sum(noted.batches) == sum(sizes)


async def test_a_brief_batch_waits_for_its_turn_while_the_lane_is_busy(serve: Serve) -> None:
    async with serve({1: BRIEF}) as (batcher, noted, lanes):
        for _ in range(2):  # the lane and the place to gather ahead
            await lanes.acquire(Share(lambda: True))
        asked = asyncio.create_task(ask(batcher, [7]))
        for _ in range(10):
            await asyncio.sleep(0)
        assert not noted.threads
        for _ in range(2):
            lanes.release()
        assert await asked == [7]


async def test_a_brief_batch_that_raises_fails_its_request_and_frees_its_lane(serve: Serve) -> None:
    async with serve({1: BRIEF}) as (batcher, noted, _):
        noted.error = MemoryError()
        with pytest.raises(ExecutionFailed):
            await ask(batcher, [7])
        noted.error = None
        assert await ask(batcher, [8]) == [8]
    assert noted.failed == 1


async def test_an_observer_that_raises_costs_a_brief_batch_no_answer_and_no_lane(serve: Serve) -> None:
    async with serve({1: BRIEF}) as (batcher, noted, lanes):
        noted.observing_error = ValueError("no")
        for number in range(3):
            assert await ask(batcher, [number]) == [number]
        assert lanes_are_free(lanes)
