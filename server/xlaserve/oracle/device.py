"""A device in virtual time: what a batch takes is drawn, nothing is computed."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Final

import numpy as np

from xlaserve.config import Bucket, Mode
from xlaserve.engine.batching.worker import Batch, Done, Run, Worker
from xlaserve.engine.buckets.planner import Cost
from xlaserve.engine.program import Images, Outputs, Warmed
from xlaserve.oracle.virtual_time import VirtualTimeLoop

MODE: Final = Mode.XLA
SIDE: Final = 1
"""Height and width of the images, whose pixels nobody looks at."""


@dataclass(frozen=True, slots=True)
class Profile:
    """One server, as it was measured."""

    costs: Mapping[int, Cost]
    """What batches take to run, by bucket."""
    lanes: int = 1
    front_s: float = 0.0
    """Seconds of the event loop for a request: to read it, and to write its answer."""
    spread: float = 0.0
    """How far a batch strays from its cost: the standard deviation of the logarithm of their ratio."""
    max_images: int = 2048
    """`max_queue_images`."""
    max_queue_delay_s: float = 0.0

    @property
    def capacity(self) -> float:
        """Images a second at most, with full batches on every lane."""
        best = max(batch / cost.loaded_s for batch, cost in self.costs.items())
        return self.lanes * best


@dataclass(eq=False)
class Device(Worker):
    """Runs batches for as long as their buckets cost, as many at a time as there are lanes."""

    loop: VirtualTimeLoop
    profile: Profile
    chance: Random
    _running: int = 0
    _staged: deque[tuple[float, Batch, Done]] = field(default_factory=deque)

    def programs(self) -> dict[tuple[Mode, Bucket], Warmed]:
        """Returns a program for each bucket."""
        return {
            (MODE, Bucket(batch, SIDE, SIDE)): Warmed(_Program(self, batch), cost)
            for batch, cost in self.profile.costs.items()
        }

    def reserve(self, buckets: Iterable[Bucket]) -> None:
        """Does nothing: no batch is gathered."""

    def free(self, buckets: Iterable[Bucket]) -> None:
        """Does nothing."""

    def submit(self, batch: Batch, done: Callable[[Run | BaseException], object]) -> None:
        """Runs `batch` once a lane is free, and then calls `done`."""
        self._staged.append((self.loop.time(), batch, done))
        self._start()

    def draw_s(self, batch: int, running: int) -> float:
        """Returns what a batch takes that runs beside `running` - 1 others."""
        cost_s = self.profile.costs[batch].at(running, self.profile.lanes)
        return cost_s * math.exp(self.chance.gauss(0.0, self.profile.spread)) if self.profile.spread else cost_s

    def _start(self) -> None:
        while self._staged and self._running < self.profile.lanes:
            self._running += 1
            since, batch, done = self._staged.popleft()
            execute_s = self.draw_s(batch.bucket.batch, self._running)
            run = Run(_outputs(batch.bucket.batch), 0.0, self.loop.time() - since, execute_s)
            self.loop.call_later(execute_s, self._end, run, done)

    def _end(self, run: Run, done: Done) -> None:
        self._running -= 1
        done(run)
        self._start()


@dataclass(frozen=True, slots=True)
class _Program:
    """A program that runs on the event loop, as brief ones do, takes its time from that."""

    device: Device
    batch: int

    def __call__(self, images: Images) -> Outputs:
        self.device.loop.now += self.device.draw_s(self.batch, 1)
        return _outputs(self.batch)


def _outputs(batch: int) -> Outputs:
    return (np.zeros((batch, 1), np.float32),)
