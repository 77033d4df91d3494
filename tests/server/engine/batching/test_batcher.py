"""Batches as they are formed from jobs, and the rows that each job gets."""

from __future__ import annotations

import asyncio
import itertools
import threading
from typing import Any

import pytest
from tests.fakes import Started
from tests.server.engine.batching.served_model import COST_S, Make, numbers_of

from xlaserve.config import Bucket, Mode
from xlaserve.engine.batching import worker as worker_module
from xlaserve.engine.batching.lanes import Lanes
from xlaserve.engine.batching.worker import Worker, gather
from xlaserve.engine.buckets.planner import Cost
from xlaserve.engine.program import Warmed


async def test_an_idle_device_starts_a_job_at_once(virtual_time: object, make: Make) -> None:
    model = make()
    await asyncio.sleep(5)
    result = await model.answer([7])
    assert numbers_of(result) == [7]
    assert model.started == [Started(5.0, Mode.XLA, 1, [7])]
    assert result.timings.queue_s == 0.0
    assert result.timings.execute_s == 1.0


async def test_jobs_that_wait_share_a_batch_and_each_gets_its_own_rows(virtual_time: object, make: Make) -> None:
    model = make()
    first = model.ask([1])
    await asyncio.sleep(0.5)
    later = [model.ask([10, 11, 12]), model.ask([20, 21]), model.ask([30, 31])]
    results = [numbers_of(result) for result in await asyncio.gather(first, *later)]
    assert results == [[1], [10, 11, 12], [20, 21], [30, 31]]
    assert model.started[1:] == [Started(1.0, Mode.XLA, 8, [10, 11, 12, 20, 21, 30, 31])]
    assert model.observer.ran == [(Mode.XLA, 1, 1), (Mode.XLA, 8, 7)]
    assert later[0].result().timings.queue_s == 0.5


async def test_every_lane_is_used(virtual_time: object, make: Make) -> None:
    model = make(lanes=Lanes(3))
    await asyncio.gather(*(model.ask([number]) for number in range(3)))
    assert [(batch.at, batch.bucket) for batch in model.started] == [(0.0, 1)] * 3


async def test_a_batch_takes_in_what_arrives_until_its_lane_is_free(virtual_time: object, make: Make) -> None:
    model = make()
    asks = [model.ask([0])]
    for number in (1, 2, 3):
        await asyncio.sleep(0.25)
        asks.append(model.ask([number]))
    await asyncio.gather(*asks)
    assert model.started[1:] == [Started(1.0, Mode.XLA, 4, [1, 2, 3])]


async def test_only_a_full_batch_leaves_the_queue_before_its_lane_is_free(virtual_time: object, make: Make) -> None:
    model = make()
    asks = [model.ask([0])]
    await asyncio.sleep(0.25)
    asks.append(model.ask(range(7)))
    await asyncio.sleep(0.25)
    assert model.batcher.waiting_images == 7
    asks.append(model.ask([7]))
    await asyncio.sleep(0.25)
    assert model.batcher.waiting_images == 0
    assert len(model.worker.staged) == 1
    await asyncio.gather(*asks)


async def test_a_batch_of_another_mode_that_is_not_full_is_not_staged(virtual_time: object, make: Make) -> None:
    model = make(modes=(Mode.XLA, Mode.GRAPH))
    asks = [model.ask([0])]
    await asyncio.sleep(0.25)
    asks.append(model.ask([1], Mode.GRAPH))
    await asyncio.sleep(0.25)
    asks.append(model.ask(range(8)))
    await asyncio.sleep(0.25)
    assert not model.worker.staged
    await asyncio.gather(*asks)
    assert [batch.mode for batch in model.started] == [Mode.XLA, Mode.GRAPH, Mode.XLA]


async def test_jobs_of_different_modes_never_share_a_batch(virtual_time: object, make: Make) -> None:
    model = make(modes=Mode)
    modes = itertools.cycle(Mode)
    asks = {number: (mode, model.ask([number], mode)) for number, mode in zip(range(30), modes, strict=False)}
    await asyncio.gather(*(ask for _, ask in asks.values()))
    for batch in model.started:
        assert {asks[number][0] for number in batch.numbers} == {batch.mode}
    assert sorted(number for batch in model.started for number in batch.numbers) == list(range(30))


async def test_a_large_job_is_split_and_its_answer_put_together_in_order(virtual_time: object, make: Make) -> None:
    for lanes in (1, 2, 3):
        model = make(lanes=Lanes(lanes))
        first, large, last = await asyncio.gather(model.ask([1000]), model.ask(range(21)), model.ask([2000]))
        assert numbers_of(large) == list(range(21))
        assert numbers_of(first) == [1000]
        assert numbers_of(last) == [2000]
        assert len(model.started) > 2


async def test_the_seconds_of_a_split_job_are_those_of_its_way(virtual_time: object, make: Make) -> None:
    model = make()
    first, large = model.ask([1000]), model.ask(range(1, 17))
    await asyncio.sleep(0)
    await asyncio.gather(first, large)
    assert large.result().timings.queue_s == sum(batch.at for batch in model.started if 1 in batch.numbers)
    assert large.result().timings.execute_s == COST_S[8]


async def test_the_next_full_batch_is_gathered_while_the_only_lane_runs(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, may_end, gathered = threading.Event(), threading.Event(), threading.Event()

    def tell(rows: Any, buffer: Any) -> None:
        gather(rows, buffer)
        gathered.set()

    def hold() -> None:
        runs.set()
        assert may_end.wait(30)

    monkeypatch.setattr(worker_module, "gather", tell)
    worker = Worker(1)
    model = make(worker=worker)
    model.executables[Mode.XLA].before = hold
    first = model.ask([0])
    assert await asyncio.to_thread(runs.wait, 30)
    halves = [model.ask(range(4)), model.ask(range(4, 8))]
    assert await asyncio.to_thread(gathered.wait, 30)
    assert not may_end.is_set()
    may_end.set()
    results = [numbers_of(result) for result in await asyncio.gather(first, *halves)]
    assert results == [[0], [0, 1, 2, 3], [4, 5, 6, 7]]
    await model.batcher.drain(30.0)
    worker.stop()


async def test_a_bucket_that_is_added_takes_what_waits_already(virtual_time: object, make: Make) -> None:
    cost_s = {1: 1.0}
    model = make(cost_s=cost_s)
    waiting = [model.ask([number]) for number in range(5)]
    await asyncio.sleep(0.5)
    cost_s[4] = 1.5
    model.batcher.add({(Mode.XLA, Bucket(4, 2, 2)): Warmed(model.executables[Mode.XLA], Cost(1.5, 1.5))})
    assert [numbers_of(await job) for job in waiting] == [[number] for number in range(5)]
    # The second was gathered while the first ran.
    assert [started.bucket for started in model.started] == [1, 1, 4]
