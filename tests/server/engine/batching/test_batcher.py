from __future__ import annotations

import asyncio
import gc
import itertools
import logging
import math
import random
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from tests.fakes import Executable, FakeWorker, Observer, Started, lanes_are_free, outputs_of

from xlaserve.config import Bucket, Mode
from xlaserve.engine.batching import batcher as batcher_module
from xlaserve.engine.batching import queue as queue_module
from xlaserve.engine.batching import worker as worker_module
from xlaserve.engine.batching.batcher import IDLE_LOOK_S, Batcher
from xlaserve.engine.batching.lanes import Lanes, Share
from xlaserve.engine.batching.observed import Parts
from xlaserve.engine.batching.queue import DEFAULT_PRIORITY, WEIGHTS, Result
from xlaserve.engine.batching.traced import MAX_REQUESTS, TracedBatch
from xlaserve.engine.batching.worker import Batch, Worker, gather
from xlaserve.engine.buckets.planner import Cost, Planner
from xlaserve.engine.program import Images, Outputs, Warmed
from xlaserve.engine.trace_context import TraceContext, new
from xlaserve.errors import (
    DeadlineExceeded,
    DeadlineUnreachable,
    ExecutionFailed,
    InvalidArgument,
    ModelNotReady,
    OutOfDeviceMemory,
    QueueFull,
    ShuttingDown,
    XlaserveError,
    clear_tracebacks,
)

COST_S = {1: 1.0, 2: 1.25, 4: 2.0, 8: 3.0}
NO_DEADLINE = math.inf
SQUARE, WIDE, TALL = (2, 2), (2, 4), (4, 2)


class Model:
    """A batcher with all that it needs."""

    def __init__(
        self,
        echo: Callable[[Images], Outputs],
        pictures: Callable[[Iterable[int]], Images],
        *,
        lanes: Lanes | None = None,
        worker: Any = None,
        modes: Iterable[Mode] = (Mode.XLA,),
        sizes: Iterable[tuple[int, int]] = ((2, 2),),
        cost_s: Mapping[int, float] = COST_S,
        max_images: int = 1000,
        max_bytes: int = 1_000_000,
        max_queue_delay_s: float = 0.0,
        traces: bool = False,
    ) -> None:
        loop = asyncio.get_running_loop()
        self.lanes = lanes or Lanes(1)
        self.worker = worker or FakeWorker(loop, self.lanes.count, cost_s)
        self.observer = Observer()
        self.crashes = 0
        self.retired: list[list[int]] = []
        self.traced: list[TracedBatch] = []
        self.executables = {mode: Executable(mode, echo) for mode in modes}
        self.batcher = Batcher(
            name="model",
            programs={
                (mode, Bucket(bucket, *size)): Warmed(executable, Cost(cost, cost))
                for mode, executable in self.executables.items()
                for size in sizes
                for bucket, cost in cost_s.items()
            },
            lanes=self.lanes,
            worker=self.worker,
            observer=self.observer,
            max_images=max_images,
            max_bytes=max_bytes,
            max_queue_delay_s=max_queue_delay_s,
            clock=loop.time,
            on_crash=self._crash,
            on_traced=self.traced.append if traces else None,
            on_retired=lambda mode, buckets: self.retired.append([bucket.batch for bucket in buckets]),
        )
        self._pictures = pictures

    def _crash(self) -> None:
        self.crashes += 1

    async def answer(
        self,
        numbers: Iterable[int],
        mode: Mode = Mode.XLA,
        deadline: float = NO_DEADLINE,
        size: tuple[int, int] = (2, 2),
        priority: int = DEFAULT_PRIORITY,
        *,
        trace: TraceContext | None = None,
    ) -> Result:
        """Runs images as a request does: admits them, runs them, and leaves."""
        pixels = self._pictures(numbers)
        pixels = np.broadcast_to(pixels[:, :1, :1], (len(pixels), *size, 3))
        with self.batcher.admit(len(pixels), pixels.nbytes) as admitted:
            return await admitted.run(pixels, mode, deadline, priority, trace)

    def ask(
        self,
        numbers: Iterable[int],
        mode: Mode = Mode.XLA,
        deadline: float = NO_DEADLINE,
        size: tuple[int, int] = (2, 2),
        priority: int = DEFAULT_PRIORITY,
        *,
        trace: TraceContext | None = None,
    ) -> asyncio.Task[Result]:
        return asyncio.create_task(self.answer(numbers, mode, deadline, size, priority, trace=trace))

    @property
    def started(self) -> list[Started]:
        assert isinstance(self.worker, FakeWorker)
        return self.worker.started

    def is_empty(self) -> bool:
        batcher = self.batcher
        return not (batcher.admission.images or batcher.admission.size_bytes or batcher.waiting_images)


Make = Callable[..., Model]


@pytest.fixture
def make(echo: Callable[[Images], Outputs], pictures: Callable[[Iterable[int]], Images]) -> Make:
    """Makes a `Model`, one lane unless told otherwise."""
    models = []

    def make_model(**options: Any) -> Model:
        models.append(Model(echo, pictures, **options))
        return models[-1]

    return make_model


def numbers_of(result: Result) -> list[int]:
    first, second = outputs_of(result)
    assert second.shape == (len(first), 1)
    assert (second[:, 0] == 2 * first).all()
    return [int(number) for number in first]


# Forming batches


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


async def test_the_place_beside_the_lanes_is_not_taken_by_a_batch_of_another_mode_that_is_not_full(
    virtual_time: object, make: Make
) -> None:
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


# max_queue_delay


async def test_a_job_waits_for_company_exactly_max_queue_delay(virtual_time: object, make: Make) -> None:
    model = make(max_queue_delay_s=0.5)
    await asyncio.sleep(1)
    first = model.ask([1])
    await asyncio.sleep(0.25)
    await asyncio.gather(first, model.ask([2]))
    assert model.started == [Started(1.5, Mode.XLA, 2, [1, 2])]


async def test_a_full_batch_does_not_wait_for_company(virtual_time: object, make: Make) -> None:
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


async def test_what_was_planned_with_a_batch_does_not_wait_for_company_again(virtual_time: object, make: Make) -> None:
    model = make(lanes=Lanes(2), max_queue_delay_s=0.5)
    await asyncio.gather(*(model.ask([number]) for number in range(8)))
    assert [(batch.at, batch.bucket) for batch in model.started] == [(0.0, 4), (0.0, 4)]


async def test_the_rest_of_a_split_job_does_not_wait_for_company(virtual_time: object, make: Make) -> None:
    model = make(max_queue_delay_s=100.0)
    await model.answer(range(10))
    assert [(batch.at, batch.bucket) for batch in model.started] == [(0.0, 8), (3.0, 2)]


async def test_a_full_batch_whose_jobs_were_cancelled_waits_for_company_again(virtual_time: object, make: Make) -> None:
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


# Failures


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


async def test_what_waits_of_a_split_job_leaves_the_queue_when_one_of_its_batches_fails(
    virtual_time: object, make: Make
) -> None:
    model = make()
    model.worker.error_of = lambda batch: ValueError() if 0 in batch.numbers else None
    large, small = model.ask(range(40)), model.ask([100])
    with pytest.raises(ExecutionFailed):
        await large
    assert numbers_of(await small) == [100]
    assert [len(batch.numbers) for batch in model.started] == [8, 8, 1]  # the second was gathered ahead already


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


async def test_a_batch_that_is_too_large_in_the_smallest_bucket_fails_its_jobs_only(
    virtual_time: object, make: Make
) -> None:
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
        await model.batcher.run_when_idle(model._pictures([1, 2]), Mode.XLA, NO_DEADLINE)
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
@pytest.mark.parametrize("where", [(batcher_module, "Batch", 1), (FakeWorker, "submit", 1), (queue_module, "Piece", 2)])
async def test_whatever_fails_between_the_queue_and_a_lane_settles_the_jobs_that_were_taken(
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


async def test_an_observer_that_raises_keeps_no_job_from_its_answer(
    virtual_time: object, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    model = make()
    model.observer.ran = None  # type: ignore[assignment]
    assert numbers_of(await model.answer([1])) == [1]
    assert numbers_of(await model.answer([2])) == [2]
    assert caplog.text.count("could not be observed") == 2
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
        await model.batcher.run(np.zeros((1, 2, 2, 3), np.uint8), Mode.XLA, NO_DEADLINE)
    await model.batcher.drain(1.0)
    assert model.is_empty()


async def test_nothing_is_kept_of_a_request_once_it_is_settled(virtual_time: object, make: Make) -> None:
    model = make()
    model.worker.error_of = lambda batch: ValueError() if 1 in batch.numbers else None
    kept = []
    for images in ([0], [1], range(10, 30)):
        pixels = model._pictures(images)
        kept.append(weakref.ref(pixels))
        with suppress(ExecutionFailed):
            await model.batcher.run(pixels, Mode.XLA, NO_DEADLINE)
    del pixels
    gc.collect()
    assert [reference() is None for reference in kept] == [True] * 3


async def test_outputs_other_than_promised_keep_no_images_until_garbage_is_collected(
    virtual_time: object, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make()
    monkeypatch.setattr(model.executables[Mode.XLA], "_echo", lambda images: (np.zeros(len(images) - 4),))
    monkeypatch.setattr(batcher_module.log, "disabled", True)  # what captures logs keeps errors
    pixels = model._pictures(range(4))
    kept = weakref.ref(pixels)
    gc.disable()
    try:
        ask = asyncio.create_task(model.batcher.run(pixels, Mode.XLA, NO_DEADLINE))
        del pixels
        await asyncio.wait([ask])
        error = ask.exception()
        assert isinstance(error, ExecutionFailed)
        clear_tracebacks(error)
        del ask, error
        assert kept() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("seconds", [0.5, 3.5, 5.5, 7.5])
async def test_drain_keeps_nothing_of_what_memory_did_not_hold_and_was_to_run_again(
    virtual_time: object, make: Make, seconds: float
) -> None:
    model = make()
    model.worker.error_of = short_of_memory(1)
    pixels = model._pictures(range(16))
    kept = weakref.ref(pixels)
    ask = asyncio.create_task(model.batcher.run(pixels, Mode.XLA, NO_DEADLINE))
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


# Deadlines and cancellations


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


async def test_what_waits_of_a_half_run_job_leaves_the_queue_when_it_is_cancelled(
    virtual_time: object, make: Make
) -> None:
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


# Bounds


async def test_too_many_images_are_refused_at_once(virtual_time: object, make: Make) -> None:
    model = make(max_images=10)
    first = model.ask(range(9))
    await asyncio.sleep(0)
    with pytest.raises(QueueFull, match="max_queue_images 10; 9 are in flight"):
        await model.answer([1, 2])
    await asyncio.gather(first, model.ask([1]))
    assert model.is_empty()


async def test_too_many_bytes_are_refused_at_once(virtual_time: object, make: Make) -> None:
    model = make(max_bytes=24)
    first = model.ask([1])
    await asyncio.sleep(0)
    with pytest.raises(QueueFull, match="max_queue_bytes 24; 12 are in flight"):
        await model.answer([1, 2])
    await asyncio.gather(first, model.ask([1]))
    assert model.is_empty()


async def test_what_finds_no_room_is_told_when_there_should_be_some(virtual_time: object, make: Make) -> None:
    model = make(max_images=33, max_bytes=800)
    asks = [model.ask(range(8)) for _ in range(4)]
    await asyncio.sleep(0.5)
    # Of 32 images 8 run, 8 were gathered ahead and 16 wait: 11.5 s.
    for images, retry_s in ((2, 11.5 / 32), (17, 11.5 / 2)):
        with pytest.raises(QueueFull) as refused:
            model.batcher.admission.admit(images, 12)
        assert refused.value.retry_after_s == pytest.approx(retry_s, rel=0.05)
    with pytest.raises(QueueFull) as refused:
        model.batcher.admission.admit(1, 608)
    assert refused.value.retry_after_s == pytest.approx(11.5 / 2, rel=0.05)
    await asyncio.gather(*asks)


async def test_what_can_never_fit_is_an_invalid_argument(virtual_time: object, make: Make) -> None:
    model = make(max_images=10, max_bytes=60)
    with pytest.raises(InvalidArgument, match=r"images: expected at most 10 in a request \(max_queue_images\), got 11"):
        model.batcher.admission.admit(11, 12)
    expected = r"images: expected at most 60 bytes in a request \(max_queue_bytes\), got 61 bytes"
    with pytest.raises(InvalidArgument, match=expected):
        model.batcher.admission.admit(1, 61)
    assert model.is_empty()
    model.batcher.admission.admit(10, 60)
    model.batcher.admission.leave(10, 60)


async def test_images_that_run_count_until_their_request_has_left(virtual_time: object, make: Make) -> None:
    model = make(max_images=1)
    first = model.ask([1])
    await asyncio.sleep(0.5)
    assert model.batcher.waiting_images == 0
    with pytest.raises(QueueFull):
        await model.answer([2])
    await first
    await model.answer([2])


# Drain


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
    result = await model.batcher.run(np.zeros((1, 2, 2, 3), np.uint8), Mode.XLA, NO_DEADLINE)
    assert numbers_of(result) == [0]
    assert not drained.done()
    model.batcher.admission.leave(1, 12)
    await drained


async def test_drain_does_not_wait_for_company(virtual_time: Any, make: Make) -> None:
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


async def test_an_idle_device_runs_a_batch_that_no_request_waits_for_and_nothing_counts_it(
    virtual_time: object, make: Make, pictures: Callable[[Iterable[int]], Images]
) -> None:
    model = make()
    result = await model.batcher.run_when_idle(pictures([5, 6, 7]), Mode.XLA, deadline=0.0)
    assert numbers_of(result) == [5, 6, 7]
    assert (result.timings.queue_s, result.timings.execute_s) == (0.0, 2.0)
    assert [(batch.bucket, batch.numbers) for batch in model.started] == [(4, [5, 6, 7])]
    assert not model.observer.ran
    assert not model.batcher.demand
    assert lanes_are_free(model.lanes)


async def test_what_no_request_waits_for_waits_for_an_idle_device_until_its_deadline(
    virtual_time: object, make: Make, pictures: Callable[[Iterable[int]], Images]
) -> None:
    busy = make(lanes=Lanes(2))
    quiet = make(lanes=busy.lanes, worker=busy.worker)
    asked = busy.ask([1])
    await asyncio.sleep(0.25)
    with pytest.raises(DeadlineExceeded, match="the device was not idle"):
        await quiet.batcher.run_when_idle(pictures([2]), Mode.XLA, deadline=0.75)
    await quiet.batcher.run_when_idle(pictures([2]), Mode.XLA, deadline=2.0)
    await asked
    assert [batch.at for batch in quiet.started] == [0.0, pytest.approx(1.0, abs=2 * IDLE_LOOK_S)]


async def test_images_that_wait_for_others_go_before_what_no_request_waits_for(
    virtual_time: object, make: Make, pictures: Callable[[Iterable[int]], Images]
) -> None:
    model = make(max_queue_delay_s=4.0)
    asked = model.ask([1])
    await asyncio.sleep(0)
    with pytest.raises(DeadlineExceeded):
        await model.batcher.run_when_idle(pictures([2]), Mode.XLA, deadline=3.0)
    await asked


async def test_a_request_waits_for_the_batch_under_way_that_no_request_waits_for(
    virtual_time: Any, make: Make, pictures: Callable[[Iterable[int]], Images]
) -> None:
    model = make()
    idle = asyncio.create_task(model.batcher.run_when_idle(pictures([9]), Mode.XLA, deadline=0.0))
    await asyncio.sleep(0.25)
    await model.ask([1])
    assert [batch.at for batch in model.started] == [0.0, 1.0]
    assert numbers_of(await idle) == [9]


async def test_drain_waits_for_a_batch_that_no_request_waits_for(
    virtual_time: Any, make: Make, pictures: Callable[[Iterable[int]], Images]
) -> None:
    model = make()
    idle = asyncio.create_task(model.batcher.run_when_idle(pictures([9]), Mode.XLA, deadline=0.0))
    waits = asyncio.create_task(model.batcher.run_when_idle(pictures([9]), Mode.XLA, deadline=10.0))
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
        await model.batcher.run_when_idle(pictures([1]), Mode.XLA, deadline=0.0)
    assert lanes_are_free(model.lanes)
    await model.batcher.drain(1.0)


async def test_after_drain_nothing_can_be_run(virtual_time: object, make: Make) -> None:
    model = make()
    await model.batcher.drain(0.0)
    await model.batcher.drain(0.0)
    with pytest.raises(ModelNotReady):
        model.batcher.admission.admit(1, 1)
    with pytest.raises(ModelNotReady):
        await model.batcher.run(np.zeros((1, 2, 2, 3), np.uint8), Mode.XLA, NO_DEADLINE)
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


# Several models on one device


async def test_a_busy_model_does_not_starve_a_quiet_one(virtual_time: object, make: Make) -> None:
    busy = make()
    quiet = make(lanes=busy.lanes, worker=busy.worker)

    async def flood() -> None:
        while True:
            await busy.answer(range(8))

    floods = [asyncio.create_task(flood()) for _ in range(5)]
    for _ in range(20):
        await asyncio.sleep(7.25)
        assert (await quiet.answer([1])).timings.queue_s <= 2 * COST_S[8]
    for task in floods:
        task.cancel()
    await asyncio.wait(floods)


@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("recorded", [0.5, 2.0, 10.0])
async def test_equal_batches_get_equal_turns_whatever_warm_up_recorded(
    virtual_time: object, make: Make, lanes: int, recorded: float
) -> None:
    one = make(lanes=Lanes(lanes))
    wrong_s = {bucket: seconds * recorded for bucket, seconds in COST_S.items()}
    other = make(lanes=one.lanes, worker=one.worker, cost_s=wrong_s)
    await flood([(one, SQUARE), (other, SQUARE)], 400.0)
    turns = [len(model.observer.ran) for model in (one, other)]
    assert sum(turns) >= lanes * 400.0 / COST_S[8] * 0.9
    assert turns[0] == pytest.approx(turns[1], rel=0.1)


async def test_resolutions_whose_batches_take_the_same_get_equal_turns_whatever_warm_up_recorded(
    virtual_time: object, make: Make
) -> None:
    model = make(sizes=(SQUARE,), max_images=10_000)
    wide = {
        (Mode.XLA, Bucket(bucket, *WIDE)): Warmed(model.executables[Mode.XLA], Cost(seconds * 2, seconds * 2))
        for bucket, seconds in COST_S.items()
    }
    model.batcher.add(wide)
    answered = await flood([(model, SQUARE), (model, WIDE)], 400.0)
    assert answered[0] == pytest.approx(answered[1], rel=0.1)
    assert sum(answered) >= 400.0 / COST_S[8] * 0.9


async def flood(to: list[tuple[Model, tuple[int, int]]], seconds: float) -> list[int]:
    """Keeps five full batches of each asked for, and returns how many were answered."""
    answered = [0] * len(to)

    async def ask(number: int, model: Model, size: tuple[int, int]) -> None:
        while True:
            await model.answer(range(8), size=size)
            answered[number] += 1

    tasks = [asyncio.create_task(ask(number, *each)) for number, each in enumerate(to) for _ in range(5)]
    await asyncio.sleep(seconds)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    return answered


async def test_a_bucket_that_turns_out_slow_in_traffic_gives_way(virtual_time: object, make: Make) -> None:
    cost_s = dict(COST_S)
    model = make(cost_s=cost_s)
    cost_s[8] = 9.0
    for _ in range(30):
        await model.answer(range(8))
    assert model.started[0].bucket == 8
    assert model.started[-1].bucket == 4


async def test_time_that_a_batch_waits_for_a_lane_is_not_charged(virtual_time: object, make: Make) -> None:
    model = make()
    await flood([(model, SQUARE)], 100.0)
    costs = model.batcher._queues[Mode.XLA, *SQUARE].costs
    assert costs.turn_s(8, 1) == pytest.approx(COST_S[8], rel=0.01)


async def test_requests_that_were_refused_for_a_time_that_was_measured_wrongly_are_tried_again(
    virtual_time: object, make: Make
) -> None:
    model = make(cost_s={1: 1.0})
    model.worker._cost_s = {1: 0.25}
    loop = asyncio.get_running_loop()
    outcomes: list[object] = []
    for _ in range(30):
        asked = model.answer([1], deadline=loop.time() + 0.5)
        outcomes += await asyncio.gather(asked, return_exceptions=True)
    refused = [isinstance(outcome, DeadlineExceeded) for outcome in outcomes]
    assert refused == sorted(refused, reverse=True)
    assert 0 < sum(refused) < 20


# Several resolutions of one model


async def test_images_of_different_resolutions_never_share_a_batch(virtual_time: object, make: Make) -> None:
    model = make(sizes=(SQUARE, WIDE))
    sizes = [(SQUARE, WIDE)[number % 2] for number in range(30)]
    asks = [model.ask([number], size=size) for number, size in enumerate(sizes)]
    assert [numbers_of(result) for result in await asyncio.gather(*asks)] == [[number] for number in range(30)]
    assert all(len({number % 2 for number in batch.numbers}) == 1 for batch in model.started)


@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("floods", [(SQUARE,), (SQUARE, TALL)])
async def test_a_flood_in_one_resolution_holds_up_an_image_of_another_by_a_stated_time_only(
    virtual_time: object, make: Make, lanes: int, floods: tuple[tuple[int, int], ...]
) -> None:
    model = make(lanes=Lanes(lanes), sizes=(SQUARE, WIDE, TALL), max_images=10_000)

    async def flood(size: tuple[int, int]) -> None:
        while True:
            await model.answer(range(8), size=size)

    tasks = [asyncio.create_task(flood(size)) for size in floods for _ in range(200)]
    # What runs, what is gathered ahead, and a batch of each other resolution.
    bound_s = COST_S[8] * (2 + len(floods))
    for pause in (0.25, 7.25, 1.0, 3.5) * 5:
        await asyncio.sleep(pause)
        assert model.batcher.waiting_images >= 100 * 8
        assert (await model.answer([1], size=WIDE)).timings.queue_s <= bound_s
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


async def test_a_resolution_that_was_quiet_is_served_next_but_saves_up_no_credit(
    virtual_time: object, make: Make
) -> None:
    model = make(sizes=(SQUARE, WIDE))
    await model.answer(range(8), size=WIDE)
    for _ in range(20):
        await model.answer(range(8))
    asks = [model.answer([number] * 8, size=size) for number, size in enumerate([SQUARE] * 10 + [WIDE] * 10)]
    await asyncio.gather(*asks)
    in_turn = [number for pair in zip(range(10, 20), range(10), strict=True) for number in pair]
    assert [batch.numbers[0] for batch in model.started[21:]] == in_turn


# Demand


async def test_demand_is_what_waited_for_the_lane_and_counts_each_image_once(virtual_time: object, make: Make) -> None:
    model = make()
    first = model.ask([0])
    await asyncio.sleep(0.5)
    await asyncio.gather(first, model.ask(range(11)))
    # 8 of 11 left first, and then the other 3.
    assert model.batcher.demand == {(2, 2): {1: 1, 11: 8, 3: 3}}


async def test_demand_that_several_free_lanes_share_is_one_lanes_part(virtual_time: object, make: Make) -> None:
    model = make(lanes=Lanes(2), sizes=(SQUARE, WIDE))
    await asyncio.gather(*(model.ask([number]) for number in range(8)))
    await model.answer([1], size=WIDE)
    assert model.batcher.demand == {SQUARE: {4: 8}, WIDE: {1: 1}}


# With threads


async def test_the_next_full_batch_is_gathered_while_the_only_lane_runs(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, may_end, gathered = threading.Event(), threading.Event(), threading.Event()

    def tell(rows: Any, buffer: Images) -> None:
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


# Everything at once


class Chaos:
    """A scenario drawn from a seed: models on a device, and whether things fail, are cancelled, expire or drain."""

    def __init__(self, make: Make, seed: int) -> None:
        self.chance = random.Random(seed)
        self.fails, self.drains, self.cancels, self.expires = (self.chance.random() < 0.5 for _ in range(4))
        self.delay_s = self.chance.choice([0.0, 0.0, 0.5, 2.0])
        self.priorities = [DEFAULT_PRIORITY] if seed % 2 else list(WEIGHTS)
        self.modes = list(Mode)[: self.chance.randint(1, 3)]
        self.limits = {
            "max_images": self.chance.choice([30, 100_000]),
            "max_bytes": self.chance.choice([500, 10_000_000]),
        }
        self.lanes = Lanes(self.chance.randint(1, 4))
        self.worker = FakeWorker(asyncio.get_running_loop(), self.lanes.count, COST_S)
        self.failed: set[int] = set()
        self.too_large: Counter[int] = Counter()
        if self.fails:
            self.worker.error_of = self.fail_some
        self.sizes = [SQUARE, WIDE, TALL][: self.chance.randint(1, 3)]
        options = {"lanes": self.lanes, "worker": self.worker, "modes": self.modes, "max_queue_delay_s": self.delay_s}
        options["sizes"] = self.sizes
        self.models = [make(**options, **self.limits) for _ in range(self.chance.randint(1, 3))]
        self.expected: dict[asyncio.Task[Result], list[int]] = {}
        self.cancelled: set[asyncio.Task[Result]] = set()

    def fail_some(self, batch: Started) -> BaseException | None:
        chance = self.chance.random()
        if chance >= 0.2:
            return None
        if chance < 0.05 and batch.bucket > min(COST_S):
            self.too_large.update(batch.numbers)
            return OutOfDeviceMemory("too large")
        self.failed.update(batch.numbers)
        return OSError("no luck")

    def cancel(self, ask: asyncio.Task[Result]) -> None:
        self.cancelled.add(ask)
        ask.cancel()

    def seconds(self, most: float) -> float:
        """Returns a duration whose end virtual time meets exactly."""
        return self.chance.randrange(int(most * 1024)) / 1024

    async def arrive(self) -> None:
        loop = asyncio.get_running_loop()
        numbers = itertools.count(1)
        for _ in range(self.chance.randint(1, 120)):
            await asyncio.sleep(self.chance.choice([0.0, 0.0, self.seconds(2.0)]))
            images = list(itertools.islice(numbers, self.chance.choice([1, 1, 2, 3, 8, self.chance.randint(1, 30)])))
            deadline = loop.time() + self.seconds(20.0) if self.expires else NO_DEADLINE
            size = self.chance.choice(self.sizes)
            model, mode = self.chance.choice(self.models), self.chance.choice(self.modes)
            priority = self.priorities[images[0] % len(self.priorities)]
            ask = model.ask(images, mode, deadline, size, priority)
            self.expected[ask] = images
            if self.cancels and self.chance.random() < 0.3:
                loop.call_later(self.seconds(10.0), self.cancel, ask)

    async def drain(self) -> None:
        await asyncio.gather(*(model.batcher.drain(self.seconds(20.0)) for model in self.models))

    def check_while_it_runs(self) -> None:
        """What holds whenever everything that could happen has happened."""
        assert len(self.worker.staged) <= 1
        busy = self.worker.running == self.lanes.count
        assert busy or not self.worker.staged
        assert busy or self.delay_s or not any(model.batcher.waiting_images for model in self.models)
        for model in self.models:
            assert 0 <= model.batcher.waiting_images <= model.batcher.admission.images <= self.limits["max_images"]
            assert 0 <= model.batcher.admission.size_bytes <= self.limits["max_bytes"]

    def check_outcomes(self) -> None:
        answered = 0
        is_tight = self.limits["max_images"] == 30 or self.limits["max_bytes"] == 500
        for ask, images in self.expected.items():
            allowed: set[type[BaseException]] = {QueueFull} if is_tight else set()
            most_bytes = len(images) * math.prod(TALL) * 3
            never_fits = len(images) > self.limits["max_images"] or most_bytes > self.limits["max_bytes"]
            allowed |= {InvalidArgument} if never_fits else set()
            allowed |= {ExecutionFailed} if self.failed.intersection(images) else set()
            allowed |= {ShuttingDown, ModelNotReady} if self.drains else set()
            allowed |= {asyncio.CancelledError} if ask in self.cancelled else set()
            allowed |= {DeadlineExceeded, DeadlineUnreachable} if self.expires else set()
            try:
                assert numbers_of(ask.result()) == images
                answered += 1
            except (XlaserveError, asyncio.CancelledError) as error:
                assert type(error) in allowed
        assert answered, "a batcher that refuses everything would pass"

    def check_what_is_left(self) -> None:
        ran = Counter(number for batch in self.worker.started for number in batch.numbers)
        assert max((ran - self.too_large).values()) == 1, "an image ran twice"
        assert all(model.is_empty() and not model.crashes for model in self.models)
        assert not self.worker.running
        assert lanes_are_free(self.lanes)


@pytest.mark.parametrize("seed", range(100))
async def test_every_job_settles_once_whatever_happens(
    virtual_time: Any, make: Make, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, logger="xlaserve.engine.batching.batcher")
    chaos = Chaos(make, seed)
    virtual_time.when_quiet.append(chaos.check_while_it_runs)
    arriving = asyncio.create_task(chaos.arrive())
    if chaos.drains:
        await asyncio.sleep(chaos.seconds(60.0))
    else:
        await arriving
        await asyncio.wait(chaos.expected)
    await chaos.drain()
    await arriving
    await asyncio.wait(chaos.expected)
    chaos.check_outcomes()
    await asyncio.sleep(100)  # all that is still on the device ends
    chaos.check_what_is_left()


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
    model = make(traces=True, cost_s={1: 1.0, 2 * MAX_REQUESTS: 1.5})
    running = model.ask([0])
    await asyncio.sleep(0)
    await asyncio.gather(running, *(model.ask([1], trace=new()) for _ in range(2 * MAX_REQUESTS)))
    assert [len(batch.requests) for batch in model.traced] == [MAX_REQUESTS]


async def test_a_tracer_that_raises_keeps_no_job_from_its_answer(
    virtual_time: object, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    model = make(traces=True)
    model.batcher.on_traced = lambda batch: 1 / 0  # type: ignore[assignment]
    assert numbers_of(await model.answer([1], trace=new())) == [1]
    assert "could not be traced" in caplog.text
    assert lanes_are_free(model.lanes)


async def test_what_batches_take_is_remembered_with_the_lanes_that_were_busy_meanwhile(
    virtual_time: object, echo: Callable[[Images], Outputs], pictures: Callable[[Iterable[int]], Images]
) -> None:
    model = Model(echo, pictures, lanes=Lanes(2, clock=asyncio.get_running_loop().time), cost_s={1: 0.5})
    remembered: list[Parts] = []
    for queue in model.batcher._queues.values():
        queue.costs.note = lambda bucket, parts: remembered.append(parts)  # type: ignore[method-assign]
    alone = model.ask([1])
    await asyncio.sleep(0.25)
    beside = model.ask([2])
    await asyncio.gather(alone, beside)
    await asyncio.gather(*(model.ask([number]) for number in range(4)))  # one is gathered ahead meanwhile
    assert [parts.lanes for parts in remembered] == pytest.approx([1.5, 1.5, 2, 2, 2, 2])
    assert [parts.own_s for parts in remembered] == pytest.approx([0.5] * 6)
    assert [parts.started_s + parts.returned_s for parts in remembered] == pytest.approx([0.0] * 6)
