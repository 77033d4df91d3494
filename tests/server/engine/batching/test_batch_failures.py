"""Batches that fail: whose jobs fail with them, and that no lane and no job is lost."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import numpy as np
import pytest
from tests.fakes import FakeWorker, lanes_are_free
from tests.server.engine.batching.served_model import NO_DEADLINE, Make, numbers_of

from xlaserve.config import Mode
from xlaserve.engine.batching import dispatcher
from xlaserve.engine.batching import queue as queue_module
from xlaserve.engine.batching.lanes import Lanes, Share
from xlaserve.engine.batching.worker import Batch
from xlaserve.engine.buckets.planner import Planner
from xlaserve.engine.inputs import Images
from xlaserve.engine.program import Outputs
from xlaserve.engine.request import EngineRequest, Result
from xlaserve.errors import ExecutionFailed, ModelNotReady


async def test_a_failing_batch_fails_its_jobs_only(virtual_time: object, make: Make) -> None:
    model = make()
    model.worker.error_of = lambda batch: ValueError("secret") if 1 in batch.numbers else None
    first = model.ask([0])
    await asyncio.sleep(0.5)
    doomed = [model.ask([1, 2]), model.ask([3])]
    await asyncio.sleep(1)
    last = model.ask([4])
    outcomes = await asyncio.gather(first, *doomed, last, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [Result, ExecutionFailed, ExecutionFailed, Result]
    assert "secret" not in str(outcomes[1])
    assert outcomes[1] is not outcomes[2]  # each is raised and traced where it is awaited
    assert model.observer.failed == [(Mode.XLA, 4, 3)]
    assert len(model.observer.ran) == 2
    assert model.is_empty()


@pytest.mark.parametrize("short", [lambda first: first[:-1], lambda first: first.astype(np.int32)])
async def test_batches_of_a_job_that_do_not_fit_together_fail_it(virtual_time: object, make: Make, short: Any) -> None:
    model = make()
    echo = model.executables[Mode.XLA]._echo

    def other_outputs(images: Images) -> Outputs:
        first, *others = echo(images)
        return (short(first) if 8 in first else first, *others)

    model.executables[Mode.XLA]._echo = other_outputs
    with pytest.raises(ExecutionFailed):
        await model.answer(range(16))
    assert numbers_of(await model.answer([2])) == [2]
    assert model.is_empty()
    assert lanes_are_free(model.lanes)


async def test_a_split_job_leaves_the_queue_when_one_of_its_batches_fails(virtual_time: object, make: Make) -> None:
    model = make()
    model.worker.error_of = lambda batch: ValueError() if 0 in batch.numbers else None
    large, small = model.ask(range(40)), model.ask([100])
    with pytest.raises(ExecutionFailed):
        await large
    assert numbers_of(await small) == [100]
    assert [len(batch.numbers) for batch in model.started] == [8, 8, 1]  # the second was gathered ahead already


async def test_outputs_that_are_not_rows_fail_the_batch(virtual_time: object, make: Make) -> None:
    model = make()
    echo = model.executables[Mode.XLA]._echo
    model.executables[Mode.XLA]._echo = lambda images: (*echo(images), np.float32(1.0))  # type: ignore[arg-type]
    with pytest.raises(ExecutionFailed):
        await model.answer([1])
    model.executables[Mode.XLA]._echo = echo
    assert numbers_of(await model.answer([2])) == [2]


@pytest.mark.parametrize("rows", [0, 3, 4, 7, 9])
async def test_a_batch_of_other_rows_answers_nobody(virtual_time: object, make: Make, rows: int) -> None:
    model = make(cost_s={1: 1.0, 8: 1.0})
    echo = model.executables[Mode.XLA]._echo

    def other(images: Images) -> Outputs:
        return tuple(np.resize(output, (rows, *output.shape[1:])) for output in echo(images))

    first = model.ask([9])
    await asyncio.sleep(0.5)
    model.executables[Mode.XLA]._echo = other
    others = [model.ask([number]) for number in range(4)]  # in one batch, whose bucket holds twice as many
    errors = await asyncio.gather(first, *others, return_exceptions=True)
    assert [(type(error), str(error)) for error in errors] == [
        (ExecutionFailed, "model model could not run this batch")
    ] * 5
    assert model.observer.failed == [(Mode.XLA, 1, 1), (Mode.XLA, 8, 4)]
    with pytest.raises(ExecutionFailed):
        await model.batcher.run_when_idle(EngineRequest((model._pictures([1, 2]),), Mode.XLA, NO_DEADLINE))
    model.executables[Mode.XLA]._echo = echo
    assert numbers_of(await model.answer([2])) == [2]
    assert lanes_are_free(model.lanes)


async def test_a_worker_that_takes_no_batch_fails_its_jobs_and_costs_no_lane(
    virtual_time: object, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make()

    def refuse(batch: Batch, done: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(model.worker, "submit", refuse)
    for images in (1, 8, 20):
        with pytest.raises(ExecutionFailed):
            await model.answer(range(images))
    monkeypatch.undo()
    assert numbers_of(await model.answer([2])) == [2]
    assert lanes_are_free(model.lanes)


@pytest.mark.parametrize("error", [MemoryError(), ValueError("no"), RuntimeError("can't start new thread")])
@pytest.mark.parametrize("where", [(dispatcher, "Batch", 1), (FakeWorker, "submit", 1), (queue_module, "Piece", 2)])
async def test_a_failure_between_queue_and_lane_settles_the_taken_jobs(
    virtual_time: object, make: Make, monkeypatch: pytest.MonkeyPatch, where: tuple[Any, str, int], error: Exception
) -> None:
    model = make()
    first = model.ask([0])
    await asyncio.sleep(0.5)
    jobs = [model.ask([1, 2]), model.ask([3]), model.ask(range(10, 30))]
    await asyncio.sleep(0)
    owner, name, number = where
    original = getattr(owner, name)
    calls = itertools.count(1)

    def fail(*args: Any) -> Any:
        if next(calls) == number:
            raise error
        return original(*args)

    with monkeypatch.context() as patched:
        patched.setattr(owner, name, fail)
        outcomes = await asyncio.gather(first, *jobs, return_exceptions=True)
    assert {type(outcome) for outcome in outcomes} <= {Result, ExecutionFailed}
    assert ExecutionFailed in {type(outcome) for outcome in outcomes}
    assert numbers_of(await model.answer([2])) == [2]
    await asyncio.sleep(100)
    assert model.is_empty()
    assert lanes_are_free(model.lanes)


@pytest.mark.timeout(20)
async def test_the_loop_outlives_a_plan_that_fails(
    virtual_time: object, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make(lanes=Lanes(2))

    def fail(self: Planner, *args: int) -> None:
        raise ZeroDivisionError

    with monkeypatch.context() as patched:
        patched.setattr(Planner, "next_step", fail)
        outcomes = await asyncio.gather(*(model.ask([number]) for number in range(3)), return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [ExecutionFailed] * 3
    assert numbers_of(await model.answer([2])) == [2]
    assert lanes_are_free(model.lanes)


async def test_a_dying_loop_says_so_and_settles_everything(
    virtual_time: object, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make()
    running = model.ask([1])
    await asyncio.sleep(0.5)
    waiting = [model.ask(range(10)), model.ask([2])]
    await asyncio.sleep(0)

    async def die(share: Share) -> None:
        raise MemoryError

    monkeypatch.setattr(model.lanes, "acquire", die)
    outcomes = await asyncio.gather(running, *waiting, return_exceptions=True)
    assert not any(isinstance(outcome, asyncio.CancelledError) for outcome in outcomes)
    assert model.crashes == 1
    with pytest.raises(ModelNotReady):
        model.batcher.admission.admit(1, 1)
    with pytest.raises(ModelNotReady):
        await model.batcher.run(EngineRequest((np.zeros((1, 2, 2, 3), np.uint8),), Mode.XLA, NO_DEADLINE))
    await model.batcher.drain(1.0)
    assert model.is_empty()
