"""Batches that no request waits for, at every `ModelEngine`."""

from __future__ import annotations

import asyncio
import time

import pytest
from tests.server.processes.link.engines import Engines
from tests.server.processes.link.models import COST_S, MAX_BYTES, MAX_IMAGES, OTHER, SMALL, pictures
from tests.server.processes.link.requests import ask, begin, numbers

from xlaserve.config import Mode
from xlaserve.engine.request import EngineRequest, Result
from xlaserve.errors import DeadlineExceeded, ExecutionFailed, InvalidArgument, ModelNotReady


async def when_idle(engines: Engines, name: str, *numbers: int, within_s: float = 20.0) -> Result:
    request = EngineRequest((pictures(*numbers),), Mode.XLA, time.perf_counter() + within_s)
    return await engines.engine(name).run_when_idle(request)


@pytest.mark.parametrize("images", [1, 3, 8])
async def test_an_idle_device_runs_a_batch_that_no_request_waits_for(engines: Engines, images: int) -> None:
    result = await when_idle(engines, "numbers", *range(images))
    (batch,) = result.batches
    assert [*batch.rows] == [*range(images)]
    assert [int(number) for number in batch.outputs[0]] == [*range(images)], "without the rows of the padding"
    assert result.timings.execute_s > 0
    assert result.timings.queue_s == 0


async def test_it_is_known_how_many_images_run_in_one_batch(engines: Engines) -> None:
    engine = engines.engine("numbers")
    assert engine.largest(Mode.XLA, *SMALL) == max(COST_S)
    assert engine.largest(Mode.EAGER, *SMALL) == 0
    assert engine.largest(Mode.XLA, *OTHER) == 0
    with pytest.raises(InvalidArgument, match="pixels: expected at most 8 images of this size in a batch, got 9"):
        await when_idle(engines, "numbers", *range(9))


async def test_a_batch_that_no_request_waits_for_begins_once_the_device_is_idle(engines: Engines) -> None:
    running = begin(engines, "gated", 1)
    await engines.gate.started()
    with pytest.raises(DeadlineExceeded, match="model gated: the device was not idle"):
        await when_idle(engines, "gated", 2, within_s=0.03)
    waits = asyncio.create_task(when_idle(engines, "gated", 3))
    await asyncio.sleep(0.05)
    assert not waits.done()
    engines.gate.open()
    assert await numbers(waits) == [3]
    assert await numbers(running) == [1]


async def test_what_no_request_waits_for_is_in_no_bound(engines: Engines) -> None:
    waits = asyncio.create_task(when_idle(engines, "gated", *range(8)))
    await engines.gate.started()
    with engines.engine("gated").admit(MAX_IMAGES, MAX_BYTES):
        engines.gate.open()
    await waits


async def test_a_batch_that_no_request_waits_for_and_nobody_else_is_given_back(engines: Engines) -> None:
    running = begin(engines, "gated", 1)
    await engines.gate.started()
    waits = asyncio.create_task(when_idle(engines, "gated", 2))
    await asyncio.sleep(0.02)
    waits.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waits
    engines.gate.open(1)
    await running
    runs = asyncio.create_task(when_idle(engines, "gated", 3))
    await engines.gate.started()
    runs.cancel()
    with pytest.raises(asyncio.CancelledError):
        await runs
    engines.gate.open()
    assert await numbers(ask(engines, "gated", 4)) == [4]


async def test_a_batch_that_no_request_waits_for_may_fail(engines: Engines) -> None:
    with pytest.raises(ExecutionFailed, match=r"^model failing could not run this batch$"):
        await when_idle(engines, "failing", 1)


async def test_what_waits_for_an_idle_device_does_not_keep_a_model_from_its_end(engines: Engines) -> None:
    running = begin(engines, "gated", 1)
    await engines.gate.started()
    waits = asyncio.create_task(when_idle(engines, "gated", 2))
    await asyncio.sleep(0.02)
    drained = asyncio.create_task(engines.renew("gated", 20.0))
    with pytest.raises(ModelNotReady):
        await waits
    engines.gate.open()
    await running
    await drained
