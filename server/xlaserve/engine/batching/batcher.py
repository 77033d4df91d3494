"""A model's batcher: admits requests, queues their images, and has them run in padded batches.

One asyncio task owns the queues; nothing here is locked. Every job settles exactly once: with its outputs, an error,
its deadline, or its own cancellation.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Final, Self

from xlaserve.config import Bucket, Mode
from xlaserve.engine.batching.batch_reports import BatchReports, Observer
from xlaserve.engine.batching.costs import Turn
from xlaserve.engine.batching.dispatcher import Dispatcher
from xlaserve.engine.batching.forecast import Forecast
from xlaserve.engine.batching.idle_runs import IdleRuns
from xlaserve.engine.batching.image_admission import ImageAdmission
from xlaserve.engine.batching.lanes import Lanes
from xlaserve.engine.batching.model_queues import Live, ModelQueues
from xlaserve.engine.batching.queue import Job, fail
from xlaserve.engine.batching.unmatched import Opener, Unmatched, refusal
from xlaserve.engine.batching.worker import Batch, Worker
from xlaserve.engine.buckets.demand import Resolution
from xlaserve.engine.inputs import RGB_IMAGE, Inputs, Rows, empty
from xlaserve.engine.program import Noted, Warmed, not_noted
from xlaserve.engine.request import BatchRows, EncodedRequest, EngineRequest, Result, Shape
from xlaserve.engine.timings import Timings
from xlaserve.engine.trace_context import TracedBatch
from xlaserve.errors import DeadlineExceeded, ExecutionFailed, InvalidArgument, ModelNotReady, ShuttingDown

log = logging.getLogger(__name__)

MIN_TIMER_S: Final = 0.001
"""uvloop rounds timers to milliseconds; one that is rounded to zero would fire at once, again and again."""
IDLE_POLL_S: Final = 0.01
"""Seconds after which a batch that no request waits for checks again whether the device is idle."""


class Batcher:
    """Serves one model's `programs` on the device's `lanes`.

    `max_images` and `max_bytes` bound its `admission`. A batch that is not full waits up to `max_queue_delay_s` for
    more images. `noted` wraps each executable so that its runs are recorded as under way.
    `on_crash` is called if the batch loop dies, which is a defect: the process should end. A bucket for which the
    device's memory did not suffice is retired with all larger ones, `on_retired` is called, and its batch runs in
    smaller ones, if there are any. `on_traced`, where there is one, is called with each batch of traced requests.
    `opener` makes the model ready for resolutions without buckets; None where it takes none.
    """

    def __init__(
        self,
        *,
        name: str,
        programs: Mapping[tuple[Mode, Bucket], Warmed],
        lanes: Lanes,
        worker: Worker,
        observer: Observer,
        max_images: int,
        max_bytes: int,
        max_queue_delay_s: float = 0.0,
        inputs: Inputs = RGB_IMAGE,
        clock: Callable[[], float] = time.perf_counter,
        noted: Noted = not_noted,
        on_crash: Callable[[], None] = lambda: None,
        on_retired: Callable[[Mode, list[Bucket]], object] = lambda mode, buckets: None,
        on_traced: Callable[[TracedBatch], None] | None = None,
        opener: Opener | None = None,
    ) -> None:
        self.name = name
        self.lanes = lanes
        self.worker = worker
        self.clock = clock
        self.inputs = inputs
        """The inputs of the programs."""
        self._noted = noted
        self._on_crash = on_crash
        self._opener = opener
        self._programs: dict[tuple[Mode, Bucket], Warmed] = {}
        self._queues = queues = ModelQueues(lanes.count, max_queue_delay_s, clock)
        self._reserved: set[Bucket] = set()
        self.forecast = Forecast(name, queues.by_shape, lanes, queues.share, clock, max_queue_delay_s)
        self._idle_runs = IdleRuns(lanes, worker)
        self._unsettled: set[Job] = set()
        self._changed = asyncio.Event()
        self._dispatcher = Dispatcher(
            model=name,
            programs=self._programs,
            queues=queues,
            lanes=lanes,
            worker=worker,
            reports=BatchReports(name, observer, on_traced, clock),
            clock=clock,
            on_retired=on_retired,
            on_rerun=self._changed.set,
        )
        self.admission = ImageAdmission(name, max_images, max_bytes, self.forecast.drain_s)
        self.add(programs)
        self._loop = asyncio.get_running_loop()
        self._task = self._loop.create_task(self._serve(), name=f"batcher {name}")
        self._task.add_done_callback(self._crashed)

    def add(self, programs: Mapping[tuple[Mode, Bucket], Warmed]) -> None:
        """Serves `programs` as well: more buckets, modes and resolutions. Waiting images are planned again."""
        buckets = {bucket for _, bucket in programs} - self._reserved
        self.worker.reserve(buckets, self.inputs)
        self._reserved |= buckets
        self._programs |= {
            (mode, bucket): replace(
                one, executable=self._noted(one.executable, f"mode {mode}, bucket {bucket}", one.cost.loaded_s)
            )
            for (mode, bucket), one in programs.items()
        }
        self._queues.add(programs)

    def shapes(self) -> dict[Shape, int]:
        """Returns the modes and resolutions that have buckets, each with its largest."""
        return {shape: queue.costs.largest for shape, queue in self._queues.by_shape.items()}

    def turns(self) -> Iterator[tuple[Mode, Bucket, Turn]]:
        """Yields the buckets that serve, and the time of a batch of each from the queue to its answers."""
        return self._queues.turns()

    @property
    def unmatched(self) -> Unmatched | None:
        """The resolutions without buckets that the model takes; None for none."""
        return None if self._opener is None else self._opener.unmatched

    def live(self) -> Live:
        """Returns the model's work now."""
        admission = self.admission
        return Live(
            self.waiting_images,
            self.outstanding_s(),
            self.forecast.work_s(),
            admission.images,
            admission.max_images,
            tuple(self.turns()),
            dict(self._queues.demand),
        )

    @property
    def waiting_images(self) -> int:
        """Images in the queues."""
        return self._queues.images

    @property
    def waiting_requests(self) -> int:
        """Requests of which images are in the queues."""
        return self._queues.requests

    def admit(self, images: int, size_bytes: int, unmatched: Resolution | None = None) -> BatcherTicket:
        """Admits a request; see `ModelEngine.admit`."""
        if unmatched is not None:
            self._opener_for(unmatched).unmatched.check(unmatched)
        self.admission.admit(images, size_bytes)
        return BatcherTicket(self, images, size_bytes)

    async def open(self, resolution: Resolution, mode: Mode) -> Mode:
        """Makes the model ready for a resolution without buckets; see `Ticket.open`."""
        return await self._opener_for(resolution).open(self, resolution, mode)

    def _opener_for(self, resolution: Resolution) -> Opener:
        if self._opener is None:
            raise refusal(resolution, "a size that has buckets")
        return self._opener

    def check_encoded(self, request: EncodedRequest) -> None:
        """Refuses encoded images that would be late; see `Forecast.check_encoded`."""
        self.forecast.check_encoded(request)

    def outstanding_s(self) -> float:
        """Returns the seconds in which every request that waits or runs should be answered."""
        return self.forecast.drain_s()

    async def run(self, request: EngineRequest) -> Result:
        """Runs rows of a shape that has buckets; see `Ticket.run`.

        Raises DeadlineUnreachable, DeadlineExceeded, ExecutionFailed or ShuttingDown. A cancelled call takes its images
        out of the queue.
        """
        if self._dispatcher.is_closed:
            raise ModelNotReady(f"model {self.name} was unloaded")
        queues = self._queues
        queue = queues.by_shape[request.shape]
        is_brief = request.images in queue.costs.brief and not queue.images and not queues.max_delay_s
        if is_brief and request.deadline > self.clock() and self.lanes.try_acquire(queues.share):
            return self._dispatcher.run_inline(queue, request)
        job = Job(queue, request, self.clock(), self._loop.create_future())
        self.forecast.check(job)
        self._unsettled.add(job)
        queues.append(job)
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
        queue = self._queues.by_shape.get((mode, height, width))
        return queue.costs.largest if queue else 0

    async def run_when_idle(self, request: EngineRequest) -> Result:
        """Runs a batch that no request waits for; see `ModelEngine.run_when_idle`.

        A drain does not wait for a batch that has not begun.
        """
        images, (mode, height, width) = request.images, request.shape
        while True:
            if self.admission.is_closed:
                raise ModelNotReady(f"model {self.name} is draining")
            if images > (largest := self.largest(mode, height, width)):
                raise InvalidArgument("pixels", f"at most {largest} images of this size in a batch", images)
            if not self.waiting_images:
                bucket = Bucket(self._queues.by_shape[mode, height, width].costs.fitting(images), height, width)
                batch = Batch(self._programs[mode, bucket].executable, bucket, [request.rows])
                try:
                    run = await self._idle_runs.run(batch)
                except Exception as error:
                    raise ExecutionFailed(f"model {self.name} could not run this batch") from error
                if run is not None:
                    outputs = tuple(output[:images] for output in run.outputs)
                    timings = Timings(gather_s=run.gather_s, execute_s=run.execute_s)
                    return Result([BatchRows(range(images), outputs)], timings, [])
            if self.clock() >= request.deadline:
                raise DeadlineExceeded(f"model {self.name}: the device was not idle")
            await asyncio.sleep(IDLE_POLL_S)

    async def drain(self, timeout_s: float) -> None:
        """Admits no more requests, lets admitted ones finish for at most `timeout_s`, fails the rest, and ends."""
        self.admission.is_closed = True
        self._queues.max_delay_s = 0.0  # no more images will come
        self._changed.set()
        try:
            async with asyncio.timeout(timeout_s):
                await self.admission.emptied()
                await self._idle_runs.drain()
        except TimeoutError:
            if images := self.admission.images:
                log.warning("model %s: %d images did not finish in %g s", self.name, images, timeout_s)
            fail(self._unsettled, ShuttingDown, f"model {self.name} was unloaded before this could run")
        self._dispatcher.close()
        self._task.cancel()
        await asyncio.wait([self._task])
        self.worker.free(self._reserved, self.inputs)
        self._reserved = set()

    async def _serve(self) -> None:
        while True:
            await self._wait_for_work()
            await self.lanes.acquire(self._queues.share)
            try:
                started = self._dispatcher.start_batch()
            except Exception:
                log.exception("model %s: no batch could be formed", self.name)
                waiting = [job for job in self._unsettled if job.waiting]
                fail(waiting, ExecutionFailed, f"model {self.name} could not run this request")
                started = False
            if not started:
                self.lanes.release()

    async def _wait_for_work(self) -> None:
        while (delay_s := self._delay_s()) > 0:
            self._changed.clear()
            timer = None
            if delay_s != float("inf"):
                timer = self._loop.call_later(max(delay_s, MIN_TIMER_S), self._changed.set)
            await self._changed.wait()
            if timer:
                timer.cancel()

    def _delay_s(self) -> float:
        """Returns how long the next batch may still wait for images; infinite without any."""
        if self._dispatcher.has_rerun:
            return 0.0
        return self._queues.due() - self.clock()

    def _crashed(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            return
        log.critical("model %s: the batch loop died", self.name, exc_info=task.exception())
        self.admission.is_closed = True
        self._dispatcher.close()
        fail(self._unsettled, ExecutionFailed, f"model {self.name} stopped serving")
        self._on_crash()


class BatcherTicket:
    """A `Ticket` for a request that `batcher` admitted."""

    __slots__ = ("_batcher", "_images", "_size_bytes", "run")

    def __init__(self, batcher: Batcher, images: int, size_bytes: int) -> None:
        self._images = images
        self._size_bytes = size_bytes
        self._batcher = batcher
        self.run = batcher.run

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._batcher.admission.leave(self._images, self._size_bytes)

    def buffer(self, images: int, resolution: Resolution) -> Rows:
        """Returns memory for rows, with any content."""
        return empty(self._batcher.inputs, Bucket(images, *resolution))

    async def open(self, resolution: Resolution, mode: Mode) -> Mode:
        """Makes the model ready for a resolution; see `Ticket.open`."""
        return await self._batcher.open(resolution, mode)
