"""Engines for tests, in this process and in another one."""

from __future__ import annotations

import asyncio
import gc
import json
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from tests.server.processes.link.front_process import model_of
from tests.server.processes.link.models import PATIENCE_S, Gate, Models

from xlaserve.engine.model_engine import ModelEngine
from xlaserve.processes.link.front_end.engine_link import EngineLink, connect
from xlaserve.processes.link.front_end.remote_model import RemoteModel
from xlaserve.processes.link.spread import Spread


class Serving(Protocol):
    """The models of `models.py`, in this process or in others."""

    def engine(self, name: str) -> ModelEngine: ...

    async def renew(self, name: str, timeout_s: float) -> None:
        """Drains a model, and loads it again."""

    async def held(self) -> Any:
        """Returns all that is held for requests; a false value once nothing is."""

    async def stop(self) -> None: ...


class Engines(Serving, Protocol):
    """The engines of one process."""

    gate: Gate

    def compile(self) -> Coroutine[Any, Any, None]:
        """Lets programs compile of all resolutions that were opened."""

    async def admitted_images(self, name: str) -> int:
        """Returns the images that a model has taken in where it runs."""


class EnginesHere:
    """In this process."""

    def __init__(self) -> None:
        self.gate = Gate()
        self._models = Models(self.gate.files)

    def engine(self, name: str) -> ModelEngine:
        return self._models.batchers[name]

    async def renew(self, name: str, timeout_s: float) -> None:
        await self._models.renew(name, timeout_s)

    async def compile(self) -> None:
        self._models.compile()

    async def held(self) -> Any:
        return self._models.held()

    async def admitted_images(self, name: str) -> int:
        return self._models.batchers[name].admission.images

    async def stop(self) -> None:
        self.gate.open()
        await self._models.stop()
        self.gate.end()


class EngineProcess:
    """An engine process, without a link to it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.gate = Gate()
        arguments = [
            sys.executable,
            "-m",
            "tests.server.processes.link.engine_process",
            str(path),
            *map(str, self.gate.files),
        ]
        self._process = subprocess.Popen(
            arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=self.gate.files, text=True
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self.gate.open()
        self._process.stdin.close()
        try:
            self._process.wait(PATIENCE_S)
        finally:
            self._process.kill()
            self._process.wait()
            self._process.stdout.close()
            self.gate.end()

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        self._process.kill()

    async def ask(self, *command: Any) -> Any:
        return await asyncio.to_thread(self._ask, command)

    def _ask(self, command: tuple[Any, ...]) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


class EnginesElsewhere:
    """In another process, at the other end of a link."""

    def __init__(self, process: EngineProcess, link: EngineLink) -> None:
        self.process = process
        self.link = link
        self.gate = process.gate
        self.is_spread = False
        """Whether requests are spread, over one engine."""

    @classmethod
    async def connect(cls, process: EngineProcess, **options: Any) -> Self:
        return cls(process, await connect(process.path, **options))

    def model(self, name: str) -> RemoteModel:
        return model_of(self.link, name)

    def engine(self, name: str) -> ModelEngine:
        model = self.model(name)
        return Spread([model]) if self.is_spread else model

    async def renew(self, name: str, timeout_s: float) -> None:
        epoch = self.link.epoch
        await self.process.ask("renew", name, timeout_s)
        await until(lambda: self.link.epoch == epoch + 2)

    async def compile(self) -> None:
        await self.process.ask("compile")

    def held_here(self) -> Any:
        jobs, used_bytes = self.link.jobs, self.link.arena.used_bytes  # which looks for what has ended
        of_all = {
            model.snapshot.title: (model.admission.images, model.admission.size_bytes, model.share.used_bytes)
            for model in self.link.models.values()
        }
        held = {name: one for name, one in of_all.items() if any(one)}
        return (held, jobs, used_bytes) if held or jobs or used_bytes else None

    async def held(self) -> Any:
        return self.held_here() or (None if self.link.is_lost else await self.process.ask("held"))

    async def admitted_images(self, name: str) -> int:
        images, _, _ = (await self.process.ask("held")).get(name, (0, 0, 0))
        return int(images)

    async def stop(self) -> None:
        self.link.close()
        await self.link.lost()


class SeveralEngines:
    """In several processes, each with all models. Any but the last may be killed."""

    def __init__(self, engines: Sequence[EnginesElsewhere]) -> None:
        self.engines = [*engines]
        self.process = engines[-1].process
        self._spreads: dict[str, Spread] = {}

    @property
    def _there(self) -> list[EnginesElsewhere]:
        return [one for one in self.engines if not one.link.is_lost]

    def engine(self, name: str) -> ModelEngine:
        parts = [one.model(name) for one in self._there]
        spread = self._spreads.setdefault(name, Spread(parts))
        spread.use(parts)
        return spread

    async def renew(self, name: str, timeout_s: float) -> None:
        for one in self._there:
            await one.renew(name, timeout_s)

    async def held(self) -> Any:
        for one in self.engines:
            if held := await one.held():
                return held
        return None

    async def stop(self) -> None:
        for one in self.engines:
            await one.stop()


async def until(holds: Callable[[], bool], seconds: float = PATIENCE_S) -> None:
    """Returns once it holds, which nothing tells."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.002)


async def until_admitted(engines: Engines, name: str, images: int) -> None:
    """Returns once a model has taken in so many images where it runs."""
    deadline = time.monotonic() + PATIENCE_S
    while await engines.admitted_images(name) < images:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.002)


async def until_nothing_is_held(engines: Serving, *, collects: bool = True) -> None:
    """Returns once all that was held for requests was given back, but for what frames of errors keep, if `collects`."""
    deadline = time.monotonic() + PATIENCE_S
    while held := await engines.held():
        assert time.monotonic() < deadline, held
        if collects:
            gc.collect()
        await asyncio.sleep(0.002)
