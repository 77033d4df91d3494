"""Jobs and the queue they wait in: whose images come next, and what each is given back."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from xlaserve.config import Mode
from xlaserve.engine.buckets import Planner
from xlaserve.engine.program import Images, Outputs
from xlaserve.engine.worker import Run

Shape = tuple[Mode, int, int]
"""Mode, height and width: images share a batch only where all three agree."""


class Result(NamedTuple):
    """A job's answer. The seconds are those of its slowest batch, where it was split over several."""

    outputs: Outputs
    queue_s: float
    gather_s: float
    execute_s: float


@dataclass(eq=False, slots=True)
class Job:
    """One request's images in a queue."""

    pixels: Images
    deadline: float
    arrived: float
    settled: asyncio.Future[Result]
    taken: int = 0
    """Images that have left the queue."""
    answered: int = 0
    """Images whose outputs are there."""
    outputs: Outputs = ()
    queue_s: float = 0.0
    gather_s: float = 0.0
    execute_s: float = 0.0

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
    planner: Planner
    jobs: deque[Job] = field(default_factory=deque)
    images: int = 0

    @property
    def is_full(self) -> bool:
        """Whether the largest bucket can be filled."""
        return self.images >= self.planner.largest

    def take(self, images: int) -> list[Piece]:
        """Takes the first `images` images."""
        pieces = []
        self.images -= images
        while images:
            job = self.jobs[0]
            start = job.taken
            job.taken += min(images, job.waiting)
            pieces.append(Piece(job, start, job.taken))
            images -= job.taken - start
            if not job.waiting:
                self.jobs.popleft()
        return pieces

    def remove(self, job: Job) -> None:
        """Takes out what waits of `job`, if anything does."""
        if job.waiting:
            self.jobs.remove(job)
            self.images -= job.waiting
            job.taken = len(job.pixels)


def answer(piece: Piece, outputs: Outputs, run: Run) -> None:
    """Gives a job its rows of one batch, and settles it with the last of them."""
    job, start, stop = piece
    if job.settled.done():
        return
    images = len(job.pixels)
    if stop - start == images:
        job.outputs = outputs
    else:
        if not job.outputs:
            job.outputs = tuple(np.empty((images, *output.shape[1:]), output.dtype) for output in outputs)
        for whole, part in zip(job.outputs, outputs, strict=True):
            whole[start:stop] = part
    job.answered += stop - start
    job.gather_s = max(job.gather_s, run.gather_s)
    job.execute_s = max(job.execute_s, run.execute_s)
    if start == 0:
        job.queue_s += run.wait_s
    if job.answered == images:
        job.settled.set_result(Result(job.outputs, job.queue_s, job.gather_s, job.execute_s))
