"""The jobs and questions that a front has under way in an engine."""

from __future__ import annotations

import asyncio
import json
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from xlaserve.engine.inputs import Layout, Rows, size_bytes
from xlaserve.engine.request import BatchRows, EngineRequest, Result
from xlaserve.engine.timings import Timings
from xlaserve.engine.trace_context import TracedBatch
from xlaserve.errors import EngineLost, QueueFull
from xlaserve.processes.link.arena import MAX_INLINE_BYTES, Arena, Extent, arrays_in, rows_bytes
from xlaserve.processes.link.link_records import Ask, Cancel, Garbled, Record, Settled
from xlaserve.processes.link.record_codec import pack_request, unpack_error


class _Job(NamedTuple):
    """A job that the engine has."""

    settled: asyncio.Future[Result]
    extent: Extent
    """Kept until the engine is done with it."""
    images: int
    outputs_at: int
    """The byte of the extent at which the outputs begin."""


class EngineCalls:
    """Jobs and questions under way in one engine, of which `max_jobs` may be jobs; pixels and outputs lie in `arena`.

    `send` sends a record to the engine, or drops it where the link has ended. The link passes on what the engine
    answers. All methods run on the event loop.
    """

    def __init__(self, arena: Arena, max_jobs: int, send: Callable[[Record], None]) -> None:
        self.arena = arena
        self.send = send
        self._max_jobs = max_jobs
        self._jobs: dict[int, _Job] = {}
        self._questions: dict[int, asyncio.Future[Any]] = {}
        self._last_number = 0
        self._layouts: dict[int, Layout] = {}
        self._loop = asyncio.get_running_loop()
        self._copying = ThreadPoolExecutor(1, "copy")
        self._is_lost = False

    @property
    def jobs(self) -> int:
        """Jobs that the engine has not given back."""
        return len(self._jobs)

    def check(self) -> None:
        """Raises EngineLost where the link has ended."""
        if self._is_lost:
            raise _engine_lost()

    async def run(self, model: int, request: EngineRequest, extent: Extent, *, when_idle: bool = False) -> Result:
        """Runs a request to a model in the engine; the rows lie at the beginning of an extent.

        Raises any error of the engine, QueueFull, and EngineLost. A call that is cancelled is cancelled there.
        """
        self.check()
        if len(self._jobs) >= self._max_jobs:
            raise QueueFull(f"{self._max_jobs} requests are under way in the engine, and no more fit")
        number = self._next_number()
        settled: asyncio.Future[Result] = self._loop.create_future()
        self._jobs[number] = _Job(settled, extent, request.images, rows_bytes(request.rows))
        self.send(pack_request(request, number, model, extent.offset, len(extent.memory), when_idle=when_idle))
        try:
            return await settled
        except asyncio.CancelledError:
            if number in self._jobs:
                self.send(Cancel(number))
            raise

    async def ask(self, question: str, **arguments: object) -> Any:
        """Returns the engine's answer to a question. Arguments and answer are plain data of JSON.

        Raises any error of the engine, and EngineLost. A question that is cancelled is, if possible, cancelled there.
        """
        self.check()
        number = self._next_number()
        answered = self._questions[number] = self._loop.create_future()
        self.send(Ask(number, json.dumps([question, arguments]).encode()))
        try:
            return await answered
        except asyncio.CancelledError:
            self.send(Cancel(number))
            raise
        finally:
            self._questions.pop(number, None)

    async def answered(self) -> None:
        """Returns once all questions are answered."""
        if self._questions:
            await asyncio.wait([*self._questions.values()])

    async def copy(self, rows: Rows, buffer: Rows) -> None:
        """Copies rows into the arena."""
        if size_bytes(rows) <= MAX_INLINE_BYTES:
            copy_rows(buffer, rows)
        else:  # the thread's own references keep the memory if this is cancelled
            await self._loop.run_in_executor(self._copying, copy_rows, buffer, rows)

    def settle(self, record: Settled) -> None:
        """Ends a job with its outputs. Raises Garbled for a job that the engine does not have."""
        job = self._job(record.job)
        del self._jobs[record.job]
        if job.settled.done():
            return
        outputs = arrays_in(job.extent.memory, job.outputs_at, job.images, self._layouts[record.layout])
        traced: list[TracedBatch] = pickle.loads(record.tail) if record.tail else []
        timings = Timings(queue_s=record.queue_s, gather_s=record.gather_s, execute_s=record.execute_s)
        job.settled.set_result(Result([BatchRows(range(job.images), outputs)], timings, traced))

    def fail(self, number: int, tail: bytes) -> None:
        """Ends a job with a packed error; the engine still holds its extent. Raises Garbled."""
        settled = self._job(number).settled
        if not settled.done():
            settled.set_exception(unpack_error(tail))

    def release(self, number: int) -> None:
        """Takes back the extent of a job that has failed or was cancelled. Raises Garbled."""
        job = self._job(number)
        del self._jobs[number]
        if not job.settled.done():
            job.settled.set_exception(_engine_lost())

    def add_layout(self, number: int, layout: Layout) -> None:
        """Notes the layout of outputs that jobs name by `number`."""
        self._layouts[number] = layout

    def answer(self, number: int, tail: bytes) -> None:
        """Ends a question with an answer in JSON."""
        if (answered := self._questions.pop(number, None)) is not None and not answered.done():
            answered.set_result(json.loads(tail))

    def refuse(self, number: int, tail: bytes) -> None:
        """Ends a question with a packed error."""
        if (answered := self._questions.pop(number, None)) is not None and not answered.done():
            answered.set_exception(unpack_error(tail))

    def lose(self) -> int:
        """Fails all that is under way with EngineLost, as the link has ended. Returns how many jobs there were."""
        self._is_lost = True
        questions, self._questions = self._questions, {}
        jobs, self._jobs = self._jobs, {}
        for ending in (*questions.values(), *(job.settled for job in jobs.values())):
            if not ending.done():
                ending.set_exception(_engine_lost())
        self._copying.shutdown(wait=False)
        self.arena.end()  # not with the link, whose objects refer to each other and may live for long
        return len(jobs)

    def _next_number(self) -> int:
        """Returns the number of the next job or question."""
        self._last_number += 1
        return self._last_number

    def _job(self, number: int) -> _Job:
        try:
            return self._jobs[number]
        except KeyError:
            raise Garbled(f"an answer to job {number}, which it does not have") from None


def copy_rows(buffer: Rows, rows: Rows) -> None:
    """Copies rows into a buffer of the same layout."""
    for place, each in zip(buffer, rows, strict=True):
        np.copyto(place, each)


def _engine_lost() -> EngineLost:
    return EngineLost("the process that runs this model has ended; another one takes its place")
