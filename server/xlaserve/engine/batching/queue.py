"""Jobs and the queue they wait in: whose images come next, and what each is given back."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from xlaserve.config import Bucket, Mode
from xlaserve.engine.batching.costs import Costs
from xlaserve.engine.batching.worker import Run
from xlaserve.engine.program import Images, Outputs
from xlaserve.errors import XlaserveError
from xlaserve.timings import Timings

Shape = tuple[Mode, int, int]
"""Mode, height and width: images share a batch only where all three agree."""


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


@dataclass(eq=False, slots=True)
class Job:
    """One request's images in a queue."""

    queue: Queue
    pixels: Images
    deadline: float
    arrived: float
    settled: asyncio.Future[Result]
    taken: int = 0
    """Images that have left the queue."""
    answered: int = 0
    """Images whose outputs are there."""
    batches: list[BatchRows] = field(default_factory=list)
    timings: Timings = field(default_factory=Timings)

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
class Queue:
    """The jobs of one shape, first come, first served."""

    shape: Shape
    costs: Costs
    jobs: deque[Job] = field(default_factory=deque)
    images: int = 0
    planned_at: float = -math.inf
    """When a batch was last taken. What waited then was planned for with it, and waits for no further images."""
    virtual_s: float = 0.0
    """Seconds that its batches took, as `Batcher` counts them to share lanes between queues."""

    @property
    def is_full(self) -> bool:
        """Whether the next batch gains nothing by waiting for more images."""
        return self.images >= self.costs.planner.best

    def due(self, max_delay_s: float) -> float:
        """Returns when the next batch may start, in seconds of the clock: never if empty."""
        if not self.jobs:
            return math.inf
        arrived = self.jobs[0].arrived
        return -math.inf if self.is_full or arrived <= self.planned_at else arrived + max_delay_s

    def append(self, job: Job) -> None:
        """Puts `job` at the end."""
        self.jobs.append(job)
        self.images += len(job.pixels)

    def take(self, images: int, now: float) -> list[Piece]:
        """Takes the first `images` images."""
        pieces: list[Piece] = []
        left = images
        for job in self.jobs:
            if not left:
                break
            pieces.append(Piece(job, job.taken, job.taken + min(left, job.waiting)))
            left -= pieces[-1].stop - job.taken
        # From here on nothing can fail, so that no image is taken and in no piece.
        self.planned_at = now
        self.images -= images
        for job, _, stop in pieces:
            job.taken = stop
            if not job.waiting:
                self.jobs.popleft()
        return pieces

    def remove(self, job: Job) -> None:
        """Takes out the waiting images of `job`, if there are any."""
        if job.waiting:
            self.jobs.remove(job)
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

    Raises ValueError for other outputs than the job's other batches gave.
    """
    stop_row = 0
    for job, start, stop in pieces:
        row, stop_row = stop_row, stop_row + stop - start
        if job.settled.done():
            continue
        outputs = tuple(output[row:stop_row] for output in run.outputs)
        if any(len(output) != stop - start for output in outputs):
            raise ValueError(f"a batch gave too few rows for {stop - start} images")
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
            job.settled.set_result(Result(job.batches, timings))


def _kinds(outputs: Outputs) -> list[tuple[np.dtype[Any], tuple[int, ...]]]:
    return [(output.dtype, output.shape[1:]) for output in outputs]
