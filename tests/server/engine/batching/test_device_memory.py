"""Batches that the device's memory does not hold, which run again in smaller buckets, and memory that is freed."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable
from contextlib import suppress

import numpy as np
import pytest
from tests.fakes import Started, lanes_are_free
from tests.server.engine.batching.served_model import COST_S, NO_DEADLINE, SQUARE, WIDE, Make, numbers_of

from xlaserve.config import Bucket, Mode
from xlaserve.engine.batching import batch_reports
from xlaserve.engine.batching.lanes import Lanes
from xlaserve.engine.buckets.planner import Cost
from xlaserve.engine.program import Warmed
from xlaserve.engine.request import EngineRequest
from xlaserve.errors import ExecutionFailed, OutOfDeviceMemory, ShuttingDown, clear_tracebacks


def short_of_memory(largest: int) -> Callable[[Started], BaseException | None]:
    """A device that holds batches up to `largest` only."""
    return lambda batch: OutOfDeviceMemory("too large") if batch.bucket > largest else None


@pytest.mark.parametrize("lanes", [1, 2])
async def test_a_batch_that_memory_does_not_hold_runs_again_in_smaller_buckets(
    virtual_time: object, make: Make, lanes: int
) -> None:
    model = make(lanes=Lanes(lanes))
    model.worker.error_of = short_of_memory(2)
    jobs = [model.ask(numbers) for numbers in (range(11), (20, 21), (30,), (40, 41, 42))]
    results = await asyncio.gather(*jobs)
    assert [numbers_of(result) for result in results] == [[*range(11)], [20, 21], [30], [40, 41, 42]]
    assert sorted(bucket for retired in model.retired for bucket in retired) == [4, 8]
    started = len(model.worker.started)
    assert numbers_of(await model.answer(range(9))) == [*range(9)]
    assert {batch.bucket for batch in model.worker.started[started:]} <= {1, 2}
    assert lanes_are_free(model.lanes)


async def test_a_batch_too_large_for_the_smallest_bucket_fails_its_jobs_only(virtual_time: object, make: Make) -> None:
    model = make()
    model.worker.error_of = lambda batch: OutOfDeviceMemory("too large") if 3 in batch.numbers else None
    first, second = model.ask((1, 2, 3, 4)), model.ask((5,))
    with pytest.raises(ExecutionFailed):
        await first
    assert numbers_of(await second) == [5]
    assert numbers_of(await model.answer((6,))) == [6]
    assert lanes_are_free(model.lanes)


async def test_a_job_that_is_cancelled_before_its_batch_runs_again_is_left_out(
    virtual_time: object, make: Make
) -> None:
    model = make(cost_s={1: 1.0, 4: 1.0})
    model.worker.error_of = short_of_memory(1)
    first, second = model.ask((1,)), model.ask((2, 3))
    third = model.ask((4,))
    await asyncio.sleep(2.5)  # its first image runs again
    assert model.retired == [[4]]
    second.cancel()
    assert [numbers_of(await job) for job in (first, third)] == [[1], [4]]
    assert lanes_are_free(model.lanes)


@pytest.mark.parametrize("seconds", [0.5, 3.5, 5.5, 7.5])
async def test_drain_drops_what_was_to_run_again_after_memory_was_short(
    virtual_time: object, make: Make, seconds: float
) -> None:
    model = make()
    model.worker.error_of = short_of_memory(1)
    pixels = model._pictures(range(16))
    kept = weakref.ref(pixels)
    ask = asyncio.create_task(model.batcher.run(EngineRequest((pixels,), Mode.XLA, NO_DEADLINE)))
    del pixels
    await asyncio.sleep(seconds)
    model.batcher.admission.admit(1, 1)  # so that it does not end by itself
    await model.batcher.drain(0.0)
    with pytest.raises(ShuttingDown):
        await ask
    del ask
    await asyncio.sleep(30)  # what was on the device ends
    gc.collect()
    assert kept() is None


async def test_buffers_go_with_their_model(virtual_time: object, make: Make) -> None:
    model = make()
    other = make(lanes=model.lanes, worker=model.worker)
    wide = {(Mode.XLA, Bucket(1, *WIDE)): Warmed(model.executables[Mode.XLA], Cost(1.0, 1.0))}
    model.batcher.add(wide)
    model.batcher.add(wide)
    buckets = [Bucket(batch, *SQUARE) for batch in COST_S]
    assert model.worker.reserved == dict.fromkeys(buckets, 2) | {Bucket(1, *WIDE): 1}
    await model.batcher.drain(0.0)
    await model.batcher.drain(0.0)
    assert +model.worker.reserved == dict.fromkeys(buckets, 1)
    await other.batcher.drain(0.0)
    assert not +model.worker.reserved


async def test_nothing_is_kept_of_a_request_once_it_is_settled(virtual_time: object, make: Make) -> None:
    model = make()
    model.worker.error_of = lambda batch: ValueError() if 1 in batch.numbers else None
    kept = []
    for images in ([0], [1], range(10, 30)):
        pixels = model._pictures(images)
        kept.append(weakref.ref(pixels))
        with suppress(ExecutionFailed):
            await model.batcher.run(EngineRequest((pixels,), Mode.XLA, NO_DEADLINE))
    del pixels
    gc.collect()
    assert [reference() is None for reference in kept] == [True] * 3


async def test_unexpected_outputs_do_not_keep_images_until_garbage_is_collected(
    virtual_time: object, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make()
    monkeypatch.setattr(model.executables[Mode.XLA], "_echo", lambda images: (np.zeros(len(images) - 4),))
    monkeypatch.setattr(batch_reports.log, "disabled", True)  # what captures logs keeps errors
    pixels = model._pictures(range(4))
    kept = weakref.ref(pixels)
    gc.disable()
    try:
        ask = asyncio.create_task(model.batcher.run(EngineRequest((pixels,), Mode.XLA, NO_DEADLINE)))
        del pixels
        await asyncio.wait([ask])
        error = ask.exception()
        assert isinstance(error, ExecutionFailed)
        clear_tracebacks(error)
        del ask, error
        assert kept() is None
    finally:
        gc.enable()
