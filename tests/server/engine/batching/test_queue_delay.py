"""Batches that wait for more images, `max_queue_delay` at most."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest
from tests.fakes import Started
from tests.server.engine.batching.served_model import Make

from xlaserve.config import Mode
from xlaserve.engine.batching.lanes import Lanes


async def test_a_job_waits_for_more_images_exactly_max_queue_delay(virtual_time: object, make: Make) -> None:
    model = make(max_queue_delay_s=0.5)
    await asyncio.sleep(1)
    first = model.ask([1])
    await asyncio.sleep(0.25)
    await asyncio.gather(first, model.ask([2]))
    assert model.started == [Started(1.5, Mode.XLA, 2, [1, 2])]


async def test_a_full_batch_does_not_wait_for_more_images(virtual_time: object, make: Make) -> None:
    model = make(max_queue_delay_s=0.5)
    first = model.ask([0])
    await asyncio.sleep(0.25)
    await asyncio.gather(first, model.ask(range(1, 8)))
    assert model.started == [Started(0.25, Mode.XLA, 8, list(range(8)))]


async def test_a_batch_that_costs_least_per_image_counts_as_full(virtual_time: object, make: Make) -> None:
    model = make(max_queue_delay_s=0.5, cost_s={1: 1.0, 4: 2.0, 8: 6.0})
    await model.answer(range(4))
    assert [(batch.at, batch.bucket) for batch in model.started] == [(0.0, 4)]


async def test_a_full_batch_of_one_mode_does_not_cut_short_the_wait_of_another(
    virtual_time: object, make: Make
) -> None:
    model = make(lanes=Lanes(2), modes=(Mode.XLA, Mode.GRAPH), max_queue_delay_s=0.5, cost_s={8: 3.0})
    asks = [model.ask([100], Mode.GRAPH)]
    await asyncio.sleep(0.125)
    asks.append(model.ask(range(8)))
    await asyncio.gather(*asks)
    assert [(batch.at, batch.mode) for batch in model.started] == [(0.125, Mode.XLA), (0.5, Mode.GRAPH)]


async def test_what_was_planned_with_a_batch_does_not_wait_for_more_images_again(
    virtual_time: object, make: Make
) -> None:
    model = make(lanes=Lanes(2), max_queue_delay_s=0.5)
    await asyncio.gather(*(model.ask([number]) for number in range(8)))
    assert [(batch.at, batch.bucket) for batch in model.started] == [(0.0, 4), (0.0, 4)]


async def test_the_rest_of_a_split_job_does_not_wait_for_more_images(virtual_time: object, make: Make) -> None:
    model = make(max_queue_delay_s=100.0)
    await model.answer(range(10))
    assert [(batch.at, batch.bucket) for batch in model.started] == [(0.0, 8), (3.0, 2)]


async def test_a_full_batch_with_cancelled_jobs_waits_for_more_images_again(virtual_time: object, make: Make) -> None:
    model = make(max_queue_delay_s=8.0)
    other = make(lanes=model.lanes, worker=model.worker)
    running, staged = other.ask(range(100, 108)), other.ask(range(200, 208))
    await asyncio.sleep(1)
    stays, goes = model.ask([1]), model.ask(range(2, 9))
    await asyncio.sleep(1)
    goes.cancel()
    await asyncio.gather(running, staged, stays)
    assert model.started[-1] == Started(9.0, Mode.XLA, 1, [1])


@pytest.mark.parametrize("delay_s", [0.0004, 0.0014, 0.0026])
async def test_a_wait_of_less_than_a_loops_millisecond_wakes_it_twice_at_most(
    virtual_time: Any, make: Make, monkeypatch: pytest.MonkeyPatch, delay_s: float
) -> None:
    call_later = virtual_time.call_later
    timers = itertools.count(1)

    def call_later_as_uvloop(seconds: float, *args: Any) -> Any:
        assert next(timers) < 10, "it spins"
        return call_later(round(seconds * 1000) / 1000, *args)

    model = make(max_queue_delay_s=delay_s)
    with monkeypatch.context() as patched:
        patched.setattr(virtual_time, "call_later", call_later_as_uvloop)
        ask = model.ask([1])
        await asyncio.sleep(0.02)
        assert next(timers) <= 5
    (started,) = model.started
    assert delay_s <= started.at <= delay_s + 0.001
    await ask
