"""A repository on programs that compile and run when the test says so."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from xlaserve.config import Bucket, BucketSettings, Mode, ModelSettings, Settings
from xlaserve.engine.batching.lanes import Lanes
from xlaserve.engine.batching.worker import Worker
from xlaserve.engine.inputs import Images
from xlaserve.engine.program import Compilation, Outputs
from xlaserve.engine.request import EngineRequest
from xlaserve.engine.warmup.ledger import Entry
from xlaserve.models.catalog import Model
from xlaserve.models.loader import Loader
from xlaserve.models.repository import Repository
from xlaserve.models.task import Classification
from xlaserve.models.version import State, Version
from xlaserve.telemetry.metrics import Metrics

NEVER = float("inf")
PATIENCE_S = 20


class Gate:
    """Where threads of the code under test wait until the test lets them through; open at first."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()
        self._reached = threading.Semaphore(0)

    def close(self) -> None:
        self._open.clear()
        while self._reached.acquire(blocking=False):
            pass

    def open(self) -> None:
        self._open.set()

    async def reached(self) -> None:
        """Waits until a thread waits here."""
        assert await asyncio.to_thread(self._reached.acquire, timeout=PATIENCE_S)

    def __call__(self) -> None:
        if not self._open.is_set():
            self._reached.release()
            assert self._open.wait(PATIENCE_S)


class GateAt(Gate):
    """Acts when the `number`th thread comes; by default, closes before it."""

    def __init__(self, number: int, then: Callable[[], object] | None = None) -> None:
        super().__init__()
        self._number = number
        self._then = then or self.close
        self._came = 0

    def __call__(self) -> None:
        self._came += 1
        if self._came == self._number:
            self._then()
        super().__call__()


class Program:
    """Answers each image with `answer`."""

    platform = "fake"

    def __init__(self, house: House, answer: int) -> None:
        self.running = Gate()
        self._house = house
        self._answer = answer

    def compile(self, mode: Mode, bucket: Bucket) -> Compilation:
        self._house.compiling()
        if self._house.compile_error:
            raise self._house.compile_error
        if error := self._house.compile_errors.get((mode, bucket)):
            raise error
        self._house.compiled.append((mode, bucket))

        def executable(images: Images) -> Outputs:
            self.running()
            assert images.shape == (*bucket, 3)
            return (np.full((bucket.batch, 1), self._answer, np.float32),)

        return Compilation(executable, trace_s=0.0, compile_s=0.0)


class House:
    """A repository and its surroundings, controlled by the test."""

    def __init__(self, **settings: Any) -> None:
        self.configured = [model("a")]
        self.settings_of_all: dict[str, Any] = {"drain_timeout_s": PATIENCE_S, **settings}
        self.compiling, self.loading, self.reading = Gate(), Gate(), Gate()
        self.programs: list[Program] = []
        self.compile_error: Exception | None = None
        self.compile_errors: dict[tuple[Mode, Bucket], Exception] = {}
        self.load_errors: dict[str, BaseException] = {}
        self.read_error: Exception | None = None
        self.compiled: list[tuple[Mode, Bucket]] = []
        self.changes: list[tuple[str, State]] = []
        self.entries: list[Entry] = []
        self.crashes = 0
        self.reads = 0
        self._changed = asyncio.Event()
        self._worker = Worker(4)
        self.lanes = Lanes(4)
        self._repository: Repository | None = None

    @property
    def repository(self) -> Repository:
        """Made at its first use, from what is configured then."""
        if self._repository is None:
            settings = Settings(models=tuple(self.configured), **self.settings_of_all)
            self._repository = Repository(
                settings=settings,
                loader=Loader(
                    settings=settings,
                    load_model=self._load_model,
                    lanes=self.lanes,
                    worker=self._worker,
                    on_crash=self._crash,
                ),
                read_models=self._read_models,
                metrics=Metrics(),
                on_change=self._change,
                on_record=self.entries.append,
            )
        return self._repository

    async def ask(self, name: str = "a", version: str = "", images: int = 1) -> list[int]:
        """Returns what the model that serves `name` answers: for each image, which loading that model was of."""
        served = self.repository.get(name, version)
        with served.engine.admit(images, images) as admitted:
            pixels = np.zeros((images, *served.inputs[0], 3), np.uint8)
            result = await admitted.run(EngineRequest((pixels,), served.mode(""), NEVER))
        parts = sorted(result.batches, key=lambda part: part.rows[0])
        return [int(answer) for part in parts for answer in part.outputs[0][:, 0]]

    def states(self, name: str = "a") -> list[State]:
        return [version.state for version in self.repository.index() if version.name == name]

    def answering(self, *versions: str) -> list[str]:
        """Returns the number of what answers requests to `a` that name these versions; empty for what is not ready."""
        served = (self.repository.versions("a") and self.repository._served["a"].get(version) for version in versions)
        return [one.settings.version if one else "" for one in served]

    async def close(self) -> None:
        for gate in (self.compiling, self.loading, self.reading, *(program.running for program in self.programs)):
            gate.open()
        await self.repository.drain(timeout_s=PATIENCE_S)
        await asyncio.to_thread(self._worker.stop)

    async def sees(self, state: State, name: str = "a") -> None:
        """Waits until a model has come to `state`."""
        while (name, state) not in self.changes:
            self._changed.clear()
            await self._changed.wait()

    def _change(self, version: Version) -> None:
        self.changes.append((version.name, version.state))
        self._changed.set()

    def _load_model(self, settings: ModelSettings, prepared: object = None) -> Model:
        self.loading()
        if error := self.load_errors.get(settings.title, self.load_errors.get(settings.name)):
            raise error
        self.programs.append(Program(self, len(self.programs) + 1))
        configured = settings.buckets or map(BucketSettings, settings.auto_buckets.candidates)
        sizes = [(b.batch, b.height or 2, b.width or 2) for b in configured]
        buckets = tuple(sorted({Bucket(*size) for size in sizes}))
        return Model(self.programs[-1], (None, None), Classification(1), "built in", settings=settings, buckets=buckets)

    def _read_models(self) -> Iterable[ModelSettings]:
        self.reads += 1
        self.reading()
        if self.read_error:
            raise self.read_error
        return self.configured

    def _crash(self) -> None:
        self.crashes += 1


def model(name: str, **settings: Any) -> ModelSettings:
    values = {"buckets": (1, 2), "modes": (Mode.XLA, Mode.GRAPH), **settings}
    return ModelSettings(name=name, source="fake", **values)
