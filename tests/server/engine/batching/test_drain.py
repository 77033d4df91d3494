"""Models that are drained."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from tests.fakes import lanes_are_free
from tests.server.engine.batching.served_model import NO_DEADLINE, Make, numbers_of

from xlaserve.config import Mode
from xlaserve.engine.request import EngineRequest
from xlaserve.errors import ModelNotReady, ShuttingDown


async def test_drain_lets_admitted_work_finish_and_takes_nothing_new(virtual_time: Any, make: Make) -> None:
    model = make()
    asks = [model.ask(range(20)), model.ask([100])]
    await asyncio.sleep(0.5)
    drained = asyncio.create_task(model.batcher.drain(100.0))
    await asyncio.sleep(0)
    with pytest.raises(ModelNotReady):
        await model.answer([1])
    assert [numbers_of(result) for result in await asyncio.gather(*asks)] == [list(range(20)), [100]]
    before = virtual_time.time()
    await drained
    assert virtual_time.time() == before
    assert model.is_empty()
    assert lanes_are_free(model.lanes)


async def test_drain_waits_for_what_was_admitted_and_is_still_decoded(virtual_time: object, make: Make) -> None:
    model = make()
    model.batcher.admission.admit(1, 12)
    drained = asyncio.create_task(model.batcher.drain(100.0))
    await asyncio.sleep(3)
    result = await model.batcher.run(EngineRequest((np.zeros((1, 2, 2, 3), np.uint8),), Mode.XLA, NO_DEADLINE))
    assert numbers_of(result) == [0]
    assert not drained.done()
    model.batcher.admission.leave(1, 12)
    await drained


async def test_drain_does_not_wait_for_more_images(virtual_time: Any, make: Make) -> None:
    model = make(max_queue_delay_s=10.0)
    ask = model.ask([1])
    await asyncio.sleep(0.5)
    await model.batcher.drain(100.0)
    assert numbers_of(await ask) == [1]
    assert virtual_time.time() == 1.5


async def test_drain_that_times_out_fails_what_waits_and_what_runs(virtual_time: Any, make: Make) -> None:
    model = make()
    asks = [model.ask(range(8)), model.ask([100]), model.ask(range(30))]
    await asyncio.sleep(0.5)
    await model.batcher.drain(1.0)
    outcomes = await asyncio.gather(*asks, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [ShuttingDown] * 3
    assert virtual_time.time() == 1.5
    assert model.is_empty()
    await asyncio.sleep(10)  # what was on the device ends, and finds nobody waiting
    assert lanes_are_free(model.lanes)


async def test_after_drain_nothing_can_be_run(virtual_time: object, make: Make) -> None:
    model = make()
    await model.batcher.drain(0.0)
    await model.batcher.drain(0.0)
    with pytest.raises(ModelNotReady):
        model.batcher.admission.admit(1, 1)
    with pytest.raises(ModelNotReady):
        await model.batcher.run(EngineRequest((np.zeros((1, 2, 2, 3), np.uint8),), Mode.XLA, NO_DEADLINE))
    assert not model.crashes


async def test_a_drained_model_leaves_the_device_to_the_others(virtual_time: object, make: Make) -> None:
    stays = make()
    goes = make(lanes=stays.lanes, worker=stays.worker)
    first = stays.ask([1])
    await asyncio.sleep(0.5)
    waits, dropped = stays.ask([2]), goes.ask([3])
    await asyncio.sleep(0)
    await goes.batcher.drain(0.25)
    assert [numbers_of(await ask) for ask in (first, waits)] == [[1], [2]]
    with pytest.raises(ShuttingDown):
        await dropped
