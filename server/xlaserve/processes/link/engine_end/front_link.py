"""An engine's link to one front, whose jobs it runs. The front may die at any moment."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import pickle
import threading
import weakref
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, Final

from xlaserve.engine.inputs import Layout, Rows, layout, size_bytes
from xlaserve.engine.request import WEIGHTS, EngineRequest, Result, check_row_shapes
from xlaserve.errors import ExecutionFailed, QueueFull, XlaserveError, clear_tracebacks
from xlaserve.processes.link.arena import MAX_INLINE_BYTES, ArenaView, Memory, arrays_bytes, arrays_in, rows_bytes
from xlaserve.processes.link.channel import Channel
from xlaserve.processes.link.engine_end.hosted_models import Hosted, HostedModels
from xlaserve.processes.link.link_records import (
    MODES,
    Answered,
    Ask,
    Cancel,
    Count,
    Counted,
    Failed,
    Garbled,
    Moved,
    OutputLayout,
    Outstanding,
    Published,
    Record,
    Refused,
    Released,
    ReleaseModel,
    Settled,
    Submit,
)
from xlaserve.processes.link.record_codec import RecordReader, pack_error, unpack_request

log = logging.getLogger(__name__)

MAX_QUESTIONS: Final = 64
"""Bound of a front's questions that are under way at a time."""
MAX_COUNTS: Final = 8
"""Bound of the `Count` records that a front has not answered."""

Answer = Callable[[str, Mapping[str, Any]], Awaitable[object]]
"""Answers a question of a front, given its arguments, with plain data of JSON. Raises any XlaserveError."""


class FrontLink:
    """The link to a front, which may have `max_jobs` jobs of `models` under way, with pixels and outputs in `view`.

    Large outputs are copied on the thread of `copying`. `on_moved` is called once the front sends its new requests to
    the engine in this one's place, `on_end` once the link has ended. All methods run on the event loop.
    """

    def __init__(
        self,
        models: HostedModels,
        view: ArenaView,
        max_jobs: int,
        *,
        answer: Answer,
        copying: ThreadPoolExecutor,
        on_moved: Callable[[], object],
        on_end: Callable[[FrontLink], object],
    ) -> None:
        self._models = models
        self._view = view
        self._max_jobs = max_jobs
        self._answer_question = answer
        self._copying = copying
        self._on_moved = on_moved
        self._on_end = on_end
        self._running: dict[int, asyncio.Task[None]] = {}
        self._asked: dict[int, asyncio.Task[None]] = {}
        self._acquired: dict[int, Hosted] = {}
        """Models, by id, that were published to the front and that it has not released."""
        self._published: frozenset[int] = frozenset()
        self.has_moved = False
        """Whether the front has linked to the engine in this one's place."""
        self.tally: Any = None
        """The last counts of the front; None before the first."""
        self._counting: dict[int, asyncio.Future[None]] = {}
        self._releasing: dict[int, weakref.ref[Memory]] = {}
        """Jobs that have ended while a batch may still read their pixels."""
        self._last_job = 0
        self._layouts: dict[Layout, int] = {}
        self._worked: set[int] = set()
        """Models with jobs that have ended in this turn of the loop."""
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self.channel = Channel(RecordReader.from_front(), self._receive, self._end)

    def publish(self, record: Published) -> None:
        """Sends the front the record of the models that there are now."""
        models = self._models.by_id
        for number in self._acquired.keys() - models.keys():
            self._acquired.pop(number).release()
        for number in models.keys() - self._published:
            self._acquired[number] = models[number]
            models[number].acquire()
        self._published = frozenset(models)
        self.channel.send(record)

    def release_all(self) -> None:
        """Releases all models on behalf of the front."""
        acquired, self._acquired = self._acquired, {}
        for hosted in acquired.values():
            hosted.release()

    def count(self, number: int) -> asyncio.Future[None]:
        """Asks for the counts of the front; done once `tally` has them, or the link has ended.

        A front that leaves `MAX_COUNTS` requests unanswered is not asked again until it answers.
        """
        if len(self._counting) >= MAX_COUNTS:
            return next(reversed(self._counting.values()))
        counting = self._counting[number] = self._loop.create_future()
        self.channel.send(Count(number))
        return counting

    def _counted(self, number: int, tail: bytes) -> None:
        counting = self._counting.pop(number, None)
        if counting is None:
            raise Garbled("a tally that nobody asked for")
        self.tally = json.loads(tail)
        if not counting.done():
            counting.set_result(None)

    def _receive(self, record: Record) -> None:
        match record:
            case Submit():
                self._begin(record)
            case Ask():
                self._ask(record)
            case Counted(number, tail):
                self._counted(number, tail)
            case ReleaseModel(model):
                if (hosted := self._acquired.pop(model, None)) is not None:
                    hosted.release()
            case Moved():
                self.has_moved = True
                self._on_moved()
            case Cancel(job) if job in self._asked:
                self._asked[job].cancel()
            case Cancel(job):
                if (task := self._running.get(job)) is not None:  # else its answer is on the way
                    task.cancel()
                    task.add_done_callback(partial(self._cancelled, job))
            case _:
                raise Garbled(f"a record of an engine, {type(record).__name__}")

    def _begin(self, submit: Submit) -> None:
        job = submit.job
        if job <= self._last_job:
            raise Garbled(f"job {job} after job {self._last_job}")
        if len(self._running) + len(self._releasing) >= self._max_jobs:
            raise Garbled(f"more than {self._max_jobs} jobs at a time")
        if submit.mode >= len(MODES) or submit.priority not in WEIGHTS or math.isnan(submit.deadline):
            raise Garbled(f"job {job} with mode {submit.mode}, priority {submit.priority}, deadline {submit.deadline}")
        # Without inputs, the model was unloaded while the job was on its way.
        inputs = self._models.inputs(submit.model)
        of_rows = layout(inputs, submit.height, submit.width)
        if not submit.images or (inputs and not arrays_bytes(1, of_rows)):
            raise Garbled(f"job {job} without rows")
        try:
            memory = self._view.memory(submit.offset, submit.size_bytes)
            rows = arrays_in(memory, 0, submit.images, of_rows)
        except ValueError as error:
            raise Garbled(f"job {job} with {error}") from None
        self._last_job = job
        self._running[job] = self._loop.create_task(self._run(submit, rows, memory))

    async def _run(self, submit: Submit, rows: Rows, memory: Memory) -> None:
        """Runs a job and sends its outcome. Raises nothing, and never waits for the front."""
        job = submit.job
        error: BaseException | None = None
        try:
            request = unpack_request(submit, rows)
            del rows
            result = await self._result(submit, request)
            settled = await self._write(submit, memory, request, result)
        except asyncio.CancelledError as cancelled:
            error = cancelled
        except XlaserveError as failed:
            error = failed
            self.channel.send(Failed(job, pack_error(failed)))
        except Exception as unexpected:
            error = unexpected
            log.exception("a job could not be run")
            self.channel.send(Failed(job, pack_error(ExecutionFailed("the model could not run this request"))))
        if self._running.pop(job, None) is None:  # the link has ended
            return
        self._tell_outstanding(submit.model)
        if error is None:
            self.channel.send(settled)
            return
        clear_tracebacks(error)  # their frames hold the pixels
        self._releasing[job] = weakref.ref(memory, partial(self._memory_freed, job))

    def _ask(self, ask: Ask) -> None:
        if len(self._asked) >= MAX_QUESTIONS:
            self.channel.send(Refused(ask.number, pack_error(QueueFull(f"{MAX_QUESTIONS} such calls are under way"))))
            return
        try:
            question, arguments = json.loads(ask.tail)
        except ValueError:
            raise Garbled("a question that is none") from None
        task = self._asked[ask.number] = self._loop.create_task(self._answer(ask.number, question, arguments))
        task.add_done_callback(lambda _: self._asked.pop(ask.number, None))

    async def _answer(self, number: int, question: str, arguments: Mapping[str, Any]) -> None:
        try:
            answer = json.dumps(await self._answer_question(question, arguments))
        except XlaserveError as error:
            self.channel.send(Refused(number, pack_error(error)))
        except Exception:
            log.exception("a question of a front could not be answered: %s", question[:64])
            self.channel.send(Refused(number, pack_error(ExecutionFailed("the server could not do this"))))
        else:
            self.channel.send(Answered(number, answer.encode()))

    async def _result(self, submit: Submit, request: EngineRequest) -> Result:
        engine = self._models.engine(submit.model)
        if submit.when_idle:
            return await engine.run_when_idle(request)
        with engine.admit(submit.images, size_bytes(request.rows)) as admitted:
            return await admitted.run(request)

    async def _write(self, submit: Submit, memory: Memory, request: EngineRequest, result: Result) -> Settled:
        """Copies the outputs into the extent, behind the rows, and returns the record of the job's end."""
        batches, timings, traced = result
        check_row_shapes(batches)
        of_outputs: Layout = tuple((output.dtype, output.shape[1:]) for output in batches[0].outputs)
        try:
            places = arrays_in(memory, rows_bytes(request.rows), submit.images, of_outputs)
        except ValueError as error:
            log.error("a model's outputs are larger than its snapshot says: %s", error)
            raise ExecutionFailed("the model's outputs are larger than expected") from None

        def write() -> None:
            for rows, outputs in batches:
                for place, output in zip(places, outputs, strict=True):
                    place[rows[0] : rows[-1] + 1] = output

        if sum(place.nbytes for place in places) <= MAX_INLINE_BYTES:
            write()
        else:  # the thread's own references keep the memory if this is cancelled
            await self._loop.run_in_executor(self._copying, write)
        number = self._layouts.get(of_outputs)
        if number is None:
            number = self._layouts[of_outputs] = len(self._layouts)
            self.channel.send(OutputLayout(number, pickle.dumps(of_outputs)))
        tail = pickle.dumps(traced) if traced else b""
        return Settled(submit.job, number, timings.queue_s, timings.gather_s, timings.execute_s, tail)

    def _cancelled(self, job: int, task: asyncio.Task[None]) -> None:
        """Gives back a job that was cancelled before its task began; of any other, `_run` has sent the end."""
        if self._running.pop(job, None) is not None:
            self.channel.send(Released(job))

    def _memory_freed(self, job: int, _: object) -> None:
        """Gives back a job whose memory nothing uses any more. Called on any thread."""
        if threading.get_ident() == self._thread:
            self._release(job)
        else:
            with suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._release, job)

    def _release(self, job: int) -> None:
        if self._releasing.pop(job, None) is not None:
            self.channel.send(Released(job))

    def _tell_outstanding(self, model: int) -> None:
        """Sends the outstanding seconds of a model, once in a turn of the loop."""
        self._models.note_work(model)
        if not self._worked:
            self._loop.call_soon(self._send_outstanding)
        self._worked.add(model)

    def _send_outstanding(self) -> None:
        for model in self._worked:
            if (seconds := self._models.outstanding_s(model)) is not None:
                self.channel.send(Outstanding(model, seconds))
        self._worked.clear()

    def _end(self, reason: str) -> None:
        """Drops all that the front had here: jobs that wait are cancelled, and batches under way end without it."""
        self._on_end(self)
        self.release_all()
        for counting in self._counting.values():
            if not counting.done():
                counting.set_result(None)
        running, self._running = self._running, {}
        self._releasing.clear()
        self._view.end()  # not with the link, whose objects refer to each other and may live for long
        for task in (*running.values(), *self._asked.values()):
            task.cancel()
        log.info("the link to a front ended with %d jobs under way: %s", len(running), reason)
