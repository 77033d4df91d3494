"""Jobs that are dropped at their deadline, or cancelled."""

from __future__ import annotations

import asyncio

import pytest
from tests.server.engine.batching.served_model import COST_S, Make, numbers_of

from xlaserve.engine.request import Result
from xlaserve.errors import DeadlineExceeded


async def test_a_job_past_its_deadline_is_dropped_alone(virtual_time: object, make: Make) -> None:
    model = make()
    first = model.ask([0])
    await asyncio.sleep(0.5)
    late, mate = model.ask([1], deadline=0.75), model.ask([2])
    outcomes = await asyncio.gather(first, late, mate, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [Result, DeadlineExceeded, Result]
    assert model.started[1].numbers == [2]
    assert model.is_empty()


async def test_a_job_that_cannot_make_its_deadline_is_not_run(virtual_time: object, make: Make) -> None:
    model = make()
    with pytest.raises(DeadlineExceeded):
        await model.answer([1], deadline=COST_S[1] - 0.25)
    assert not model.started
    assert numbers_of(await model.answer([2], deadline=COST_S[1])) == [2]


async def test_however_many_late_jobs_come_first_none_is_run(virtual_time: object, make: Make) -> None:
    model = make(cost_s={8: 1 / 1024})
    model.worker._cost_s = {8: 1.0}  # so late that nobody expected it
    first = model.ask([0])
    await asyncio.sleep(0.25)
    late = [model.ask([number], deadline=0.5) for number in range(1, 51)]
    mates = [model.ask([100 + number]) for number in range(8)]
    outcomes = await asyncio.gather(*late, return_exceptions=True)
    assert {type(outcome) for outcome in outcomes[8:]} == {DeadlineExceeded}  # the first 8 were gathered ahead
    await asyncio.gather(first, *mates)
    assert [batch.numbers for batch in model.started] == [[0], list(range(1, 9)), list(range(100, 108))]


async def test_the_rest_of_a_split_job_is_dropped_at_its_deadline(virtual_time: object, make: Make) -> None:
    model = make()
    with pytest.raises(DeadlineExceeded):
        await model.answer(range(40), deadline=7.0)
    assert len(model.started) < 5
    assert numbers_of(await model.answer([1])) == [1]
    assert model.is_empty()


async def test_a_cancelled_job_leaves_the_queue_at_once(virtual_time: object, make: Make) -> None:
    model = make()
    first, gone, mate = model.ask([0]), model.ask([1, 2]), model.ask([3])
    await asyncio.sleep(0.5)
    waiting = model.ask([4, 5, 6])
    await asyncio.sleep(0)
    before = model.batcher.waiting_images
    waiting.cancel()
    await asyncio.wait([waiting])
    assert model.batcher.waiting_images == before - 3
    await asyncio.gather(first, gone, mate)
    assert not any({4, 5, 6} & set(batch.numbers) for batch in model.started)
    assert model.is_empty()


async def test_a_half_run_job_leaves_the_queue_when_it_is_cancelled(virtual_time: object, make: Make) -> None:
    model = make()
    large = model.ask(range(40))
    await asyncio.sleep(0.5)
    assert model.batcher.waiting_images == 24  # 8 run and 8 were gathered ahead
    large.cancel()
    await asyncio.wait([large])
    assert model.is_empty()
    assert numbers_of(await model.answer([100])) == [100]
    assert [batch.bucket for batch in model.started] == [8, 8, 1]


async def test_mates_of_a_job_that_is_cancelled_while_it_runs_are_answered(virtual_time: object, make: Make) -> None:
    model = make()
    gone, mate = model.ask([1, 2]), model.ask([3, 4])
    await asyncio.sleep(0.5)
    gone.cancel()
    assert numbers_of(await mate) == [3, 4]
    assert gone.cancelled()
