"""A batcher with a fake worker, for tests of what it does to requests."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from tests.fakes import Executable, FakeWorker, Observer, Started, outputs_of

from xlaserve.config import Bucket, Mode
from xlaserve.engine.batching.batcher import Batcher
from xlaserve.engine.batching.lanes import Lanes
from xlaserve.engine.buckets.planner import Cost
from xlaserve.engine.inputs import Images
from xlaserve.engine.program import Outputs, Warmed
from xlaserve.engine.request import DEFAULT_PRIORITY, EngineRequest, Result
from xlaserve.engine.trace_context import TraceContext, TracedBatch

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
        on_traced: Callable[[TracedBatch], None] | None = None,
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
            on_traced=on_traced or (self.traced.append if traces else None),
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
            return await admitted.run(EngineRequest((pixels,), mode, deadline, priority, trace))

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


def numbers_of(result: Result) -> list[int]:
    first, second = outputs_of(result)
    assert second.shape == (len(first), 1)
    assert (second[:, 0] == 2 * first).all()
    return [int(number) for number in first]


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
