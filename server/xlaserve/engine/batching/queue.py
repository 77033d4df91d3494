"""Jobs, the queue they wait in, the order in which their images leave it, and the rows of outputs they get.

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
from xlaserve.engine.program import Outputs
from xlaserve.engine.request import WEIGHTS, BatchRows, EngineRequest, Result, Shape
from xlaserve.engine.timings import Timings
from xlaserve.engine.wait_margin import WaitMargin
from xlaserve.errors import XlaserveError

PATIENCE_S: Final = 10.0
EARLIER: Final = 1 / 32
"""The part by which each batch reduces the weight of earlier batches in `PriorityLine.lately`."""


@dataclass(eq=False, slots=True)
class Job:
    """A request in a queue."""

    queue: Queue
    request: EngineRequest
    arrived: float
    settled: asyncio.Future[Result]
    images: int = field(init=False)
    """Images of the request."""
    rank: float = field(init=False)
    """Seconds of the clock by which it should be answered: of a priority, the job with the least rank is next."""
    expected_s: float | None = None
    """Seconds in which it should be answered; None where its deadline is too far to matter."""
    spare_s: float = math.inf
    """Seconds by which other jobs may delay it before it is late."""
    taken: int = 0
    """Images that have left the queue."""
    answered: int = 0
    """Images whose outputs are complete."""
    result: Result = field(default_factory=lambda: Result([], Timings(), []))
    """The batches so far."""

    def __post_init__(self) -> None:
        self.images = self.request.images
        self.rank = min(self.request.deadline, self.arrived + PATIENCE_S)

    @property
    def waiting(self) -> int:
        """Images that are still in the queue."""
        return self.images - self.taken


class Piece(NamedTuple):
    """Images of one job in one batch."""

    job: Job
    start: int
    stop: int


@dataclass(eq=False, slots=True)
class PriorityLine:
    """The jobs of one priority, the next one first."""

    weight: int
    jobs: deque[Job] = field(default_factory=deque)
    images: int = 0
    virtual: float = 0.0
    """Images taken from the line, divided by its weight."""
    lately: float = 0.0
    """Images taken from the line, in which those of earlier batches have less weight."""
    wait_margin: WaitMargin = field(default_factory=WaitMargin)

    def append(self, job: Job) -> None:
        """Inserts `job` by its rank, after jobs of the same rank."""
        if not self.jobs or self.jobs[-1].rank <= job.rank:
            self.jobs.append(job)
        else:
            insort(self.jobs, job, key=rank_of)
        self.images += job.images

    def behind(self, rank: float) -> list[Job]:
        """Returns the jobs that a new job of this rank would overtake."""
        return list(takewhile(lambda job: job.rank > rank, reversed(self.jobs)))

    def first(self, images: int) -> Iterator[Piece]:
        """Yields the first `images` images, and leaves them in the line."""
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
    lines: Mapping[int, PriorityLine] = field(
        default_factory=lambda: {key: PriorityLine(weight) for key, weight in WEIGHTS.items()}
    )
    """The lines by priority."""
    images: int = 0
    planned_at: float = -math.inf
    """When a batch was last taken. Jobs that waited then were planned for with it, and wait for no further images."""
    virtual_s: float = 0.0
    """Seconds that its batches took, as `ModelQueues` charges them to share lanes between queues."""
    _virtual: float = 0.0
    """The `virtual` of the line whose image was taken last, before that image."""

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
        """Inserts `job` into the line of its priority."""
        line = self.lines[job.request.priority]
        if not line.images:
            line.virtual = max(line.virtual, self._virtual)  # next of its weight; idle time earns no credit
        line.append(job)
        self.images += job.images

    def take(self, images: int, now: float) -> list[Piece]:
        """Takes the next `images` images out of the queue."""
        counts = self._divide(images)
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
                self.lines[job.request.priority].jobs.popleft()
        return pieces

    def _divide(self, images: int) -> dict[PriorityLine, int]:
        """Divides the next `images` images among the lines, charges the lines, and returns the images of each."""
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
            line = self.lines[job.request.priority]
            line.jobs.remove(job)
            line.images -= job.waiting
            self.images -= job.waiting
            job.taken = job.images


@dataclass(eq=False, slots=True)
class TakenBatch:
    """A batch that left its queue."""

    queue: Queue
    bucket: Bucket
    at: float
    running: int
    """Lanes that run, its own included."""
    expected_s: float
    """Seconds that its turn is expected to take."""
    busy_s: float
    """Seconds for which lanes had been in use when it was taken, of all lanes together."""
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
    """Settles each of `jobs` that is not settled yet with an error of its own, and takes them out of their queues."""
    for job in jobs:
        job.queue.remove(job)
        if not job.settled.done():
            job.settled.set_exception(error(message))


def scatter(pieces: Sequence[Piece], run: Run) -> None:
    """Gives each job its rows of the batch, and settles it with the last of them.

    Every output of a `Run` has a row for each row of its bucket. Raises ValueError where dtypes or shapes differ from
    those of the job's other batches.
    """
    stop_row = 0
    for job, start, stop in pieces:
        row, stop_row = stop_row, stop_row + stop - start
        if job.settled.done():
            continue
        outputs = tuple(output[row:stop_row] for output in run.outputs)
        batches, timings, _ = job.result
        if batches and _kinds(outputs) != _kinds(batches[0].outputs):
            raise ValueError(f"a batch gave {_kinds(outputs)}, another {_kinds(batches[0].outputs)}")
        batches.append(BatchRows(range(start, stop), outputs))
        job.answered += stop - start
        timings.gather_s = max(timings.gather_s, run.gather_s)
        timings.execute_s = max(timings.execute_s, run.execute_s)
        if start == 0:
            timings.queue_s += run.wait_s
        if job.answered == job.images:
            job.settled.set_result(job.result)


def _kinds(outputs: Outputs) -> list[tuple[np.dtype[Any], tuple[int, ...]]]:
    return [(output.dtype, output.shape[1:]) for output in outputs]
