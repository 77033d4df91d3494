"""Cancelled calls, failing batches, deadlines, drains, full queues, and killed processes, all drawn from a seed.

Whatever happens, in one process or across several: each request settles once, with its own rows or an error that it may
have, what nothing has happened to is answered, and in the end nothing is held at either end.
"""

from __future__ import annotations

import asyncio
import math
import random
import subprocess
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from tests.fakes import outputs_of
from tests.server.processes.link.engines import (
    EngineProcess,
    EnginesElsewhere,
    EnginesHere,
    Serving,
    SeveralEngines,
    until_nothing_is_held,
)
from tests.server.processes.link.front_process import start_front
from tests.server.processes.link.models import LARGE, PATIENCE_S, SMALL, TALL, pictures

from xlaserve.config import Mode
from xlaserve.engine.inputs import Rows
from xlaserve.engine.request import WEIGHTS, EngineRequest, Result
from xlaserve.errors import (
    DeadlineExceeded,
    DeadlineUnreachable,
    EngineLost,
    ExecutionFailed,
    ModelNotReady,
    QueueFull,
    ShuttingDown,
)

SECONDS = 0.4
JOBS = 150
MODELS = ("numbers", "numbers", "slow", "maps", "flaky", "failing", "short of memory", "narrow")


@dataclass(frozen=True)
class Job:
    """A request to one of the models."""

    at_s: float
    model: str
    numbers: tuple[int, ...]
    size: tuple[int, int]
    mode: Mode
    priority: int
    in_place: bool
    patience_s: float | None
    cancel_after_s: float | None

    @classmethod
    def draw(cls, chance: random.Random) -> Job:
        model = chance.choice(MODELS)
        size = chance.choice((SMALL, SMALL, TALL, LARGE)) if model != "maps" else SMALL
        most = 1 + chance.randrange(2 if model == "maps" or size == LARGE else 12)
        return cls(
            at_s=chance.choice((0.0, chance.random(), chance.randrange(4) / 4)) * SECONDS,
            model=model,
            numbers=tuple(chance.randrange(2**24) for _ in range(most)),
            size=size,
            mode=chance.choice((Mode.XLA, Mode.GRAPH)),
            priority=chance.choice([*WEIGHTS]),
            in_place=chance.random() < 0.5,
            patience_s=chance.random() * 0.2 if chance.random() < 0.25 else None,
            cancel_after_s=chance.random() * 0.1 if chance.random() < 0.25 else None,
        )

    async def run(self, engines: Serving) -> Result:
        pixels = pictures(*self.numbers, size=self.size)
        rows: Rows = (pixels,)
        deadline = math.inf if self.patience_s is None else time.perf_counter() + self.patience_s
        with engines.engine(self.model).admit(len(pixels), pixels.nbytes) as admitted:
            if self.in_place:
                rows = admitted.buffer(len(pixels), self.size)
                rows[0][...] = pixels
            return await admitted.run(EngineRequest(rows, self.mode, deadline, self.priority))

    def is_answered_by(self, result: Result) -> bool:
        first, *others = outputs_of(result)
        numbers = np.array(self.numbers)
        if self.model == "maps":
            return bool((first == (numbers & 255)[:, None, None]).all())
        return bool((first == numbers.astype(np.float32)).all() and (others[0][:, 0] == 2 * first).all())


class Floods:
    """Floods of a model until they are killed: other requests here, or another front."""

    def __init__(self, engines: Serving, path: Path | None) -> None:
        self._engines = engines
        self._path = path
        self._tasks: list[asyncio.Task[Result]] = []
        self._front: subprocess.Popen[bytes] | None = None

    async def begin(self) -> None:
        if self._path is None:
            job = Job(0.0, "slow", (1, 2, 3), SMALL, Mode.XLA, 1, False, None, None)
            self._tasks = [asyncio.create_task(job.run(self._engines)) for _ in range(200)]
        else:
            self._front = await asyncio.to_thread(start_front, self._path, "slow")

    def kill(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._front is not None:
            self._front.kill()

    async def end(self) -> None:
        self.kill()
        if self._tasks:
            await asyncio.wait(self._tasks)
        self._tasks.clear()
        if self._front is not None:
            await asyncio.to_thread(self._front.wait)


class Chaos:
    """The events of some tenths of a second."""

    def __init__(self, seed: int, *, has_process: bool) -> None:
        chance = random.Random(seed)
        self.jobs = [Job.draw(chance) for _ in range(JOBS)]
        self.front_dies_s = chance.random() * SECONDS if seed % 3 == 1 else None
        self.engine_dies_s = chance.random() * SECONDS if seed % 3 == 2 and has_process else None
        self.drained = chance.choice(MODELS) if self.engine_dies_s is None else None
        self.drain_s, self.drain_timeout_s = chance.random() * SECONDS, chance.choice((0.0, 0.05, PATIENCE_S))

    def may_end_with(self, job: Job) -> tuple[type[BaseException], ...]:
        allowed: list[type[BaseException]] = []
        if job.cancel_after_s is not None:
            allowed += [asyncio.CancelledError]
        if job.patience_s is not None:
            allowed += [DeadlineExceeded, DeadlineUnreachable]
        if job.model in ("failing", "flaky"):
            allowed += [ExecutionFailed]
        if job.model == "narrow":
            allowed += [QueueFull]
        if job.model == self.drained:
            allowed += [ModelNotReady, ShuttingDown]
        if self.engine_dies_s is not None:
            allowed += [EngineLost]
        return (*allowed,)

    async def run(self, engines: Serving, floods: Floods, process: EngineProcess | None) -> dict[str, int]:
        """Returns how many requests ended how, by the names of errors. `process` is the engine that may die."""
        if self.front_dies_s is not None:
            await floods.begin()
        loop = asyncio.get_running_loop()
        began = loop.time()

        async def ask(job: Job) -> Result:
            await asyncio.sleep(job.at_s)
            return await job.run(engines)

        async def drain(name: str) -> None:
            await asyncio.sleep(self.drain_s)
            await engines.renew(name, self.drain_timeout_s)

        asked = {asyncio.create_task(ask(job)): job for job in self.jobs}
        for task, job in asked.items():
            if job.cancel_after_s is not None:
                loop.call_at(began + job.at_s + job.cancel_after_s, task.cancel)
        if self.front_dies_s is not None:
            loop.call_at(began + self.front_dies_s, floods.kill)
        if self.engine_dies_s is not None and process is not None:
            loop.call_at(began + self.engine_dies_s, process.kill)
        draining = None if self.drained is None else asyncio.create_task(drain(self.drained))
        _, pending = await asyncio.wait(asked, timeout=PATIENCE_S)
        assert not pending, "each request settles"
        if draining is not None:
            await draining
        return Counter(self.check(job, task) for task, job in asked.items())

    def check(self, job: Job, task: asyncio.Task[Result]) -> str:
        """Returns how a request has ended, which is a way that it may end."""
        try:
            result = task.result()
        except self.may_end_with(job) as error:
            return type(error).__name__
        assert job.model != "failing"
        assert job.is_answered_by(result)
        return "answered"


@pytest_asyncio.fixture
async def unhandled() -> AsyncIterator[None]:
    """Nothing may be left to the loop's exception handler: a job that settles twice ends there."""
    contexts: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: contexts.append(context))
    yield
    assert not contexts


@pytest.mark.parametrize("door", ["here", "elsewhere", "spread over two"])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 60))])
async def test_each_request_settles_once_and_nothing_is_left(
    unhandled: None, tmp_path: Path, seed: int, door: str
) -> None:
    count = {"here": 0, "elsewhere": 1, "spread over two": 2}[door]
    chaos = Chaos(seed, has_process=count > 0)
    with ExitStack() as stack:
        processes = [stack.enter_context(EngineProcess(tmp_path / str(number))) for number in range(count)]
        engines: Serving
        if not processes:
            engines = EnginesHere()
        else:
            linked = [await EnginesElsewhere.connect(process) for process in processes]
            engines = linked[0] if count == 1 else SeveralEngines(linked)
        floods = Floods(engines, processes[-1].path if processes else None)
        try:
            outcomes = await chaos.run(engines, floods, processes[0] if processes else None)
            assert outcomes["answered"] > JOBS / 4 or chaos.engine_dies_s is not None, outcomes
            await floods.end()
            await until_nothing_is_held(engines)
        finally:
            await floods.end()
            await engines.stop()
