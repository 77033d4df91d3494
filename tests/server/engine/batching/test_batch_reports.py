"""Batches as observers and traces are told of them."""

from __future__ import annotations

import asyncio

import pytest
from tests.fakes import lanes_are_free
from tests.server.engine.batching.served_model import Make, numbers_of

from xlaserve.config import Bucket, Mode
from xlaserve.engine.batching.batch_reports import MAX_TRACED_REQUESTS
from xlaserve.engine.trace_context import new
from xlaserve.errors import ExecutionFailed


async def test_an_observer_that_raises_keeps_no_job_from_its_answer(
    virtual_time: object, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    model = make()
    model.observer.ran = None  # type: ignore[assignment]
    assert numbers_of(await model.answer([1])) == [1]
    assert numbers_of(await model.answer([2])) == [2]
    assert caplog.text.count("could not be observed") == 2
    assert lanes_are_free(model.lanes)


async def test_a_batch_names_the_requests_that_are_traced_and_they_know_it(virtual_time: object, make: Make) -> None:
    model = make(traces=True)
    first, second = new(), new()
    running = model.ask([0])
    await asyncio.sleep(0)
    asked = [model.ask([1, 2], trace=first), model.ask([3]), model.ask([4], trace=second)]
    results = await asyncio.gather(*asked)
    await running
    (batch,) = model.traced
    assert (batch.model, batch.mode, batch.bucket, batch.images) == ("model", Mode.XLA, Bucket(4, 2, 2), 4)
    assert batch.requests == [first, second]
    assert [[known.span for known in result.traced] for result in results] == [[batch.span], [], [batch.span]]
    assert not batch.error


async def test_a_request_in_several_batches_knows_all_of_them(virtual_time: object, make: Make) -> None:
    model = make(traces=True)
    result = await model.answer(range(11), trace=new())
    assert [batch.images for batch in result.traced] == [batch.images for batch in model.traced]
    assert sum(batch.images for batch in model.traced) == 11
    assert len({batch.span.trace_id for batch in model.traced}) == len(model.traced) > 1


async def test_a_failed_batch_tells_its_trace_why(virtual_time: object, make: Make) -> None:
    model = make(traces=True)

    def fail() -> None:
        raise MemoryError

    model.executables[Mode.XLA].before = fail
    with pytest.raises(ExecutionFailed):
        await model.answer([1], trace=new())
    assert [batch.error for batch in model.traced] == ["MemoryError"]


async def test_a_batch_names_a_bounded_number_of_requests(virtual_time: object, make: Make) -> None:
    model = make(traces=True, cost_s={1: 1.0, 2 * MAX_TRACED_REQUESTS: 1.5})
    running = model.ask([0])
    await asyncio.sleep(0)
    await asyncio.gather(running, *(model.ask([1], trace=new()) for _ in range(2 * MAX_TRACED_REQUESTS)))
    assert [len(batch.requests) for batch in model.traced] == [MAX_TRACED_REQUESTS]


async def test_a_tracer_that_raises_keeps_no_job_from_its_answer(
    virtual_time: object, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    model = make(on_traced=lambda batch: 1 / 0)
    assert numbers_of(await model.answer([1], trace=new())) == [1]
    assert "could not be traced" in caplog.text
    assert lanes_are_free(model.lanes)
