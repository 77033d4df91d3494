"""The engine's end of links: runs the jobs of its fronts, each of which may die at any moment."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import pickle
import socket
import threading
import weakref
from collections.abc import Awaitable, Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

from xlaserve.config import Mode
from xlaserve.engine.batching.queue import WEIGHTS, Result
from xlaserve.engine.model_engine import ModelEngine
from xlaserve.engine.program import Images
from xlaserve.errors import (
    ExecutionFailed,
    ModelNotReady,
    QueueFull,
    UnsupportedFeature,
    XlaserveError,
    clear_tracebacks,
)
from xlaserve.processes.link.arena import ArenaView, Layout, Memory, aligned, outputs_in
from xlaserve.processes.link.channel import Channel
from xlaserve.processes.link.engine_state import CHANNELS, ModelSnapshot, Snapshot
from xlaserve.processes.link.link_records import (
    HELLO,
    MODES,
    Ask,
    Cancel,
    Count,
    Counted,
    Failed,
    Garbled,
    LayoutOf,
    Left,
    Levels,
    Moved,
    Outstanding,
    Published,
    Reader,
    Record,
    Refused,
    Released,
    Settled,
    Submit,
    Succeeded,
    Told,
    pack_error,
    unpack_hello,
    unpack_trace,
)

log = logging.getLogger(__name__)

GREETING_S: Final = 5.0
"""A front says what it is within this time."""
MAX_INLINE_BYTES: Final = 2**20
"""Outputs up to this size are copied on the event loop, in some 100 microseconds; others on a thread."""
ACCEPT_RETRY_S: Final = 0.1
CLOSING_S: Final = 1.0
"""How long a front may take to read its last answers."""
MAX_QUESTIONS: Final = 64
"""Of a front, under way at a time."""
MAX_COUNTS: Final = 8
"""Of a front, that it has not answered."""
COUNT_S: Final = 0.25
"""How long `count` waits for fronts that do not answer. What they told last counts."""
LEVELS_S: Final = 1.0
"""How often fronts are told what models have to do that have run something since."""

Answer = Callable[[str, Mapping[str, Any]], Awaitable[object]]
"""Answers a question of a front, given its arguments, with plain data of JSON. Raises any XlaserveError."""


class Hosted(NamedTuple):
    """A model that fronts may use."""

    snapshot: ModelSnapshot
    engine: ModelEngine
    enter: Callable[[], object] = lambda: None
    """Called for each front that may use it."""
    leave: Callable[[], object] = lambda: None
    """Called once for each of those, when it has no more use for it."""


class Host:
    """Takes in the links of fronts, runs their jobs, and has `answer` answer what they ask. Once in a while they are
    told `about` the engine: plain data. `on_linked` is called with each front that has come, `on_gone` with the last
    tally of each that has gone.

    All methods run on the event loop.
    """

    def __init__(
        self,
        answer: Answer | None = None,
        about: Callable[[], object] = lambda: None,
        on_gone: Callable[[Any], object] = lambda tally: None,
        on_linked: Callable[[], object] = lambda: None,
    ) -> None:
        self.answer: Answer = answer or _nobody_answers
        self._about = about
        self._on_gone = on_gone
        self._on_linked = on_linked
        self._has_successor = False
        self._counts = 0
        self.models: dict[int, Hosted] = {}
        """By the ids of their snapshots."""
        self.copying = ThreadPoolExecutor(1, "copy")
        self._snapshot = Snapshot(0, ())
        self._links: set[FrontLink] = set()
        self._left = asyncio.Event()
        """Set when a front has left, or linked to the engine in this one's place."""
        self._listening: list[asyncio.Task[None]] = []
        self._worked: set[int] = set()
        """Models of which jobs have ended since fronts were told."""
        self._greeting: set[asyncio.Task[None]] = set()

    @property
    def fronts(self) -> int:
        """Links that are open."""
        return len(self._links)

    def publish(self, models: Iterable[Hosted], details: object = None) -> None:
        """Has fronts use these models from now on, and no others. What they sent to others already fails."""
        self.models = {model.snapshot.id: model for model in models}
        self._snapshot = Snapshot(
            self._snapshot.epoch + 1, tuple(model.snapshot for model in self.models.values()), details
        )
        record = self._published()
        for link in self._links:
            link.publish(record, self.models)

    async def accept(self, connection: socket.socket) -> None:
        """Takes in the front at the other end of a connected socket. Raises Garbled, TimeoutError, or OSError."""
        try:
            connection.setblocking(False)
            view, max_jobs = await asyncio.wait_for(_greeted(connection), GREETING_S)
            link = FrontLink(self, view, max_jobs)
            await asyncio.get_running_loop().connect_accepted_socket(lambda: link.channel, connection)
        except BaseException:
            connection.close()
            raise
        link.publish(self._published(), self.models)
        if link.channel.is_open:
            self._links.add(link)
            self._on_linked()
            if self._has_successor:
                link.channel.send(Succeeded())
        else:
            link.leave_all()

    def listen(self, listener: socket.socket) -> None:
        """Takes in the fronts that connect to a listening socket, as `bound` gives it, until `close`."""
        listener.setblocking(False)
        loop = asyncio.get_running_loop()
        self._listening = [
            loop.create_task(self._listen(listener), name="fronts"),
            loop.create_task(self._tell_levels(), name="levels"),
        ]

    async def open(self, model: int, height: int, width: int) -> None:
        """Makes a model ready for a resolution without buckets, as a front asks for it. Raises what `Ticket.open`
        and `ModelEngine.admit` raise."""
        resolution = height, width
        with self.engine(model).admit(0, 0, resolution) as admitted:
            await admitted.open(resolution, Mode.GRAPH)

    def engine(self, model: int) -> ModelEngine:
        """Returns what runs a model, by the id of its snapshot. Raises ModelNotReady."""
        if model not in self.models:
            raise ModelNotReady("the model was unloaded")
        return self.models[model].engine

    async def count(self) -> list[Any]:
        """Returns what each front has counted until now, if it answers soon, or told last."""
        self._counts += 1
        answers = [link.count(self._counts) for link in self._links]
        if answers:
            await asyncio.wait(answers, timeout=COUNT_S)
        return [link.tally for link in self._links if link.tally is not None]

    def worked(self, model: int) -> None:
        """Has fronts be told soon what a model has to do."""
        self._worked.add(model)

    def leave(self, link: FrontLink) -> None:
        """Forgets a link that has ended."""
        self._links.discard(link)
        if link.tally is not None:
            self._on_gone(link.tally)
        self._left.set()

    async def succeed(self) -> None:
        """Takes in no more fronts, and has all link to the engine that takes this one's place.

        Returns once each of them brings nothing new here, or has gone.
        """
        self._has_successor = True
        self._listening[0].cancel()
        for link in self._links:
            link.channel.send(Succeeded())
        while not all(link.has_moved for link in self._links):
            await self._one_left()

    async def left(self) -> None:
        """Returns once there is no front any more."""
        while self._links:
            await self._one_left()

    async def _one_left(self) -> None:
        self._left.clear()
        await self._left.wait()

    def moved(self) -> None:
        """A front brings nothing new here any more."""
        self._left.set()

    async def close(self) -> None:
        """Takes in no more fronts, sends the answers that are there, and ends all links."""
        for task in self._listening:
            task.cancel()
        if self._listening:
            await asyncio.wait(self._listening)
        for greeting in self._greeting:
            greeting.cancel()
        for link in [*self._links]:
            link.channel.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSING_S):
                await self.left()
        for link in [*self._links]:  # it does not read
            link.channel.end("it was closed")
        self.copying.shutdown(wait=False)

    def _published(self) -> Published:
        return Published(self._snapshot.epoch, pickle.dumps(self._snapshot))

    async def _listen(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with listener:
            while True:
                try:
                    connection, _ = await loop.sock_accept(listener)
                except OSError as error:  # out of file descriptors: some are free once something has ended
                    log.warning("a front could not be taken in: %s", error)
                    await asyncio.sleep(ACCEPT_RETRY_S)
                    continue
                greeting = loop.create_task(self._try(connection))
                self._greeting.add(greeting)
                greeting.add_done_callback(self._greeting.discard)

    async def _tell_levels(self) -> None:
        working: set[int] = set()
        while True:
            await asyncio.sleep(LEVELS_S)
            # Once more after the last job, which may have been told of before it had left.
            due, working, self._worked = working | self._worked, self._worked, set()
            levels = {number: self.models[number].engine.live() for number in due if number in self.models}
            if levels and self._links:
                record = Levels(pickle.dumps((levels, self._about())))
                for link in self._links:
                    link.channel.send(record)

    async def _try(self, connection: socket.socket) -> None:
        try:
            await self.accept(connection)
        except (Garbled, OSError, TimeoutError) as error:
            log.warning("a front was not taken in: %s", error or type(error).__name__)


def bound(path: Path) -> socket.socket:
    """Returns a socket that listens at `path`, which only this user may connect to. Raises OSError."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        os.fchmod(listener.fileno(), 0o600)  # which the file then has from its beginning
        listener.bind(str(path))
        listener.listen()
    except OSError:
        listener.close()
        raise
    return listener


class FrontLink:
    """One front's jobs."""

    def __init__(self, host: Host, view: ArenaView, max_jobs: int) -> None:
        self._host = host
        self._view = view
        self._max_jobs = max_jobs
        self._running: dict[int, asyncio.Task[None]] = {}
        self._asked: dict[int, asyncio.Task[None]] = {}
        self._uses: dict[int, Hosted] = {}
        """By id, what was published to it and it has not left."""
        self._published: frozenset[int] = frozenset()
        self.has_moved = False
        """Whether it has linked to the engine in this one's place."""
        self.tally: Any = None
        """What the front has told last of what it has counted; None for nothing yet."""
        self._counting: dict[int, asyncio.Future[None]] = {}
        self._releasing: dict[int, weakref.ref[Memory]] = {}
        """Jobs that have ended while a batch may still read their pixels."""
        self._last_job = 0
        self._layouts: dict[Layout, int] = {}
        self._worked: set[int] = set()
        """Models of which jobs have ended in this turn of the loop."""
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self.channel = Channel(Reader.from_front(), self._receive, self._end)

    def publish(self, record: Published, models: Mapping[int, Hosted]) -> None:
        """Tells the front of `models`."""
        for number in self._uses.keys() - models.keys():
            self._uses.pop(number).leave()
        for number in models.keys() - self._published:
            self._uses[number] = models[number]
            models[number].enter()
        self._published = frozenset(models)
        self.channel.send(record)

    def count(self, number: int) -> asyncio.Future[None]:
        """Asks what the front has counted; done once it has told, or ended. If it tells nothing, no more."""
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

    def leave_all(self) -> None:
        """Has the front leave all that was published to it."""
        uses, self._uses = self._uses, {}
        for hosted in uses.values():
            hosted.leave()

    def _receive(self, record: Record) -> None:
        match record:
            case Submit():
                self._begin(record)
            case Ask():
                self._ask(record)
            case Counted(number, tail):
                self._counted(number, tail)
            case Left(model):
                if (hosted := self._uses.pop(model, None)) is not None:
                    hosted.leave()
            case Moved():
                self.has_moved = True
                self._host.moved()
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
        pixel_bytes = submit.images * submit.height * submit.width * CHANNELS
        if not 0 < pixel_bytes <= submit.size_bytes:
            raise Garbled(f"job {job} with {pixel_bytes} bytes of pixels in an extent of {submit.size_bytes}")
        try:
            memory = self._view.memory(submit.offset, submit.size_bytes)
        except ValueError as error:
            raise Garbled(f"job {job} with {error}") from None
        self._last_job = job
        self._running[job] = self._loop.create_task(self._run(submit, memory))

    async def _run(self, submit: Submit, memory: Memory) -> None:
        """Runs a job and tells what came of it. Raises nothing, and never waits for the front."""
        job = submit.job
        error: BaseException | None = None
        try:
            shape = submit.images, submit.height, submit.width, CHANNELS
            pixels: Images = memory[: math.prod(shape)].reshape(shape)
            result = await self._result(submit, pixels)
            settled = await self._write(submit, memory, pixels.nbytes, result)
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
        self._releasing[job] = weakref.ref(memory, partial(self._memory_left, job))

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
            answer = json.dumps(await self._host.answer(question, arguments))
        except XlaserveError as error:
            self.channel.send(Refused(number, pack_error(error)))
        except Exception:
            log.exception("a question of a front could not be answered: %s", question[:64])
            self.channel.send(Refused(number, pack_error(ExecutionFailed("the server could not do this"))))
        else:
            self.channel.send(Told(number, answer.encode()))

    async def _result(self, submit: Submit, pixels: Images) -> Result:
        engine, mode = self._host.engine(submit.model), MODES[submit.mode]
        if submit.when_idle:
            return await engine.run_when_idle(pixels, mode, submit.deadline)
        with engine.admit(submit.images, pixels.nbytes) as admitted:
            return await admitted.run(pixels, mode, submit.deadline, submit.priority, unpack_trace(submit))

    async def _write(self, submit: Submit, memory: Memory, pixel_bytes: int, result: Result) -> Settled:
        """Copies the outputs into the extent, behind the pixels, and returns what the front is told."""
        batches, timings, traced = result
        layout: Layout = tuple((output.dtype, output.shape[1:]) for output in batches[0].outputs)
        try:
            places = outputs_in(memory, aligned(pixel_bytes), submit.images, layout)
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
            await self._loop.run_in_executor(self._host.copying, write)
        number = self._layouts.get(layout)
        if number is None:
            number = self._layouts[layout] = len(self._layouts)
            self.channel.send(LayoutOf(number, pickle.dumps(layout)))
        tail = pickle.dumps(tuple(traced)) if traced else b""
        return Settled(submit.job, number, timings.queue_s, timings.gather_s, timings.execute_s, tail)

    def _cancelled(self, job: int, task: asyncio.Task[None]) -> None:
        """Gives back a job that was cancelled before it began; of any other its own end has told."""
        if self._running.pop(job, None) is not None:
            self.channel.send(Released(job))

    def _memory_left(self, job: int, _: object) -> None:
        """Gives back a job whose memory nothing uses any more; called on any thread."""
        if threading.get_ident() == self._thread:
            self._release(job)
        else:
            with suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._release, job)

    def _release(self, job: int) -> None:
        if self._releasing.pop(job, None) is not None:
            self.channel.send(Released(job))

    def _tell_outstanding(self, model: int) -> None:
        """Tells the front once in a turn of the loop what the engine has to do for a model."""
        self._host.worked(model)
        if not self._worked:
            self._loop.call_soon(self._send_outstanding)
        self._worked.add(model)

    def _send_outstanding(self) -> None:
        for model in self._worked:
            if (hosted := self._host.models.get(model)) is not None:
                self.channel.send(Outstanding(model, hosted.engine.outstanding_s()))
        self._worked.clear()

    def _end(self, reason: str) -> None:
        """Drops what the front had here: what waits is cancelled, and batches under way end without it."""
        self._host.leave(self)
        self.leave_all()
        for counting in self._counting.values():
            if not counting.done():
                counting.set_result(None)
        running, self._running = self._running, {}
        self._releasing.clear()
        self._view.end()  # not with this link, which refers to itself and may live for long
        for task in (*running.values(), *self._asked.values()):
            task.cancel()
        log.info("the link to a front ended with %d jobs under way: %s", len(running), reason)


async def _nobody_answers(question: str, arguments: Mapping[str, Any]) -> object:
    raise UnsupportedFeature(f"expected no question, got {question[:64]!r}")


async def _greeted(connection: socket.socket) -> tuple[ArenaView, int]:
    """Returns the arena of a new front, and the most jobs it will have. Raises Garbled and OSError."""
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(connection, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(connection)
    data, files, _, _ = socket.recv_fds(connection, HELLO.size, 1)
    try:
        hello = unpack_hello(data)
        if len(files) != 1:
            raise Garbled(f"a greeting with {len(files)} files")
        return ArenaView(files[0], hello.arena_bytes), hello.max_jobs
    except ValueError as error:
        raise Garbled(f"an arena that can't be used: {error}") from None
    finally:
        for file in files:
            os.close(file)
