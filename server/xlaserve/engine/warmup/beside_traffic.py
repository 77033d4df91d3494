"""Programs made beside traffic: compiled on one thread that yields to everything else, and timed on the lanes."""

from __future__ import annotations

import asyncio
import logging
import statistics
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from xlaserve.config import Bucket, Mode
from xlaserve.engine import gil
from xlaserve.engine.batching.idle_runs import run_in_lane
from xlaserve.engine.batching.lanes import Lanes, Share
from xlaserve.engine.batching.worker import Batch, Run, Worker
from xlaserve.engine.buckets.planner import Cost
from xlaserve.engine.causes import failing_on_exit
from xlaserve.engine.inputs import RGB_IMAGE, Inputs, Rows
from xlaserve.engine.program import Compilation, Executable, Noted, Program, Warmed, not_noted
from xlaserve.engine.warmup.compiler import MIN_RUNS, At, noise, unnoted
from xlaserve.engine.warmup.kept_costs import MARGIN, WRONG, excess
from xlaserve.engine.warmup.ledger import Ledger
from xlaserve.engine.warmup.verify import Verified, Verifier
from xlaserve.errors import ModelFailed

UNMEASURED_S: Final = 60.0
"""The cost of a run, for messages and limits, before any was measured."""

log = logging.getLogger(__name__)


@dataclass(eq=False, kw_only=True)
class BesideTraffic:
    """Makes the programs of one model. All methods run on the event loop.

    All that may compile something is done on a thread of `compiling`, in a `turn` and in an `expecting()`, both of the
    step in words.
    """

    program: Program
    lanes: Lanes
    worker: Worker
    ledger: Ledger
    compiling: Executor
    turn: Callable[[str], AbstractAsyncContextManager[object]] = lambda step: nullcontext()
    """Held while a program is compiled: one at a time."""
    expecting: At = unnoted
    noted: Noted = not_noted
    """Wraps an executable so that its runs are recorded as under way."""
    verifier: Verifier | None = None
    inputs: Inputs = RGB_IMAGE
    """The model's inputs."""
    _share: Share = field(default_factory=lambda: Share(lambda: False), init=False)
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    """Held for each run that is timed for this model: a share has one turn at a time."""

    async def make(self, mode: Mode, bucket: Bucket, known: tuple[Bucket, Warmed] | None = None) -> Warmed:
        """Compiles, verifies, times and records a program. Raises the error of any of these steps.

        Beside traffic, programs take longer than at rest. So a `known` program, whose cost was measured at rest, is
        timed now as well: the ratio of both times now is the ratio of their costs.
        """
        loop = asyncio.get_running_loop()
        step = f"compiling mode {mode}, bucket {bucket}"
        async with self.turn(step):
            made = await loop.run_in_executor(self.compiling, self._compile_one, mode, bucket, step)
        compilation, verified, rows = made
        cost = compilation.cost
        if cost is not None and verified is not None:
            factor = excess(cost, verified.fastest_s, self.lanes.count)
            if factor > MARGIN:
                log.info(WRONG, self.ledger.model, mode, bucket, factor, verified.fastest_s * 1000, "it is")
                cost = None
        if cost is None:
            seconds = await self.time(compilation.executable, bucket, rows)
            cost = Cost(seconds, seconds)  # measured beside traffic: idle and loaded are not told apart
            if known is not None:
                known_bucket, warmed = known
                known_rows = await loop.run_in_executor(self.compiling, noise, known_bucket, self.inputs)
                ratio = seconds / await self.time(warmed.executable, known_bucket, known_rows)
                cost = Cost(warmed.cost.alone_s * ratio, warmed.cost.loaded_s * ratio)
            if compilation.cost is not None:
                cost = Cost(*map(min, cost, compilation.cost))
        return self.ledger.record(mode, bucket, compilation, cost, verified, in_background=True)

    def forget(self, height: int, width: int) -> None:
        """Drops the sample of a resolution of which no more programs are made."""
        if self.verifier is not None:
            self.verifier.forget(height, width)

    def _compile_one(self, mode: Mode, bucket: Bucket, step: str) -> tuple[Compilation, Verified | None, Rows]:
        """Returns the executable, and rows to time it with, which take too long to make for the event loop."""
        with self.expecting(step), gil.shared(), failing_on_exit():
            compilation, verified = self.program.compile(mode, bucket), None
            if self.verifier is not None:
                again = partial(self.program.compile, mode, bucket)
                compilation, verified = self.verifier.verify(mode, bucket, compilation, again)
                if bucket.batch > 1 and self.verifier.is_dependent:
                    raise ModelFailed(f"{bucket} is left out: an image's answer depends on the others of its batch")
            return compilation, verified, noise(bucket, self.inputs)

    async def time(self, executable: Executable, bucket: Bucket, rows: Rows) -> float:
        """Returns the median seconds of a few runs, each in its turn on a lane. Raises the errors of the executable."""
        noted = self.noted(executable, f"bucket {bucket}, which is timed", UNMEASURED_S)
        batch = Batch(noted, bucket, [rows])
        seconds = []
        for _ in range(MIN_RUNS):
            async with self._turn:
                seconds.append(await self._run(batch))
        return statistics.median(seconds)

    async def _run(self, batch: Batch) -> float:
        """Returns the seconds of one run, in its turn."""
        await self.lanes.acquire(self._share)
        return (await run_in_lane(batch, self.lanes, self.worker, self._charge)).execute_s

    def _charge(self, run: Run | BaseException) -> None:
        if isinstance(run, Run):
            self._share.virtual_s += run.execute_s
