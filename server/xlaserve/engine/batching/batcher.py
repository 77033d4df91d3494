"""A model's queue: gathers waiting images into padded batches and gives each job its rows back.

One asyncio task owns the queue; nothing here is locked. Every job settles exactly once: with its outputs, an error, its
deadline, or its own cancellation.

Only images of one mode and resolution share a batch, so a model has a queue for each. They share its turns as models
share the device, by start-time fair queueing (see `lanes`): each batch advances its queue's virtual time by what it
takes, and the queue with the least is next. So a flood in one resolution holds up an image of another, whose queue was
empty, only by the batches that were in flight (one on each lane and the one that is gathered ahead), and by one batch
of each resolution more.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import InitVar, dataclass, replace
from functools import partial
from itertools import takewhile
from typing import Final, Protocol, Self

import numpy as np

from xlaserve.config import Bucket, Mode
from xlaserve.engine.batching.costs import Costs, Turn
from xlaserve.engine.batching.forecast import Forecast
from xlaserve.engine.batching.image_admission import ImageAdmission
from xlaserve.engine.batching.lanes import Lanes, Share
from xlaserve.engine.batching.live import Live
from xlaserve.engine.batching.observed import Parts
from xlaserve.engine.batching.queue import (
    DEFAULT_PRIORITY,
    BatchRows,
    Job,
    Piece,
    Queue,
    Result,
    Shape,
    TakenBatch,
    cut,
    fail,
    scatter,
)
from xlaserve.engine.batching.spare import IdleRuns
from xlaserve.engine.batching.traced import MAX_REQUESTS, TracedBatch
from xlaserve.engine.batching.unmatched import Opener, refusal
from xlaserve.engine.batching.worker import Batch, Run, Worker
from xlaserve.engine.buckets.demand import Demand, Resolution, note
from xlaserve.engine.buckets.planner import Cost, Step
from xlaserve.engine.program import Executable, Images, Warmed, WrongRowsError, is_finite, run_batch
from xlaserve.engine.timings import Timings
from xlaserve.engine.trace_context import TraceContext, new
from xlaserve.errors import (
    DeadlineExceeded,
    ExecutionFailed,
    InvalidArgument,
    ModelNotReady,
    OutOfDeviceMemory,
    ShuttingDown,
)

log = logging.getLogger(__name__)

MIN_TIMER_S: Final = 0.001
"""uvloop rounds timers to milliseconds; one that is rounded to zero would fire at once, again and again."""
IDLE_LOOK_S: Final = 0.01
"""How often a batch that no request waits for looks for an idle device."""


class Observer(Protocol):
    """Called after every batch."""

    def batch_ran(self, mode: Mode, bucket: Bucket, images: int, run: Run) -> None:
        """A batch of `images` real images ran in `bucket`."""

    def batch_failed(self, mode: Mode, bucket: Bucket, images: int) -> None:
        """A batch raised."""


@dataclass(eq=False, kw_only=True)
class Batcher:
    """Serves one model's `programs` on the device's `lanes`.

    `max_images` and `max_bytes` bound its `admission`. `on_crash` is called if the batch loop dies, which is a defect:
    the process should end. A bucket for which the device's memory did not suffice is retired with all larger ones,
    `on_retired` is called, and its batch runs in smaller ones, if there are any. `on_traced`, where there is one, is
    called with each batch that requests are in which are traced.
    """

    name: str
    programs: InitVar[Mapping[tuple[Mode, Bucket], Warmed]]
    lanes: Lanes
    worker: Worker
    observer: Observer
    max_images: InitVar[int]
    max_bytes: InitVar[int]
    max_queue_delay_s: float = 0.0
    clock: Callable[[], float] = time.perf_counter
    noted: Callable[[Executable], Executable] = lambda executable: executable
    """Makes of an executable what is run in its place."""
    on_crash: Callable[[], None] = lambda: None
    on_retired: Callable[[Mode, list[Bucket]], object] = lambda mode, buckets: None
    on_traced: Callable[[TracedBatch], None] | None = None

    def __post_init__(self, programs: Mapping[tuple[Mode, Bucket], Warmed], max_images: int, max_bytes: int) -> None:
        self.opener: Opener | None = None
        """What takes resolutions without buckets, if anything does."""
        self.demand: defaultdict[tuple[int, int], Demand] = defaultdict(Demand)
        """The demand by height and width, of all modes together."""
        self._programs: dict[tuple[Mode, Bucket], Warmed] = {}
        self._queues: dict[Shape, Queue] = {}
        self._reserved: set[Bucket] = set()
        self._too_large: deque[tuple[Queue, Sequence[Piece]]] = deque()
        self._share = Share(self._is_next_full)
        self.forecast = Forecast(self.name, self._queues, self.lanes, self._share, self.clock, self.max_queue_delay_s)
        self._virtual_s = 0.0
        self._idle_runs = IdleRuns(self.lanes, self.worker)
        self._unsettled: set[Job] = set()
        self._changed = asyncio.Event()
        self._has_ended = False
        self.admission = ImageAdmission(self.name, max_images, max_bytes, self.forecast.drain_s)
        self.add(programs)
        self._loop = asyncio.get_running_loop()
        self._task = self._loop.create_task(self._serve(), name=f"batcher {self.name}")
        self._task.add_done_callback(self._crashed)

    def add(self, programs: Mapping[tuple[Mode, Bucket], Warmed]) -> None:
        """Serves `programs` as well: more buckets, modes and resolutions. What waits is planned again."""
        buckets = {bucket for _, bucket in programs} - self._reserved
        self.worker.reserve(buckets)
        self._reserved |= buckets
        noted = {key: replace(one, executable=self.noted(one.executable)) for key, one in programs.items()}
        self._programs.update(noted)
        for shape, costs in _costs_by_shape(programs).items():
            if shape in self._queues:
                self._queues[shape].costs.add(costs)
            else:
                self._queues[shape] = Queue(shape, Costs(costs, self.lanes.count))

    def shapes(self) -> dict[Shape, int]:
        """Returns what has buckets, each with its largest."""
        return {shape: queue.costs.largest for shape, queue in self._queues.items()}

    def turns(self) -> Iterator[tuple[Mode, Bucket, Turn]]:
        """Yields the buckets that serve, and what a batch of each takes from the queue to its answers."""
        for (mode, height, width), queue in self._queues.items():
            for batch, turn in queue.costs.turns().items():
                yield mode, Bucket(batch, height, width), turn

    def live(self) -> Live:
        """Returns what it has to do now."""
        admission = self.admission
        return Live(
            self.waiting_images,
            self.outstanding_s(),
            self.forecast.work_s(),
            admission.images,
            admission.max_images,
            tuple(self.turns()),
            dict(self.demand),
        )

    @property
    def waiting_images(self) -> int:
        """Images in the queues."""
        return sum(queue.images for queue in self._queues.values())

    @property
    def waiting_requests(self) -> int:
        """Requests of which images are in the queues."""
        return sum(len(line.jobs) for queue in self._queues.values() for line in queue.lines.values())

    def admit(self, images: int, size_bytes: int, unmatched: Resolution | None = None) -> AdmittedRequest:
        """Does as `ModelEngine.admit`."""
        if unmatched is not None:
            self._opener(unmatched).unmatched.check(unmatched)
        self.admission.admit(images, size_bytes)
        return AdmittedRequest(self, images, size_bytes)

    async def open(self, resolution: Resolution, mode: Mode) -> Mode:
        """Does as `Ticket.open`."""
        return await self._opener(resolution).open(resolution, mode)

    def _opener(self, resolution: Resolution) -> Opener:
        if self.opener is None:
            raise refusal(resolution, "a size that has buckets")
        return self.opener

    def check_encoded(
        self, images: int, deadline: float, priority: int, *, shapes: Iterable[Shape], decode_s: float, decoding: int
    ) -> None:
        """Does as `Forecast.check_encoded`."""
        self.forecast.check_encoded(images, deadline, priority, shapes=shapes, decode_s=decode_s, decoding=decoding)

    def outstanding_s(self) -> float:
        """Returns the seconds in which all that waits and runs should be answered."""
        return self.forecast.drain_s()

    async def run(
        self,
        pixels: Images,
        mode: Mode,
        deadline: float,
        priority: int = DEFAULT_PRIORITY,
        trace: TraceContext | None = None,
    ) -> Result:
        """Runs `pixels` `[n, height, width, 3]`, n >= 1, in a `mode` that has buckets of that size.

        `deadline` is in seconds of the clock; `trace` is the request's span, where it is recorded. Raises
        DeadlineUnreachable, DeadlineExceeded, ExecutionFailed or ShuttingDown. A cancelled call takes its images out of
        the queue.
        """
        if self._has_ended:
            raise ModelNotReady(f"model {self.name} was unloaded")
        queue = self._queues[mode, pixels.shape[1], pixels.shape[2]]
        is_brief = len(pixels) in queue.costs.brief and not queue.images and not self.max_queue_delay_s
        if is_brief and self.lanes.try_acquire(self._share):
            return self._run_here(queue, pixels, trace)
        job = Job(queue, pixels, deadline, self.clock(), self._loop.create_future(), priority, trace)
        self.forecast.check(job)
        self._unsettled.add(job)
        if not queue.images:
            queue.virtual_s = max(queue.virtual_s, self._virtual_s)  # served next; idle time earns no credit
        queue.append(job)
        try:
            self._changed.set()
            self.lanes.grant()
            return await job.settled
        finally:
            queue.remove(job)
            self._unsettled.remove(job)
            if job.expected_s is not None:
                self.forecast.learn(job)

    def largest(self, mode: Mode, height: int, width: int) -> int:
        """Returns the largest bucket for images of this mode and resolution; 0 where there is none."""
        queue = self._queues.get((mode, height, width))
        return queue.costs.largest if queue else 0

    async def run_when_idle(self, pixels: Images, mode: Mode, deadline: float) -> Result:
        """Does as `ModelEngine.run_when_idle`. Nothing that waits here keeps the model from being drained."""
        images, height, width, _ = pixels.shape
        while True:
            if self.admission.is_closed:
                raise ModelNotReady(f"model {self.name} is draining")
            if images > (largest := self.largest(mode, height, width)):
                raise InvalidArgument("pixels", f"at most {largest} images of this size in a batch", images)
            if not self.waiting_images:
                bucket = Bucket(self._queues[mode, height, width].costs.fitting(images), height, width)
                batch = Batch(self._programs[mode, bucket].executable, bucket, [pixels])
                try:
                    run = await self._idle_runs.run(batch)
                except Exception as error:
                    raise ExecutionFailed(f"model {self.name} could not run this batch") from error
                if run is not None:
                    outputs = tuple(output[:images] for output in run.outputs)
                    timings = Timings(gather_s=run.gather_s, execute_s=run.execute_s)
                    return Result([BatchRows(range(images), outputs)], timings)
            if self.clock() >= deadline:
                raise DeadlineExceeded(f"model {self.name}: the device was not idle")
            await asyncio.sleep(IDLE_LOOK_S)

    async def drain(self, timeout_s: float) -> None:
        """Admits nothing more, lets what was admitted finish for at most `timeout_s`, fails the rest, and ends."""
        self.admission.is_closed = True
        self.max_queue_delay_s = 0.0  # no more images will come
        self._changed.set()
        try:
            async with asyncio.timeout(timeout_s):
                await self.admission.emptied()
                await self._idle_runs.drain()
        except TimeoutError:
            if images := self.admission.images:
                log.warning("model %s: %d images did not finish in %g s", self.name, images, timeout_s)
            fail(self._unsettled, ShuttingDown, f"model {self.name} was unloaded before this could run")
        self._has_ended = True
        self._task.cancel()
        await asyncio.wait([self._task])
        self._too_large.clear()  # which holds pixels of jobs that have failed
        self.worker.free(self._reserved)
        self._reserved = set()

    async def _serve(self) -> None:
        while True:
            await self._wait_for_work()
            await self.lanes.acquire(self._share)
            try:
                started = self._start_batch()
            except Exception:
                log.exception("model %s: no batch could be formed", self.name)
                waiting = [job for job in self._unsettled if job.waiting]
                fail(waiting, ExecutionFailed, f"model {self.name} could not run this request")
                started = False
            if not started:
                self.lanes.release()

    async def _wait_for_work(self) -> None:
        while (patience_s := self._patience_s()) > 0:
            self._changed.clear()
            timer = None
            if patience_s != float("inf"):
                timer = self._loop.call_later(max(patience_s, MIN_TIMER_S), self._changed.set)
            await self._changed.wait()
            if timer:
                timer.cancel()

    def _patience_s(self) -> float:
        """Returns how long the next batch may still wait for images; infinite without any."""
        if self._too_large:
            return 0.0
        return min(queue.due(self.max_queue_delay_s) for queue in self._queues.values()) - self.clock()

    def _next_queue(self, now: float) -> Queue | None:
        """Returns the queue whose batch is next: of those that are due, the one with the least virtual time."""
        due = [queue for queue in self._queues.values() if queue.due(self.max_queue_delay_s) <= now]
        return min(due, key=lambda queue: (queue.virtual_s, queue.planned_at), default=None)

    def _is_next_full(self) -> bool:
        queue = self._next_queue(self.clock())
        return queue is not None and queue.is_full

    def _run_here(self, queue: Queue, pixels: Images, trace: TraceContext | None) -> Result:
        """Runs a request that fills a brief program on the event loop, in the free lane that was acquired for it.

        Its time is not observed: plans are for batches that are handed over.
        """
        mode, height, width = queue.shape
        images = len(pixels)
        bucket = Bucket(images, height, width)
        began = self.clock()
        run: Run | BaseException
        try:
            outputs = run_batch(self._programs[mode, bucket].executable, pixels)
            run = Run(outputs, 0.0, 0.0, self.clock() - began, is_finite(outputs))
        except Exception as error:
            run = error
        ended = self.clock()
        execute_s = ended - began
        queue.virtual_s = max(queue.virtual_s, self._virtual_s)
        self._charge(queue, execute_s)
        note(self.demand[height, width], images, images)
        self.lanes.release()
        self._observe(mode, bucket, images, run)
        traced: Sequence[TracedBatch] = ()
        if trace is not None:
            times = (began, began, began, ended)
            traced = [TracedBatch(new(), [trace], self.name, mode, bucket, images, *times, _error(run))]
            self._tell(traced[0])
        if isinstance(run, Run):
            return Result([BatchRows(range(images), run.outputs)], Timings(execute_s=execute_s), traced)
        raise ExecutionFailed(f"model {self.name} could not run this batch") from run

    def _start_batch(self) -> bool:
        """Starts the batch that the plan puts first; False where every job has gone."""
        if self._too_large:
            return self._start_again()
        now = self.clock()
        queue = self._next_queue(now)
        if queue is None:
            return False
        self._drop_late(queue, now)
        if not queue.images:
            return False
        step, taken = self._planned(queue, queue.images, now)
        note(self.demand[taken.bucket.height, taken.bucket.width], step.share, step.images)
        taken.pieces = queue.take(step.images, now)
        self._submit(taken)
        return True

    def _start_again(self) -> bool:
        """Starts a part of a batch that was too large; False where every job has gone."""
        queue, left = self._too_large.popleft()
        left = [piece for piece in left if not piece.job.settled.done()]
        if not left:
            return False
        try:
            step, taken = self._planned(queue, sum(stop - start for _, start, stop in left), self.clock())
            taken.pieces, rest = cut(left, step.images)
        except Exception:  # nobody else knows of them
            fail((piece.job for piece in left), ExecutionFailed, f"model {self.name} could not run this batch")
            raise
        if rest:
            self._too_large.appendleft((queue, rest))
        self._submit(taken)
        return True

    def _planned(self, queue: Queue, waiting: int, now: float) -> tuple[Step, TakenBatch]:
        """Returns the step to start now with `waiting` images, and its batch, which is charged."""
        busy = self.lanes.busy
        step = queue.costs.planner.next_step(waiting, self.lanes.count - busy, busy)
        _, height, width = queue.shape
        expected_s = queue.costs.turn_s(step.bucket, busy + 1)
        taken = TakenBatch(queue, Bucket(step.bucket, height, width), now, busy + 1, expected_s, self.lanes.busy_s)
        self._virtual_s = max(self._virtual_s, queue.virtual_s)
        self._charge(queue, taken.expected_s)
        self.lanes.began(taken.expected_s, now)
        return step, taken

    def _submit(self, taken: TakenBatch) -> None:
        try:
            for job, start, _ in taken.pieces:
                if start == 0:
                    job.timings.queue_s = taken.at - job.arrived
            pixels = [job.pixels[start:stop] for job, start, stop in taken.pieces]
            batch = Batch(self._programs[taken.mode, taken.bucket].executable, taken.bucket, pixels)
            finish = partial(self._finish, taken)
            self.worker.submit(batch, partial(self._loop.call_soon_threadsafe, finish))
        except Exception as error:  # the worker was stopped, or memory is short: the jobs left their queue already
            self._finish(taken, error)

    def _charge(self, queue: Queue, seconds: float) -> None:
        """Counts the seconds that a batch is expected to take, and later the difference from what it took."""
        self._share.virtual_s += seconds
        queue.virtual_s += seconds

    def _drop_late(self, queue: Queue, now: float) -> None:
        """Drops the jobs that can't be answered in time, not even alone."""
        soonest = now + queue.costs.cheapest_s
        first = (takewhile(lambda job: job.rank < soonest, line.jobs) for line in queue.lines.values())
        late = [job for jobs in first for job in jobs if job.deadline < soonest]
        if any(job.deadline >= now for job in late):
            queue.costs.doubt()
        fail(late, DeadlineExceeded, f"model {self.name}: the deadline passed while the request waited")

    def _finish(self, taken: TakenBatch, run: Run | BaseException) -> None:
        """Settles the jobs of a batch, charges what it took and gives its lane back. Raises nothing.

        A batch that failed stays charged with its expected seconds.
        """
        is_again = False
        traced = None if self.on_traced is None else self._traced(taken, run)
        # Jobs are settled first, so that no observer can prevent it.
        try:
            if isinstance(run, Run):
                scatter(taken.pieces, run)
                self._account(taken, run)
            elif isinstance(run, OutOfDeviceMemory) and not self._has_ended and self._has_smaller(taken):
                self._too_large.append((taken.queue, taken.pieces))
                self._changed.set()
                is_again = True
        except Exception as error:  # outputs that are not what the model promised
            run = error
        try:
            if not is_again and not isinstance(run, Run):
                jobs = (piece.job for piece in taken.pieces)
                fail(jobs, ExecutionFailed, f"model {self.name} could not run this batch")
        finally:
            self.lanes.release()
        self._observe(taken.mode, taken.bucket, taken.images, run)
        if traced is not None:
            self._tell(traced._replace(error=_error(run)))
        del run  # an error that was caught here refers to this call, which holds requests' images

    def _traced(self, taken: TakenBatch, run: Run | BaseException) -> TracedBatch | None:
        """Returns what traces tell of a batch, and has its jobs know it; None where none of them is traced."""
        jobs = [piece.job for piece in taken.pieces if piece.job.trace is not None]
        if not jobs:
            return None
        if isinstance(run, Run):
            started = run.ended - run.execute_s
            gathered = started - run.wait_s
            times = (gathered - run.gather_s, gathered, started, run.ended)
        else:
            times = (taken.at, taken.at, taken.at, self.clock())
        requests = [job.trace for job in jobs[:MAX_REQUESTS] if job.trace is not None]
        traced = TracedBatch(new(), requests, self.name, taken.mode, taken.bucket, taken.images, *times)
        for job in jobs:
            job.traced += (traced,)
        return traced

    def _tell(self, traced: TracedBatch) -> None:
        """Hands over what traces tell of a batch. Raises nothing."""
        try:
            if self.on_traced is not None:
                self.on_traced(traced)
        except Exception:
            log.exception("model %s: a batch could not be traced", self.name)

    def _has_smaller(self, taken: TakenBatch) -> bool:
        """Returns whether a batch that the device's memory did not hold has smaller buckets; only those go on."""
        mode, height, width = taken.queue.shape
        if retired := taken.queue.costs.retire(taken.bucket.batch):
            self.on_retired(mode, [Bucket(batch, height, width) for batch in retired])
        return taken.queue.costs.smallest < taken.bucket.batch

    def _observe(self, mode: Mode, bucket: Bucket, images: int, run: Run | BaseException) -> None:
        """Tells the observer and the log the outcome of a batch. Raises nothing."""
        try:
            if isinstance(run, Run):
                self.observer.batch_ran(mode, bucket, images, run)
            else:
                is_explained = isinstance(run, WrongRowsError)
                reason, trace = (f": {run}", None) if is_explained else ("", run)
                log.error("model %s: a batch in %s %s raised%s", self.name, mode, bucket, reason, exc_info=trace)
                self.observer.batch_failed(mode, bucket, images)
        except Exception:
            log.exception("model %s: a batch in %s %s could not be observed", self.name, mode, bucket)

    def _account(self, taken: TakenBatch, run: Run) -> None:
        now = self.clock()
        turn_s = now - taken.at - run.wait_s
        self._charge(taken.queue, turn_s - taken.expected_s)
        self.lanes.ended(taken.expected_s, turn_s)
        costs, batch = taken.queue.costs, taken.bucket.batch
        costs.observe(batch, taken.running, turn_s=turn_s, execute_s=run.execute_s, now=now)
        # While it waited, gathered ahead, all lanes were busy.
        busy_s = self.lanes.busy_s - taken.busy_s - run.wait_s * self.lanes.count
        own_s, returned_s = run.gather_s + run.execute_s, now - run.ended
        lanes = min(max(1.0, busy_s / turn_s), self.lanes.count) if turn_s > 0 else 1.0
        costs.note(batch, Parts(max(0.0, turn_s - own_s - returned_s), own_s, returned_s, lanes))

    def _crashed(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            return
        log.critical("model %s: the batch loop died", self.name, exc_info=task.exception())
        self.admission.is_closed = self._has_ended = True
        fail(self._unsettled, ExecutionFailed, f"model {self.name} stopped serving")
        self._too_large.clear()
        self.on_crash()


class AdmittedRequest:
    """A request that `batcher` took in: it leaves once, at the end of the `with` that holds it."""

    __slots__ = ("_admission", "_images", "_size_bytes", "open", "run")

    def __init__(self, batcher: Batcher, images: int, size_bytes: int) -> None:
        self._images = images
        self._size_bytes = size_bytes
        self._admission = batcher.admission
        self.run = batcher.run
        self.open = batcher.open

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._admission.leave(self._images, self._size_bytes)

    def buffer(self, shape: tuple[int, int, int, int]) -> Images:
        """Returns memory for pixels `[n, height, width, 3]`, with any content."""
        return np.empty(shape, np.uint8)


def _error(run: Run | BaseException) -> str:
    return "" if isinstance(run, Run) else type(run).__name__


def _costs_by_shape(programs: Mapping[tuple[Mode, Bucket], Warmed]) -> dict[Shape, dict[int, Cost]]:
    costs: dict[Shape, dict[int, Cost]] = {}
    for (mode, bucket), warmed in programs.items():
        costs.setdefault((mode, bucket.height, bucket.width), {})[bucket.batch] = warmed.cost
    return costs
