"""A device in virtual time: the duration of a batch is drawn at random, and nothing is computed."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from random import Random
from typing import Final

import numpy as np

from xlaserve.config import Bucket, Mode
from xlaserve.engine.batching.worker import Batch, Done, Run, Worker
from xlaserve.engine.inputs import RGB_IMAGE, Inputs
from xlaserve.engine.program import Outputs, Warmed
from xlaserve.planning.measured_profile import Profile, draw
from xlaserve.planning.virtual_time import VirtualTimeLoop

MODE: Final = Mode.XLA
SIDE: Final = 1
"""Height and width of the images, whose pixels are not used."""
DONE: Final = 1e-9
"""A batch has ended when so little of it is left: times are rounded."""


@dataclass(eq=False)
class LoopTime:
    """The time of an event loop of Python, which does one thing after the other; one that was idle has to wake up."""

    loop: VirtualTimeLoop
    profile: Profile
    chance: Random
    _free_at: float = 0.0

    @property
    def busy_s(self) -> float:
        """Seconds until its work is done."""
        return max(0.0, self._free_at - self.loop.time())

    async def take(self, seconds: float, *, is_awake: bool = False) -> None:
        """Occupies the loop for `seconds`, after all earlier work, and returns when that is over."""
        now = self.loop.time()
        if self._free_at <= now:
            self._free_at = now if is_awake else now + draw(self.profile.returned_s, self.chance)
        self._free_at += seconds
        if self._free_at > now:
            await asyncio.sleep(self._free_at - now)


@dataclass(eq=False)
class _Running:
    batch: Batch
    done: Done
    wait_s: float
    began: float
    left: float
    """The part of the batch that is left to run, from 1 to 0."""


@dataclass(eq=False)
class Device(Worker):
    """Runs batches on lanes that slow each other down, for as long as their buckets cost.

    A batch begins once `engine`, the event loop that hands it over, has nothing else to do.
    """

    loop: VirtualTimeLoop
    profile: Profile
    chance: Random
    engine: LoopTime
    _running: list[_Running] = field(default_factory=list)
    _staged: deque[tuple[float, Batch, Done]] = field(default_factory=deque)
    _counted_at: float = 0.0
    _next_end: asyncio.TimerHandle | None = None

    def programs(self) -> dict[tuple[Mode, Bucket], Warmed]:
        """Returns a program for each bucket."""
        profile = self.profile
        return {
            (MODE, Bucket(batch, SIDE, SIDE)): Warmed(_Program(self, batch), profile.planned.get(batch, cost))
            for batch, cost in profile.costs.items()
        }

    def reserve(self, buckets: Iterable[Bucket], inputs: Inputs = RGB_IMAGE) -> None:
        """Does nothing: no batch is gathered."""

    def free(self, buckets: Iterable[Bucket], inputs: Inputs = RGB_IMAGE) -> None:
        """Does nothing."""

    def submit(self, batch: Batch, done: Callable[[Run | BaseException], object]) -> None:
        """Runs `batch` once a thread has it and a lane is free, and then calls `done`."""
        starts_in_s = self.engine.busy_s + draw(self.profile.started_s, self.chance)
        self.loop.call_later(starts_in_s, self._stage, batch, done)

    def draw(self) -> float:
        """Returns a random ratio of the duration of a batch to its cost."""
        return draw(self.profile.deviations, self.chance) if self.profile.deviations else 1.0

    def _stage(self, batch: Batch, done: Done) -> None:
        self._staged.append((self.loop.time(), batch, done))
        self._advance()
        self._start()

    def _advance(self) -> None:
        """Advances the batches by the time since the number that run last changed."""
        now = self.loop.time()
        for running in self._running:
            running.left -= (now - self._counted_at) / self._cost_s(running.batch)
        self._counted_at = now

    def _start(self) -> None:
        """Starts the batches for which lanes are free, and sets a timer for the next end of a batch."""
        now = self.loop.time()
        while self._staged and len(self._running) < self.profile.lanes:
            since, batch, done = self._staged.popleft()
            self._running.append(_Running(batch, done, now - since, now, self.draw()))
        if self._next_end is not None:
            self._next_end.cancel()
            self._next_end = None
        if self._running:
            ends_in_s = min(running.left * self._cost_s(running.batch) for running in self._running)
            self._next_end = self.loop.call_later(max(0.0, ends_in_s), self._end)

    def _end(self) -> None:
        self._advance()
        ended = [running for running in self._running if running.left <= DONE]
        self._running = [running for running in self._running if running.left > DONE]
        self._start()
        now = self.loop.time()
        for running in ended:
            took_s = now - running.began
            run = Run(_outputs(running.batch.bucket.batch), 0.0, running.wait_s, took_s, ended=now)
            self.loop.call_later(draw(self.profile.returned_s, self.chance), running.done, run)

    def _cost_s(self, batch: Batch) -> float:
        """Returns the seconds that a batch takes in all while as many run as now."""
        return self.profile.costs[batch.bucket.batch].at(len(self._running), self.profile.lanes)


@dataclass(frozen=True, slots=True)
class _Program:
    """A program that runs on the event loop, as brief ones do, takes its time from that."""

    device: Device
    batch: int

    def __call__(self, *rows: object) -> Outputs:
        self.device.loop.now += self.device.profile.costs[self.batch].alone_s * self.device.draw()
        return _outputs(self.batch)


def _outputs(batch: int) -> Outputs:
    return (np.zeros((batch, 1), np.float32),)
