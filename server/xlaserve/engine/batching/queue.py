"""Jobs and the queue they wait in: whose images come next, and what each is given back.

Priorities share the batches of a queue by start-time fair queueing, as models share the device (see `lanes`), but by
images over the priority's weight: while all wait, each gets its share, and none starves. Within a priority the job with
the nearest deadline is next. A job without one, or with a far one, counts as if it were to be answered PATIENCE_S after
it arrived, so that it is overtaken for that long at most.
"""

from __future__ import annotations

import asyncio
import math
from bisect import insort
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, Final, NamedTuple

import numpy as np

from xlaserve.config import Bucket, Mode
from xlaserve.engine.batching.costs import Costs
from xlaserve.engine.batching.worker import Run
from xlaserve.engine.program import Images, Outputs
from xlaserve.engine.timings import Timings
from xlaserve.engine.trace_context import TraceContext, TracedBatch
from xlaserve.engine.wait_margin import WaitMargin
from xlaserve.errors import XlaserveError

Shape = tuple[Mode, int, int]
"""Mode, height and width: images share a batch only where all three agree."""


WEIGHTS: Final = {1: 4, 2: 2, 3: 1}
"""Shares of a queue's images by priority, 1 the highest, while all of them wait."""
DEFAULT_PRIORITY: Final = 2
PATIENCE_S: Final = 10.0
EARLIER: Final = 1 / 32
"""By so much each batch lets those before it count for less."""


class BatchRows(NamedTuple):
    """What one batch gave for a job, or a request of several jobs."""

    rows: Sequence[int]
    """Which of its images."""
    outputs: Outputs
    """A row for each of them."""


class Result(NamedTuple):
    """A job's answer, and where its time went."""

    batches: list[BatchRows]
    """One where the job was not split; several come in any order, as putting them together may take long."""
    timings: Timings
    traced: Sequence[TracedBatch] = ()
    """The batches that it was in, where it is traced."""


@dataclass(eq=False, slots=True)
class Job:
    """One request's images in a queue."""

    queue: Queue
    pixels: Images
    deadline: float
    arrived: float
    settled: asyncio.Future[Result]
    priority: int = DEFAULT_PRIORITY
    """A key of `WEIGHTS`."""
    trace: TraceContext | None = None
    """The request's span, where it is recorded."""
    rank: float = field(init=False)
    """When it should be answered: of its priority, the job that ranks least is next."""
    expected_s: float | None = None
    """Seconds in which it should be answered, where its deadline is near enough to ask."""
    spare_s: float = math.inf
    """Seconds for which others may hold it up until it is late."""
    taken: int = 0
    """Images that have left the queue."""
    answered: int = 0
    """Images whose outputs are there."""
    batches: list[BatchRows] = field(default_factory=list)
    timings: Timings = field(default_factory=Timings)
    traced: tuple[TracedBatch, ...] = ()

    def __post_init__(self) -> None:
        self.rank = min(self.deadline, self.arrived + PATIENCE_S)

    @property
    def waiting(self) -> int:
        """Images that are still in the queue."""
        return len(self.pixels) - self.taken


class Piece(NamedTuple):
    """Images of one job in one batch."""

    job: Job
    start: int
    stop: int


@dataclass(eq=False, slots=True)
class Line:
    """The jobs of one priority, the next one first."""

    weight: int
    jobs: deque[Job] = field(default_factory=deque)
    images: int = 0
    virtual: float = 0.0
    """Images that were taken from it, over its weight."""
    lately: float = 0.0
    """Images that were taken from it, those of earlier batches counted for less."""
    wait_margin: WaitMargin = field(default_factory=WaitMargin)

    def append(self, job: Job) -> None:
        """Puts `job` where it ranks: after those that rank alike."""
        if not self.jobs or self.jobs[-1].rank <= job.rank:
            self.jobs.append(job)
        else:
            insort(self.jobs, job, key=rank_of)
        self.images += len(job.pixels)

    def behind(self, rank: float) -> list[Job]:
        """Returns the jobs that a new one of this rank would be put before."""
        return list(takewhile(lambda job: job.rank > rank, reversed(self.jobs)))

    def first(self, images: int) -> Iterator[Piece]:
        """Yields the first `images` images, which stay."""
        for job in self.jobs:
            if not images:
                return
            count = min(images, job.waiting)
            images -= count
            yield Piece(job, job.taken, job.taken + count)


def rank_of(job: Job) -> float:
    """Returns a job's rank."""
    return job.rank


@dataclass(eq=False, slots=True)
class Queue:
    """The jobs of one shape."""

    shape: Shape
    costs: Costs
    lines: Mapping[int, Line] = field(default_factory=lambda: {key: Line(weight) for key, weight in WEIGHTS.items()})
    """By priority."""
    images: int = 0
    planned_at: float = -math.inf
    """When a batch was last taken. What waited then was planned for with it, and waits for no further images."""
    virtual_s: float = 0.0
    """Seconds that its batches took, as `Batcher` counts them to share lanes between queues."""
    _virtual: float = 0.0
    """The `virtual` of the line whose image was last taken, before it was."""

    @property
    def is_full(self) -> bool:
        """Whether the next batch gains nothing by waiting for more images."""
        return self.images >= self.costs.planner.best

    def due(self, max_delay_s: float) -> float:
        """Returns when the next batch may start, in seconds of the clock: never if empty."""
        if not self.images:
            return math.inf
        if not max_delay_s or self.is_full:
            return -math.inf
        arrived = min(job.arrived for line in self.lines.values() for job in line.jobs)
        return -math.inf if arrived <= self.planned_at else arrived + max_delay_s

    def append(self, job: Job) -> None:
        """Puts `job` into the line of its priority."""
        line = self.lines[job.priority]
        if not line.images:
            line.virtual = max(line.virtual, self._virtual)  # next of its weight; idle time earns no credit
        line.append(job)
        self.images += len(job.pixels)

    def take(self, images: int, now: float) -> list[Piece]:
        """Takes the `images` images that are next."""
        counts = self._divided(images)
        pieces = [piece for line, count in counts.items() for piece in line.first(count)]
        # From here on nothing can fail, so that no image is taken and in no piece.
        self.planned_at = now
        self.images -= images
        for line in self.lines.values():
            count = counts.get(line, 0)
            line.images -= count
            line.lately += count - EARLIER * line.lately
        for job, _, stop in pieces:
            job.taken = stop
            if not job.waiting:
                self.lines[job.priority].jobs.popleft()
        return pieces

    def _divided(self, images: int) -> dict[Line, int]:
        """Returns how many of the next `images` images are of each line, and charges the lines."""
        waiting = [line for line in self.lines.values() if line.images]
        counts = dict.fromkeys(waiting, 0)
        while images:
            line = min(waiting, key=lambda line: line.virtual)
            count = 1 if len(waiting) > 1 else images
            images -= count
            counts[line] += count
            line.virtual += count / line.weight
            self._virtual = max(self._virtual, line.virtual - 1 / line.weight)
            if counts[line] == line.images:
                waiting.remove(line)
        return counts

    def remove(self, job: Job) -> None:
        """Takes out the waiting images of `job`, if there are any."""
        if job.waiting:
            line = self.lines[job.priority]
            line.jobs.remove(job)
            line.images -= job.waiting
            self.images -= job.waiting
            job.taken = len(job.pixels)


@dataclass(eq=False, slots=True)
class TakenBatch:
    """A batch that left its queue."""

    queue: Queue
    bucket: Bucket
    at: float
    running: int
    """Lanes that run with it, its own included."""
    expected_s: float
    """What its turn should take."""
    busy_s: float
    """For how long lanes had been in use when it was taken, all together."""
    pieces: Sequence[Piece] = ()

    @property
    def mode(self) -> Mode:
        """The mode that it runs in."""
        return self.queue.shape[0]

    @property
    def images(self) -> int:
        """Images in it, without its padding."""
        return sum(stop - start for _, start, stop in self.pieces)


def cut(pieces: Sequence[Piece], images: int) -> tuple[list[Piece], list[Piece]]:
    """Returns the first `images` images, and the rest."""
    first, rest = [], []
    for job, start, stop in pieces:
        middle = min(start + images, stop)
        images -= middle - start
        if start < middle:
            first.append(Piece(job, start, middle))
        if middle < stop:
            rest.append(Piece(job, middle, stop))
    return first, rest


def fail(jobs: Iterable[Job], error: type[XlaserveError], message: str) -> None:
    """Settles `jobs`, except those that are settled, with an error each, and takes them out of the queue."""
    for job in jobs:
        job.queue.remove(job)
        if not job.settled.done():
            job.settled.set_exception(error(message))


def scatter(pieces: Sequence[Piece], run: Run) -> None:
    """Gives each job its rows of the batch, and settles it with the last of them.

    Every output of a `Run` has a row for each row of its bucket. Raises ValueError for other outputs than the job's
    other batches gave.
    """
    stop_row = 0
    for job, start, stop in pieces:
        row, stop_row = stop_row, stop_row + stop - start
        if job.settled.done():
            continue
        outputs = tuple(output[row:stop_row] for output in run.outputs)
        if job.batches and _kinds(outputs) != _kinds(job.batches[0].outputs):
            raise ValueError(f"a batch gave {_kinds(outputs)}, another {_kinds(job.batches[0].outputs)}")
        job.batches.append(BatchRows(range(start, stop), outputs))
        job.answered += stop - start
        timings = job.timings
        timings.gather_s = max(timings.gather_s, run.gather_s)
        timings.execute_s = max(timings.execute_s, run.execute_s)
        if start == 0:
            timings.queue_s += run.wait_s
        if job.answered == len(job.pixels):
            job.settled.set_result(Result(job.batches, timings, job.traced))


def _kinds(outputs: Outputs) -> list[tuple[np.dtype[Any], tuple[int, ...]]]:
    return [(output.dtype, output.shape[1:]) for output in outputs]
