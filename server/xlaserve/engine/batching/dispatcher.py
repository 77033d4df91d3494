"""Dispatch of batches: taken from a model's queues by the plan, handed to the worker, and their jobs settled.

The jobs of every batch settle exactly once, whatever fails between the queue and the answer.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile

from xlaserve.config import Bucket, Mode
from xlaserve.engine.batching.batch_reports import BatchReports
from xlaserve.engine.batching.lanes import Lanes
from xlaserve.engine.batching.model_queues import ModelQueues
from xlaserve.engine.batching.observed import Parts
from xlaserve.engine.batching.queue import Piece, Queue, TakenBatch, cut, fail, scatter
from xlaserve.engine.batching.worker import Batch, Run, Worker
from xlaserve.engine.buckets.demand import note
from xlaserve.engine.buckets.planner import Step
from xlaserve.engine.inputs import selected
from xlaserve.engine.program import Warmed, is_finite, run_batch
from xlaserve.engine.request import BatchRows, EngineRequest, Result
from xlaserve.engine.timings import Timings
from xlaserve.engine.trace_context import TracedBatch
from xlaserve.errors import DeadlineExceeded, ExecutionFailed, OutOfDeviceMemory


@dataclass(eq=False, kw_only=True)
class Dispatcher:
    """Runs the batches of `model` from its `queues`, each in a lane that was acquired for it. On one event loop.

    A bucket for which the device's memory did not suffice is retired with all larger ones and `on_retired` is called.
    If there are smaller ones, its batch runs again in these: `on_rerun` is called, and the next batches are its parts.
    """

    model: str
    programs: Mapping[tuple[Mode, Bucket], Warmed]
    queues: ModelQueues
    lanes: Lanes
    worker: Worker
    reports: BatchReports
    clock: Callable[[], float]
    on_retired: Callable[[Mode, list[Bucket]], object]
    on_rerun: Callable[[], object]
    is_closed: bool = field(default=False, init=False)
    """Whether `close` was called, after which no batch runs again."""
    _oversized: deque[tuple[Queue, Sequence[Piece]]] = field(default_factory=deque, init=False)
    """Parts of batches that the device's memory did not hold, which are to run again."""

    def __post_init__(self) -> None:
        self._loop = asyncio.get_running_loop()

    @property
    def has_rerun(self) -> bool:
        """Whether a part of a batch is to run again, before anything that waits."""
        return bool(self._oversized)

    def close(self) -> None:
        """Drops the parts of batches that are to run again. Batches that run already end and settle their jobs."""
        self.is_closed = True
        self._oversized.clear()

    def run_inline(self, queue: Queue, request: EngineRequest) -> Result:
        """Runs a request that fills a brief program on the event loop, in the free lane that was acquired for it.

        Its time is not observed: plans are for batches that are handed over to a thread. Raises ExecutionFailed.
        """
        mode, height, width = queue.shape
        images = request.images
        bucket = Bucket(images, height, width)
        began = self.clock()
        run: Run | BaseException
        try:
            outputs = run_batch(self.programs[mode, bucket].executable, *request.rows)
            run = Run(outputs, 0.0, 0.0, self.clock() - began, is_finite(outputs))
        except Exception as error:
            run = error
        ended = self.clock()
        queues = self.queues
        queues.charge_empty(queue, ended - began)
        note(queues.demand[height, width], images, images)
        self.lanes.release()
        traced: TracedBatch | None = None
        if request.trace is not None:
            traced = self.reports.trace_alone(request.trace, mode, bucket, images, began=began, ended=ended)
        self.reports.report(mode, bucket, images, run, traced)
        if isinstance(run, Run):
            spans = [] if traced is None else [traced]
            return Result([BatchRows(range(images), run.outputs)], Timings(execute_s=ended - began), spans)
        raise ExecutionFailed(f"model {self.model} could not run this batch") from run

    def start_batch(self) -> bool:
        """Starts the batch that the plan puts first, in an acquired lane; False where every job has gone."""
        if self._oversized:
            return self._start_rerun()
        now = self.clock()
        queue = self.queues.next(now)
        if queue is None:
            return False
        self._drop_late(queue, now)
        if not queue.images:
            return False
        step, taken = self._planned(queue, queue.images, now)
        note(self.queues.demand[taken.bucket.height, taken.bucket.width], step.share, step.images)
        taken.pieces = queue.take(step.images, now)
        self._submit(taken)
        return True

    def _start_rerun(self) -> bool:
        """Starts a part of a batch that was too large; False where every job has gone."""
        queue, left = self._oversized.popleft()
        left = [piece for piece in left if not piece.job.settled.done()]
        if not left:
            return False
        try:
            step, taken = self._planned(queue, sum(stop - start for _, start, stop in left), self.clock())
            taken.pieces, rest = cut(left, step.images)
        except Exception:  # these pieces are in no queue and in no batch: nothing else would settle their jobs
            fail((piece.job for piece in left), ExecutionFailed, f"model {self.model} could not run this batch")
            raise
        if rest:
            self._oversized.appendleft((queue, rest))
        self._submit(taken)
        return True

    def _planned(self, queue: Queue, waiting: int, now: float) -> tuple[Step, TakenBatch]:
        """Returns the step to start now with `waiting` images, and its batch, which is charged."""
        busy = self.lanes.busy
        step = queue.costs.planner.next_step(waiting, self.lanes.count - busy, busy)
        _, height, width = queue.shape
        expected_s = queue.costs.turn_s(step.bucket, busy + 1)
        taken = TakenBatch(queue, Bucket(step.bucket, height, width), now, busy + 1, expected_s, self.lanes.busy_s)
        self.queues.begin(queue, expected_s)
        self.lanes.began(expected_s, now)
        return step, taken

    def _submit(self, taken: TakenBatch) -> None:
        try:
            for job, start, _ in taken.pieces:
                if start == 0:
                    job.result.timings.queue_s = taken.at - job.arrived
            rows = [selected(job.request.rows, slice(start, stop)) for job, start, stop in taken.pieces]
            batch = Batch(self.programs[taken.mode, taken.bucket].executable, taken.bucket, rows)
            finish = partial(self._finish, taken)
            self.worker.submit(batch, partial(self._loop.call_soon_threadsafe, finish))
        except Exception as error:  # the worker was stopped, or memory is short: the jobs left their queue already
            self._finish(taken, error)

    def _drop_late(self, queue: Queue, now: float) -> None:
        """Drops the jobs that can't be answered in time, not even alone."""
        soonest = now + queue.costs.cheapest_s
        first = (takewhile(lambda job: job.rank < soonest, line.jobs) for line in queue.lines.values())
        late = [job for jobs in first for job in jobs if job.request.deadline < soonest]
        if any(job.request.deadline >= now for job in late):
            queue.costs.lower_cheapest()
        fail(late, DeadlineExceeded, f"model {self.model}: the deadline passed while the request waited")

    def _finish(self, taken: TakenBatch, run: Run | BaseException) -> None:
        """Settles the jobs of a batch, charges the seconds it took and gives its lane back. Raises nothing.

        A batch that failed stays charged with its expected seconds.
        """
        is_again = False
        traced = self.reports.trace(taken, run)
        # Jobs are settled first, so that no observer can prevent it.
        try:
            if isinstance(run, Run):
                scatter(taken.pieces, run)
                self._account(taken, run)
            elif isinstance(run, OutOfDeviceMemory) and not self.is_closed and self._has_smaller(taken):
                self._oversized.append((taken.queue, taken.pieces))
                self.on_rerun()
                is_again = True
        except Exception as error:  # outputs that are not what the model promised
            run = error
        try:
            if not is_again and not isinstance(run, Run):
                jobs = (piece.job for piece in taken.pieces)
                fail(jobs, ExecutionFailed, f"model {self.model} could not run this batch")
        finally:
            self.lanes.release()
        self.reports.report(taken.mode, taken.bucket, taken.images, run, traced)
        del run  # an error that was caught here refers to this call, which holds requests' images

    def _has_smaller(self, taken: TakenBatch) -> bool:
        """Returns whether a batch that the device's memory did not hold has smaller buckets; only those go on."""
        mode, height, width = taken.queue.shape
        if retired := taken.queue.costs.retire(taken.bucket.batch):
            self.on_retired(mode, [Bucket(batch, height, width) for batch in retired])
        return taken.queue.costs.smallest < taken.bucket.batch

    def _account(self, taken: TakenBatch, run: Run) -> None:
        """Corrects the charge of a batch that ran, and has its costs observed."""
        now = self.clock()
        turn_s = now - taken.at - run.wait_s
        self.queues.charge(taken.queue, turn_s - taken.expected_s)
        self.lanes.ended(taken.expected_s, turn_s)
        costs, batch = taken.queue.costs, taken.bucket.batch
        costs.observe(batch, taken.running, turn_s=turn_s, execute_s=run.execute_s, now=now)
        # While a batch that was gathered ahead waits, all lanes are busy.
        busy_s = self.lanes.busy_s - taken.busy_s - run.wait_s * self.lanes.count
        own_s, returned_s = run.gather_s + run.execute_s, now - run.ended
        lanes = min(max(1.0, busy_s / turn_s), self.lanes.count) if turn_s > 0 else 1.0
        costs.note(batch, Parts(max(0.0, turn_s - own_s - returned_s), own_s, returned_s, lanes))
