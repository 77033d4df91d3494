"""The threads that gather and run batches, off the event loop."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from queue import SimpleQueue
from typing import Final, NamedTuple

from xlaserve.config import Bucket
from xlaserve.engine.inputs import RGB_IMAGE, Inputs, Layout, Rows, empty_rows, layout, zeros
from xlaserve.engine.program import Executable, Outputs, is_finite, run_batch

LANE: Final = "lane"

Shape = tuple[int, Layout]
"""Rows of a batch, and the layout of each row."""


class Batch(NamedTuple):
    """Rows that run together, padded to `bucket`."""

    executable: Executable
    bucket: Bucket
    rows: Sequence[Rows]
    """Parts of the batch, in the bucket's layout, together at least one row and at most its batch."""


class Run(NamedTuple):
    """A batch that ran."""

    outputs: Outputs
    """Outputs with a row for each row of the bucket; rows of the padding are meaningless."""
    gather_s: float
    wait_s: float
    """Seconds from being gathered until a lane was free."""
    execute_s: float
    is_finite: bool = True
    """Whether no output holds NaN or infinity."""
    ended: float = 0.0
    """When it ended, in seconds of the worker's clock."""


Done = Callable[[Run | BaseException], object]
"""Called with the result of a batch."""


class Worker:
    """Runs batches on `lanes` lanes, and gathers `ahead` more meanwhile.

    Each lane, and each batch gathered ahead, has a thread until `stop`.
    """

    def __init__(self, lanes: int, ahead: int = 1, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._lanes = threading.Semaphore(lanes)
        self._places = lanes + ahead
        self._buffers: dict[Shape, list[Rows]] = {}
        self._reserved: Counter[Shape] = Counter()
        self._submitted: SimpleQueue[tuple[Batch, Done] | None] = SimpleQueue()
        self._has_stopped = False
        # Daemons, so that a batch that never ends can't keep the process from its end.
        self._threads = [
            threading.Thread(target=self._work, name=f"{LANE}_{n}", daemon=True) for n in range(self._places)
        ]
        for thread in self._threads:
            thread.start()

    def reserve(self, buckets: Iterable[Bucket], inputs: Inputs = RGB_IMAGE) -> None:
        """Allocates the buffers that batches of `buckets` are gathered into, one for each batch that may be in flight.

        They are kept until `free` has been called as often. Batches of other buckets are gathered into new memory.
        """
        for bucket in buckets:
            shape = _shape(bucket, inputs)
            self._reserved[shape] += 1
            if shape not in self._buffers:
                self._buffers[shape] = [zeros(inputs, bucket) for _ in range(self._places)]

    def free(self, buckets: Iterable[Bucket], inputs: Inputs = RGB_IMAGE) -> None:
        """Undoes one `reserve` of each of `buckets`."""
        for bucket in buckets:
            shape = _shape(bucket, inputs)
            self._reserved[shape] -= 1
            if not self._reserved[shape]:
                del self._reserved[shape], self._buffers[shape]

    def is_lane(self, thread: int) -> bool:
        """Returns whether the thread of this number, the operating system's, runs batches."""
        return any(each.native_id == thread and each.name.startswith(LANE) for each in threading.enumerate())

    def submit(self, batch: Batch, done: Done) -> None:
        """Runs `batch` on a thread and calls `done` there with its run or error. Raises RuntimeError once stopped."""
        if self._has_stopped:
            raise RuntimeError("the worker was stopped")
        self._submitted.put((batch, done))

    def stop(self) -> None:
        """Waits for the batches that were submitted and ends the threads."""
        self._has_stopped = True
        for _ in self._threads:
            self._submitted.put(None)
        for thread in self._threads:
            thread.join()

    def run(self, batch: Batch) -> Run:
        """Gathers and runs `batch`; blocks."""
        begin = self._clock()
        rows = batch.rows[0]
        buffer = None
        if len(rows[0]) != batch.bucket.batch:
            shape = batch.bucket.batch, tuple([(each.dtype, each.shape[1:]) for each in rows])
            rows = buffer = self._take_buffer(shape)
            gather(batch.rows, buffer)
        gathered = self._clock()
        with self._lanes:
            start = self._clock()
            outputs = run_batch(batch.executable, *rows)
            end = self._clock()
        if buffer is not None and len(free := self._buffers.get(shape, [])) < self._places:
            free.append(buffer)  # to a throw-away list where the bucket is no longer reserved
        # Padding repeats a real row: it is as finite as that.
        return Run(outputs, gathered - begin, start - gathered, end - start, is_finite(outputs), end)

    def _work(self) -> None:
        while submitted := self._submitted.get():
            batch, done = submitted
            try:
                result: Run | BaseException = self.run(batch)
            except BaseException as error:  # even SystemExit, as nothing else would settle the jobs
                result = error
            done(result)
            del submitted, batch, done, result  # which hold a request's images

    def _take_buffer(self, shape: Shape) -> Rows:
        try:
            return self._buffers[shape].pop()
        except (KeyError, IndexError):
            return empty_rows(shape[1], shape[0])


def gather(parts: Sequence[Rows], buffer: Rows) -> None:
    """Copies `parts` one after the other into `buffer`, input by input, and pads the remaining rows with the last one.

    A real row rather than zeros: it takes as long as any image, and adds no infinity of its own.
    """
    for whole, *of_input in zip(buffer, *parts, strict=True):
        start = 0
        for rows in of_input:
            stop = start + len(rows)
            whole[start:stop] = rows
            start = stop
        whole[start:] = whole[start - 1]


def _shape(bucket: Bucket, inputs: Inputs) -> Shape:
    return bucket.batch, layout(inputs, bucket.height, bucket.width)
