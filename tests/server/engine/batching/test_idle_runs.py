"""Batches that no request waits for, run while the device is idle."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from tests.fakes import FakeWorker, lanes_are_free
from tests.server.engine.batching.served_model import Make, numbers_of

from xlaserve.config import Mode
from xlaserve.engine.batching.batcher import IDLE_POLL_S
from xlaserve.engine.batching.lanes import Lanes
from xlaserve.engine.inputs import Images
from xlaserve.engine.request import EngineRequest
from xlaserve.errors import DeadlineExceeded, ExecutionFailed, ModelNotReady


async def test_an_idle_run_takes_place_on_an_idle_device_and_is_not_counted(
    virtual_time: object, make: Make, pictures: Callable[[Iterable[int]], Images]
) -> None:
    model = make()
    result = await model.batcher.run_when_idle(EngineRequest((pictures([5, 6, 7]),), Mode.XLA, deadline=0.0))
    assert numbers_of(result) == [5, 6, 7]
    assert (result.timings.queue_s, result.timings.execute_s) == (0.0, 2.0)
    assert [(batch.bucket, batch.numbers) for batch in model.started] == [(4, [5, 6, 7])]
    assert not model.observer.ran
    assert not model.batcher.live().demand
    assert lanes_are_free(model.lanes)


async def test_an_idle_run_waits_for_an_idle_device_until_its_deadline(
    virtual_time: object, make: Make, pictures: Callable[[Iterable[int]], Images]
) -> None:
    busy = make(lanes=Lanes(2))
    quiet = make(lanes=busy.lanes, worker=busy.worker)
    asked = busy.ask([1])
    await asyncio.sleep(0.25)
    with pytest.raises(DeadlineExceeded, match="the device was not idle"):
        await quiet.batcher.run_when_idle(EngineRequest((pictures([2]),), Mode.XLA, deadline=0.75))
    await quiet.batcher.run_when_idle(EngineRequest((pictures([2]),), Mode.XLA, deadline=2.0))
    await asked
    assert [batch.at for batch in quiet.started] == [0.0, pytest.approx(1.0, abs=2 * IDLE_POLL_S)]


async def test_images_that_wait_for_others_go_before_what_no_request_waits_for(
    virtual_time: object, make: Make, pictures: Callable[[Iterable[int]], Images]
) -> None:
    model = make(max_queue_delay_s=4.0)
    asked = model.ask([1])
    await asyncio.sleep(0)
    with pytest.raises(DeadlineExceeded):
        await model.batcher.run_when_idle(EngineRequest((pictures([2]),), Mode.XLA, deadline=3.0))
    await asked


async def test_a_request_waits_for_the_batch_under_way_that_no_request_waits_for(
    virtual_time: Any, make: Make, pictures: Callable[[Iterable[int]], Images]
) -> None:
    model = make()
    idle = asyncio.create_task(model.batcher.run_when_idle(EngineRequest((pictures([9]),), Mode.XLA, deadline=0.0)))
    await asyncio.sleep(0.25)
    await model.ask([1])
    assert [batch.at for batch in model.started] == [0.0, 1.0]
    assert numbers_of(await idle) == [9]


async def test_drain_waits_for_a_batch_that_no_request_waits_for(
    virtual_time: Any, make: Make, pictures: Callable[[Iterable[int]], Images]
) -> None:
    model = make()
    idle = asyncio.create_task(model.batcher.run_when_idle(EngineRequest((pictures([9]),), Mode.XLA, deadline=0.0)))
    waits = asyncio.create_task(model.batcher.run_when_idle(EngineRequest((pictures([9]),), Mode.XLA, deadline=10.0)))
    await asyncio.sleep(0.25)
    idle.cancel()  # the batch goes on
    await model.batcher.drain(10.0)
    assert virtual_time.now == 1.0
    with pytest.raises(ModelNotReady):
        await waits
    assert lanes_are_free(model.lanes)


async def test_an_idle_batch_that_fails_gives_its_lane_back(
    virtual_time: object, make: Make, pictures: Callable[[Iterable[int]], Images]
) -> None:
    model = make()
    assert isinstance(model.worker, FakeWorker)
    model.worker.error_of = lambda batch: ValueError("broken")
    with pytest.raises(ExecutionFailed):
        await model.batcher.run_when_idle(EngineRequest((pictures([1]),), Mode.XLA, deadline=0.0))
    assert lanes_are_free(model.lanes)
    await model.batcher.drain(1.0)
