"""A model whose programs compile in virtual time, beside traffic."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

import numpy as np
from tests.fakes import outputs_of

from xlaserve.config import Bucket, Mode, ModelSettings
from xlaserve.engine.batching.batcher import Batcher
from xlaserve.engine.batching.lanes import Lanes
from xlaserve.engine.batching.worker import Batch, Run
from xlaserve.engine.buckets.planner import Cost
from xlaserve.engine.inputs import Images
from xlaserve.engine.program import Compilation, Executable, Outputs, Warmed
from xlaserve.engine.request import EngineRequest
from xlaserve.engine.warmup.background import Background
from xlaserve.engine.warmup.beside_traffic import BesideTraffic
from xlaserve.engine.warmup.ledger import Ledger
from xlaserve.engine.warmup.verify import Verifier

RUN_S = 1.0


COMPILE_S = 100.0


NEVER = math.inf


SQUARE, WIDE, TALL, HUGE = (8, 8), (4, 8), (8, 4), (16, 16)


GRAPH_ANSWER = 0.0


ANSWERS = {Mode.XLA: 1.0, Mode.EAGER: 2.0, Mode.OPENVINO: 4.0, Mode.GRAPH: GRAPH_ANSWER}


class Compiler(Executor):
    """Compiles one after the other, each for COMPILE_S."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.submitted = 0
        self._loop = loop
        self._free_at = 0.0

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.submitted += 1
        future: Future[Any] = Future()
        self._free_at = max(self._free_at, self._loop.time()) + COMPILE_S

        def end() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(fn(*args, **kwargs))
                except Exception as error:
                    future.set_exception(error)

        self._loop.call_at(self._free_at, end)
        return future


class BackgroundModel:
    """A model with a bucket of 4 for SQUARE, on one lane on which every batch takes RUN_S, or 3 in graph mode."""

    platform = "fake"

    def __init__(
        self,
        modes: tuple[Mode, ...] = (Mode.XLA,),
        verifier: Verifier | None = None,
        *,
        sides: tuple[int | None, int | None] = (None, None),
        resolutions: int = 2,
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.compiler = Compiler(self.loop)
        self.compiled: list[tuple[Mode, Bucket]] = []
        self.compile_errors: dict[Mode, Exception] = {}
        self.refused: set[tuple[int, ...]] = set()
        self.seconds_of: Callable[[Mode, Bucket], float] = lambda mode, bucket: RUN_S
        self.ledger = Ledger("model", "1")
        self.running = 0
        self.expecting_depth = 0
        lanes = Lanes(1)
        settings = ModelSettings(name="model", source="fake", modes=modes, max_background_resolutions=resolutions)
        self.background = Background(
            settings=settings,
            any_size=self._executable(Mode.GRAPH),
            sides=sides,
            modes=settings.compiled_modes,
            buckets=[Bucket(1, *SQUARE), Bucket(2, *SQUARE), Bucket(4, *SQUARE)],
            beside=BesideTraffic(
                program=self,
                lanes=lanes,
                worker=self,  # type: ignore[arg-type]
                ledger=self.ledger,
                compiling=self.compiler,
                expecting=lambda step: self,
                verifier=verifier,
            ),
        )
        self.batcher = Batcher(
            name="model",
            programs={(mode, Bucket(4, *SQUARE)): self._warmed(mode, RUN_S) for mode in modes},
            lanes=lanes,
            worker=self,  # type: ignore[arg-type]
            observer=self,
            max_images=1000,
            max_bytes=1_000_000,
            clock=self.loop.time,
            opener=self.background,
        )

    def __enter__(self) -> None:
        self.expecting_depth += 1

    def __exit__(self, *args: object) -> None:
        self.expecting_depth -= 1

    # A program

    def compile(self, mode: Mode, bucket: Bucket) -> Compilation:
        assert self.expecting_depth == 1
        if mode in self.compile_errors:
            raise self.compile_errors[mode]
        self.compiled.append((mode, bucket))
        return Compilation(self._executable(mode), trace_s=1.0, compile_s=2.0)

    def _executable(self, mode: Mode) -> Executable:
        def executable(images: Images) -> Outputs:
            if images.shape[1:3] in self.refused:
                raise ValueError("negative dimension\nof a convolution")
            return (np.full((len(images), 1), ANSWERS[mode], np.float32),)

        return executable

    def _warmed(self, mode: Mode, seconds: float) -> Warmed:
        return Warmed(self._executable(mode), Cost(seconds, seconds))

    # A worker

    def reserve(self, buckets: object, channels: int = 3) -> None: ...

    def free(self, buckets: object, channels: int = 3) -> None: ...

    def submit(self, batch: Batch, done: Callable[[Run | BaseException], object]) -> None:
        assert self.running <= 1  # one on the lane, and one that is gathered
        self.running += 1
        try:
            outputs = batch.executable(np.zeros((*batch.bucket, 3), np.uint8))
            mode = next(mode for mode in ANSWERS if ANSWERS[mode] == outputs[0][0, 0])
            seconds = self.seconds_of(mode, batch.bucket)
            result: Run | BaseException = Run(outputs, 0.0, 0.0, seconds)
        except Exception as error:
            result, seconds = error, RUN_S
        self.loop.call_later(seconds, self._end, result, done)

    def _end(self, result: Run | BaseException, done: Callable[[Run | BaseException], object]) -> None:
        self.running -= 1
        done(result)

    # An observer

    def batch_ran(self, *args: object) -> None: ...

    def batch_failed(self, *args: object) -> None: ...

    # A request

    async def ask(self, size: tuple[int, int], images: int = 1, mode: Mode = Mode.XLA) -> tuple[Mode, float]:
        """Returns the mode that a request ran in, and when it was answered."""
        mode = await self.batcher.open(size, mode)
        result = await self.batcher.run(EngineRequest((np.zeros((images, *size, 3), np.uint8),), mode, NEVER))
        answers = set(outputs_of(result)[0][:, 0])
        if mode is not Mode.AUTO:
            assert answers == {ANSWERS[mode]}
        return mode, self.loop.time()
