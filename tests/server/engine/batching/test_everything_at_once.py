"""Failures, cancellations, deadlines and drains at random: every job settles once."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import random
from collections import Counter
from typing import Any

import pytest
from tests.fakes import FakeWorker, Started, lanes_are_free
from tests.server.engine.batching.served_model import COST_S, NO_DEADLINE, SQUARE, TALL, WIDE, Make, numbers_of

from xlaserve.config import Mode
from xlaserve.engine.batching.lanes import Lanes
from xlaserve.engine.request import DEFAULT_PRIORITY, WEIGHTS, Result
from xlaserve.errors import (
    DeadlineExceeded,
    DeadlineUnreachable,
    ExecutionFailed,
    InvalidArgument,
    ModelNotReady,
    OutOfDeviceMemory,
    QueueFull,
    ShuttingDown,
    XlaserveError,
)


class Chaos:
    """A scenario drawn from a seed: models on a device, and whether things fail, are cancelled, expire or drain."""

    def __init__(self, make: Make, seed: int) -> None:
        self.chance = random.Random(seed)
        self.fails, self.drains, self.cancels, self.expires = (self.chance.random() < 0.5 for _ in range(4))
        self.delay_s = self.chance.choice([0.0, 0.0, 0.5, 2.0])
        self.priorities = [DEFAULT_PRIORITY] if seed % 2 else list(WEIGHTS)
        self.modes = list(Mode)[: self.chance.randint(1, 3)]
        self.limits = {
            "max_images": self.chance.choice([30, 100_000]),
            "max_bytes": self.chance.choice([500, 10_000_000]),
        }
        self.lanes = Lanes(self.chance.randint(1, 4))
        self.worker = FakeWorker(asyncio.get_running_loop(), self.lanes.count, COST_S)
        self.failed: set[int] = set()
        self.too_large: Counter[int] = Counter()
        if self.fails:
            self.worker.error_of = self.fail_some
        self.sizes = [SQUARE, WIDE, TALL][: self.chance.randint(1, 3)]
        options = {"lanes": self.lanes, "worker": self.worker, "modes": self.modes, "max_queue_delay_s": self.delay_s}
        options["sizes"] = self.sizes
        self.models = [make(**options, **self.limits) for _ in range(self.chance.randint(1, 3))]
        self.expected: dict[asyncio.Task[Result], list[int]] = {}
        self.cancelled: set[asyncio.Task[Result]] = set()

    def fail_some(self, batch: Started) -> BaseException | None:
        chance = self.chance.random()
        if chance >= 0.2:
            return None
        if chance < 0.05 and batch.bucket > min(COST_S):
            self.too_large.update(batch.numbers)
            return OutOfDeviceMemory("too large")
        self.failed.update(batch.numbers)
        return OSError("no luck")

    def cancel(self, ask: asyncio.Task[Result]) -> None:
        self.cancelled.add(ask)
        ask.cancel()

    def seconds(self, most: float) -> float:
        """Returns a duration whose end virtual time meets exactly."""
        return self.chance.randrange(int(most * 1024)) / 1024

    async def arrive(self) -> None:
        loop = asyncio.get_running_loop()
        numbers = itertools.count(1)
        for _ in range(self.chance.randint(1, 120)):
            await asyncio.sleep(self.chance.choice([0.0, 0.0, self.seconds(2.0)]))
            images = list(itertools.islice(numbers, self.chance.choice([1, 1, 2, 3, 8, self.chance.randint(1, 30)])))
            deadline = loop.time() + self.seconds(20.0) if self.expires else NO_DEADLINE
            size = self.chance.choice(self.sizes)
            model, mode = self.chance.choice(self.models), self.chance.choice(self.modes)
            priority = self.priorities[images[0] % len(self.priorities)]
            ask = model.ask(images, mode, deadline, size, priority)
            self.expected[ask] = images
            if self.cancels and self.chance.random() < 0.3:
                loop.call_later(self.seconds(10.0), self.cancel, ask)

    async def drain(self) -> None:
        await asyncio.gather(*(model.batcher.drain(self.seconds(20.0)) for model in self.models))

    def check_while_it_runs(self) -> None:
        """Checks the invariants that hold whenever everything that could happen has happened."""
        assert len(self.worker.staged) <= 1
        busy = self.worker.running == self.lanes.count
        assert busy or not self.worker.staged
        assert busy or self.delay_s or not any(model.batcher.waiting_images for model in self.models)
        for model in self.models:
            assert 0 <= model.batcher.waiting_images <= model.batcher.admission.images <= self.limits["max_images"]
            assert 0 <= model.batcher.admission.size_bytes <= self.limits["max_bytes"]

    def check_outcomes(self) -> None:
        answered = 0
        is_tight = self.limits["max_images"] == 30 or self.limits["max_bytes"] == 500
        for ask, images in self.expected.items():
            allowed: set[type[BaseException]] = {QueueFull} if is_tight else set()
            most_bytes = len(images) * math.prod(TALL) * 3
            never_fits = len(images) > self.limits["max_images"] or most_bytes > self.limits["max_bytes"]
            allowed |= {InvalidArgument} if never_fits else set()
            allowed |= {ExecutionFailed} if self.failed.intersection(images) else set()
            allowed |= {ShuttingDown, ModelNotReady} if self.drains else set()
            allowed |= {asyncio.CancelledError} if ask in self.cancelled else set()
            allowed |= {DeadlineExceeded, DeadlineUnreachable} if self.expires else set()
            try:
                assert numbers_of(ask.result()) == images
                answered += 1
            except (XlaserveError, asyncio.CancelledError) as error:
                assert type(error) in allowed
        assert answered, "a batcher that refuses everything would pass"

    def check_what_is_left(self) -> None:
        ran = Counter(number for batch in self.worker.started for number in batch.numbers)
        assert max((ran - self.too_large).values()) == 1, "an image ran twice"
        assert all(model.is_empty() and not model.crashes for model in self.models)
        assert not self.worker.running
        assert lanes_are_free(self.lanes)


@pytest.mark.parametrize("seed", range(100))
async def test_every_job_settles_once_whatever_happens(
    virtual_time: Any, make: Make, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, logger="xlaserve.engine.batching")
    chaos = Chaos(make, seed)
    virtual_time.when_quiet.append(chaos.check_while_it_runs)
    arriving = asyncio.create_task(chaos.arrive())
    if chaos.drains:
        await asyncio.sleep(chaos.seconds(60.0))
    else:
        await arriving
        await asyncio.wait(chaos.expected)
    await chaos.drain()
    await arriving
    await asyncio.wait(chaos.expected)
    chaos.check_outcomes()
    await asyncio.sleep(100)  # all that is still on the device ends
    chaos.check_what_is_left()
