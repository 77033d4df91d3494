"""The end of requests that are cancelled or dropped, at every `ModelEngine`."""

from __future__ import annotations

import asyncio
import gc

import pytest
from tests.fakes import outputs_of
from tests.server.processes.link.engines import Engines, EnginesElsewhere, until_admitted, until_nothing_is_held
from tests.server.processes.link.requests import ask, begin, numbers

from xlaserve.engine.request import Result


async def test_all_is_given_back_as_soon_as_an_answer_is_dropped(engines: Engines) -> None:
    gc.disable()
    try:
        result = await ask(engines, "numbers", 1, in_place=True)
        del result
        await until_nothing_is_held(engines, collects=False)
    finally:
        gc.enable()


async def test_all_is_released_once_nobody_waits_without_garbage_collection(engines: Engines) -> None:
    gc.disable()
    try:
        under_way = begin(engines, "gated", 1)
        await engines.gate.started()
        waits = begin(engines, "gated", 2)
        await asyncio.sleep(0)
        for task in (under_way, waits):
            task.cancel()
        await asyncio.wait([under_way, waits])
        del under_way, waits, task
        engines.gate.open()
        await until_nothing_is_held(engines, collects=False)
    finally:
        gc.enable()


async def test_a_request_that_is_cancelled_while_it_waits_is_not_run(engines: Engines) -> None:
    running = begin(engines, "gated", 1)
    await engines.gate.started()
    cancelled, other = begin(engines, "gated", 2, 3), begin(engines, "gated", 4)
    await until_admitted(engines, "gated", 4)
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    engines.gate.open()
    assert [*await asyncio.gather(numbers(running), numbers(other))] == [[1], [4]]


async def test_a_request_that_is_cancelled_at_once_is_given_back(engines: Engines) -> None:
    tasks = [begin(engines, "numbers", number) for number in range(20)]
    await asyncio.sleep(0)
    for task in tasks[::2]:
        task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(result, asyncio.CancelledError) for result in results[::2])
    answers = [int(outputs_of(result)[0][0]) for result in results if isinstance(result, Result)]
    assert answers == [*range(1, 20, 2)]


async def test_a_request_cancelled_while_it_runs_leaves_at_once_its_memory_later(engines: Engines) -> None:
    cancelled = begin(engines, "gated", *range(8), in_place=True)
    await engines.gate.started()
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(asyncio.shield(cancelled), 1)
    if isinstance(engines, EnginesElsewhere):
        await asyncio.sleep(0.02)
        assert engines.link.jobs == 1, "the batch still reads its memory"
        assert engines.link.arena.used_bytes
    engines.gate.open()
