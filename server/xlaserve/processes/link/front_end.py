"""A front's end of a link: models that another process runs."""

from __future__ import annotations

import asyncio
import json
import logging
import pickle
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from resource import RLIM_INFINITY, RLIMIT_AS, RLIMIT_FSIZE, getrlimit
from types import MappingProxyType
from typing import Any, Final, NamedTuple, Self

import numpy as np

from xlaserve.config import Mode
from xlaserve.engine.batching.image_admission import ImageAdmission
from xlaserve.engine.batching.model_queues import Live
from xlaserve.engine.batching.queue import DEFAULT_PRIORITY, BatchRows, Result, Shape
from xlaserve.engine.buckets.demand import Resolution
from xlaserve.engine.memory import machine_memory_bytes
from xlaserve.engine.program import Images
from xlaserve.engine.timings import Timings
from xlaserve.engine.trace_context import TraceContext, TracedBatch
from xlaserve.errors import DeadlineUnreachable, EngineLost, InvalidArgument, QueueFull
from xlaserve.processes.link.arena import PAGE_BYTES, Arena, Extent, Layout, Share, aligned, outputs_in
from xlaserve.processes.link.channel import Channel
from xlaserve.processes.link.engine_state import ModelSnapshot, Snapshot
from xlaserve.processes.link.link_records import (
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
    pack_hello,
    pack_trace,
    unpack_error,
)
from xlaserve.processes.link.openings import Openings

log = logging.getLogger(__name__)

MAX_JOBS: Final = 2**16
"""More than all models together have under way: what a model takes in bounds its own."""
ARENA_SHARE: Final = 4
"""How many times the machine's memory an arena has as addresses: all models find theirs, whatever gaps there are."""
MIN_ARENA_BYTES: Final = 2**36
MAX_ARENA_BYTES: Final = 2**40
"""An engine has the arenas of all fronts among its addresses, which are 2**47."""
ADDRESS_SHARE: Final = 16
"""Where a process may have so many addresses and no more, an arena has that part of them."""
TRIM_S: Final = 30.0
"""How long an arena keeps memory that it has not needed, for the next burst: new memory takes longer than a request."""
TRIM_STEP_S: Final = 0.02
KEPT_BYTES: Final = 32 * 2**20
SLACK: Final = 1.25
"""An arena may take so many times what it needed, as extents of different sizes leave gaps."""
MAX_INLINE_BYTES: Final = 2**20
"""Pixels and outputs up to this size are copied on the event loop, in some 100 microseconds; others on a thread."""
MAX_HELD_S: Final = 1e-3
"""How long jobs wait at most, while this front has other work, for others to go with."""
GREETING_S: Final = 10.0
MONOTONIC: Final = "clock_gettime(CLOCK_MONOTONIC)"
"""What deadlines are told in: the one clock that all processes of a machine have."""


class _Job(NamedTuple):
    """What the engine has."""

    settled: asyncio.Future[Result]
    extent: Extent
    """Kept until the engine is done with it."""
    images: int
    outputs_at: int
    """Where in the extent the outputs begin."""


class EngineLink:
    """A link to an engine. All methods run on the event loop.

    `models` are those that the engine has now, by the ids of their snapshots. When the link ends, all that is under way
    fails with EngineLost at once.
    """

    def __init__(
        self,
        arena_bytes: int | None,
        max_jobs: int,
        on_models: Callable[[EngineLink], object],
        tally: Callable[[], object],
    ) -> None:
        self.arena = Arena(arena_bytes or _addressable_bytes())
        self.max_jobs = max_jobs
        self.epoch = 0
        self.details: object = None
        """Of the last snapshot."""
        self.about: object = None
        """What the engine said of itself about a second ago; None where it has had nothing to do yet."""
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._models: dict[int, RemoteModel] = {}
        self._on_models = on_models
        self._tally = tally
        self._jobs: dict[int, _Job] = {}
        self._last_job = 0
        self._layouts: dict[int, Layout] = {}
        self._loop = asyncio.get_running_loop()
        self._copying = ThreadPoolExecutor(1, "copy")
        self._lost_as = ""
        self._lost = asyncio.Event()
        self._published = asyncio.Event()
        self._superseded = asyncio.Event()
        """Set once another engine has taken this one's place, or the link has ended."""
        self._moved = asyncio.Event()
        """Set once this front has linked to that, or the link has ended."""
        self.channel = Channel(Reader.from_engine(), self._receive, self._end, MAX_HELD_S)
        self._trimming: asyncio.Task[None] | None = None

    @property
    def models(self) -> Mapping[int, RemoteModel]:
        """The models of the last snapshot, by their ids."""
        return MappingProxyType(self._models)

    @property
    def jobs(self) -> int:
        """Jobs that the engine has not given back."""
        return len(self._jobs)

    @property
    def is_lost(self) -> bool:
        """Whether the link has ended."""
        return bool(self._lost_as)

    async def lost(self) -> str:
        """Returns why the link has ended, once it has."""
        await self._lost.wait()
        return self._lost_as

    async def published(self) -> None:
        """Returns once the engine has said what it has, or the link has ended."""
        await self._published.wait()

    @property
    def is_superseded(self) -> bool:
        """Whether another engine has taken this one's place."""
        return self._superseded.is_set() and not self._lost_as

    async def superseded(self) -> bool:
        """Returns True once another engine has taken this one's place, and False once the link has ended."""
        await self._superseded.wait()
        return not self._lost_as

    def move(self) -> None:
        """Brings nothing new here, and hears of no models any more. What is under way goes on."""
        self._on_models = lambda link: None
        self.channel.send(Moved())
        self._moved.set()

    async def moved(self) -> None:
        """Returns once `move` was called, or the link has ended."""
        await self._moved.wait()

    async def answered(self) -> None:
        """Returns once all questions are answered."""
        if self._asked:
            await asyncio.wait([*self._asked.values()])

    def check(self) -> None:
        """Raises EngineLost where the link has ended."""
        if self._lost_as:
            raise _engine_lost()

    def close(self) -> None:
        """Ends the link."""
        self.channel.end("it was closed")

    async def run(self, job: _Job, submit: Submit) -> Result:
        """Has the engine run what lies in the job's extent."""
        self.check()
        if len(self._jobs) >= self.max_jobs:
            raise QueueFull(f"{self.max_jobs} requests are under way in the engine, and no more fit")
        self._jobs[submit.job] = job
        self.channel.send(submit)
        try:
            return await job.settled
        except asyncio.CancelledError:
            if submit.job in self._jobs:
                self.channel.send(Cancel(submit.job))
            raise

    async def ask(self, question: str, **arguments: object) -> Any:
        """Returns what the engine answers. Arguments and answer are plain data of JSON.

        Raises what the engine does, and EngineLost. A question that is cancelled is, if possible, cancelled there.
        """
        self.check()
        number = self.next_job()
        told = self._asked[number] = self._loop.create_future()
        self.channel.send(Ask(number, json.dumps([question, arguments]).encode()))
        try:
            return await told
        except asyncio.CancelledError:
            self.channel.send(Cancel(number))
            raise
        finally:
            self._asked.pop(number, None)

    def next_job(self) -> int:
        """Returns the number of the next job or question."""
        self._last_job += 1
        return self._last_job

    async def copy(self, pixels: Images, buffer: Images) -> None:
        """Copies pixels into the arena."""
        if pixels.nbytes <= MAX_INLINE_BYTES:
            buffer[...] = pixels
        else:  # the thread's own references keep the memory if this is cancelled
            await self._loop.run_in_executor(self._copying, np.copyto, buffer, pixels)

    async def _trim(self) -> None:
        """Gives memory of the arena that was not needed lately back to the system, now and then, little at a time."""
        while True:
            await asyncio.sleep(TRIM_S)
            kept_bytes = max(KEPT_BYTES, int(SLACK * self.arena.most_used_bytes()))
            for _ in self.arena.trim(kept_bytes):
                if self.arena.used_bytes > kept_bytes:  # it is needed again
                    break
                await asyncio.sleep(TRIM_STEP_S)

    def _receive(self, record: Record) -> None:  # noqa: PLR0912 - one for each kind
        match record:
            case Settled():
                self._settle(record)
            case Failed(number, tail):
                settled = self._job(number).settled
                if not settled.done():
                    settled.set_exception(unpack_error(tail))
            case Released(number):
                job = self._job(number)
                del self._jobs[number]
                if not job.settled.done():
                    job.settled.set_exception(_engine_lost())
            case LayoutOf(number, tail):
                self._layouts[number] = pickle.loads(tail)
            case Published(_, tail):
                self._take(pickle.loads(tail))
            case Outstanding(model, seconds):
                if model in self._models:
                    self._models[model].tell_outstanding(seconds)
            case Levels(tail):
                levels, self.about = pickle.loads(tail)
                self._take_levels(levels)
            case Succeeded():
                self._superseded.set()
            case Count(number):
                self.channel.send(Counted(number, json.dumps(self._tally()).encode()))
            case Told(number, tail):
                if (told := self._asked.pop(number, None)) is not None and not told.done():
                    told.set_result(json.loads(tail))
            case Refused(number, tail):
                if (told := self._asked.pop(number, None)) is not None and not told.done():
                    told.set_exception(unpack_error(tail))

    def _take_levels(self, levels: Mapping[int, Live]) -> None:
        for number, live in levels.items():
            if (model := self._models.get(number)) is not None:
                model.tell_live(live)

    def _settle(self, record: Settled) -> None:
        job = self._job(record.job)
        del self._jobs[record.job]
        if job.settled.done():
            return
        outputs = outputs_in(job.extent.memory, job.outputs_at, job.images, self._layouts[record.layout])
        traced: Sequence[TracedBatch] = pickle.loads(record.tail) if record.tail else ()
        timings = Timings(queue_s=record.queue_s, gather_s=record.gather_s, execute_s=record.execute_s)
        job.settled.set_result(Result([BatchRows(range(job.images), outputs)], timings, traced))

    def _job(self, number: int) -> _Job:
        try:
            return self._jobs[number]
        except KeyError:
            raise Garbled(f"an answer to job {number}, which it does not have") from None

    def _take(self, snapshot: Snapshot) -> None:
        for gone in self._models.keys() - {model.id for model in snapshot.models}:
            self._models.pop(gone).close()
        for model_snapshot in snapshot.models:
            if (known := self._models.get(model_snapshot.id)) is None:
                self._models[model_snapshot.id] = RemoteModel(self, model_snapshot)
            else:
                known.update(model_snapshot)
        self.epoch, self.details = snapshot.epoch, snapshot.details
        self._published.set()
        self._trimming = self._trimming or self._loop.create_task(self._trim(), name="trim")
        self._on_models(self)

    def _end(self, reason: str) -> None:
        self._lost_as = reason
        asked, self._asked = self._asked, {}
        for told in asked.values():
            if not told.done():
                told.set_exception(_engine_lost())
        jobs, self._jobs = self._jobs, {}
        for job in jobs.values():
            if not job.settled.done():
                job.settled.set_exception(_engine_lost())
        if jobs:
            log.warning("the link to the engine ended with %d jobs under way: %s", len(jobs), reason)
        if self._trimming is not None:
            self._trimming.cancel()
        self._copying.shutdown(wait=False)
        self.arena.end()  # not with this link, which refers to itself and may live for long
        for event in (self._lost, self._published, self._superseded, self._moved):
            event.set()


class RemoteModel:
    """A `ModelEngine` in another process."""

    def __init__(self, link: EngineLink, snapshot: ModelSnapshot) -> None:
        self.snapshot = snapshot
        """What the engine last said of it."""
        self.admission = ImageAdmission(snapshot.title, 0, 0, self.outstanding_s)
        """Of this front alone; the engine has its own."""
        self.submitted_images = 0
        """Images that the engine has."""
        self.submitted_bytes = 0
        self.share = Share(snapshot.title, 0)
        """Of the arena."""
        self._link = link
        self._clock = time.perf_counter
        self._outstanding_s = 0.0
        self._told_at = 0.0
        self._live = Live(in_flight_images_limit=snapshot.max_images)
        self._has_left = False
        self._openings = Openings(self._ask_to_open)
        self._emptied: asyncio.Event | None = None
        """Set once this front has no request there, where somebody waits for that."""
        self.update(snapshot)

    def update(self, snapshot: ModelSnapshot) -> None:
        """Goes by what the engine says now."""
        self.snapshot = snapshot
        self.admission.max_images, self.admission.max_bytes = snapshot.max_images, snapshot.max_bytes
        self.admission.is_closed = not snapshot.is_open
        self.share.max_bytes = snapshot.share_bytes

    def close(self) -> None:
        """Takes no more: the engine no longer has it."""
        self.admission.is_closed = True

    @property
    def images(self) -> int:
        """Those of the requests that this front has taken in for it."""
        return self.admission.images

    def leave(self) -> None:
        """Tells the engine, which may wait for that to end it, that nothing here has any use for it: once."""
        if not self._has_left:
            self._has_left = True
            self._link.channel.send(Left(self.snapshot.id))

    async def left(self) -> None:
        """Returns once all requests that this front has taken in for it are answered; it is to take in no others."""
        while self.admission.images:
            self._emptied = self._emptied or asyncio.Event()
            await self._emptied.wait()

    def answered(self, images: int, size_bytes: int) -> None:
        """Counts a request as answered."""
        self.admission.leave(images, size_bytes)
        if self._emptied is not None and not self.admission.images:
            self._emptied.set()

    def tell_outstanding(self, seconds: float) -> None:
        """Takes in what the engine has to do for it."""
        self._outstanding_s, self._told_at = seconds, self._clock()

    def tell_live(self, live: Live) -> None:
        """Takes in what the engine has to do for all fronts."""
        self._live = live
        self.tell_outstanding(live.outstanding_s)

    def live(self) -> Live:
        """Does as `ModelEngine.live`: for all fronts, as the engine last said."""
        return self._live

    def outstanding_s(self) -> float:
        """Returns the seconds in which all that waits and runs should be answered, as the engine last said."""
        return max(0.0, self._told_at + self._outstanding_s - self._clock())

    def largest(self, mode: Mode, height: int, width: int) -> int:
        """Does as `ModelEngine.largest`, as the engine last said."""
        return self.snapshot.largest.get((mode, height, width), 0)

    def has(self, resolution: Resolution) -> bool:
        """Returns whether the engine can run images of it now."""
        return resolution in self.snapshot.output_bytes

    async def open(self, resolution: Resolution) -> None:
        """Has the engine make it ready for a resolution without buckets. Raises what `Ticket.open` raises."""
        if not self.has(resolution):
            # A request that is cancelled must not take the question with it, whose answer others wait for.
            await asyncio.shield(self._openings.begin(self.snapshot, resolution))

    def open_soon(self, resolution: Resolution) -> None:
        """Has the engine make it ready for a resolution that others are ready for, unless it has tried already."""
        unmatched = self.snapshot.unmatched
        if unmatched is not None and resolution not in unmatched.opened:
            with suppress(InvalidArgument):
                self._openings.begin(self.snapshot, resolution)

    async def _ask_to_open(self, resolution: Resolution) -> None:
        height, width = resolution
        await self._link.ask("open", model=self.snapshot.id, height=height, width=width)

    async def run_when_idle(self, pixels: Images, mode: Mode, deadline: float) -> Result:
        """Does as `ModelEngine.run_when_idle`, where no more than half of the share is in use."""
        if 2 * self._link.arena.used_of(self.share) > self.share.max_bytes:
            raise QueueFull(f"more than half of {self.share.max_bytes} bytes for images and outputs is in use")
        with RemoteRequest(self, self._link, 0, 0) as request:
            return await request.run_when_idle(pixels, mode, deadline)

    async def submit(
        self,
        extent: Extent,
        shape: tuple[int, ...],
        mode: Mode,
        deadline: float,
        *,
        priority: int = DEFAULT_PRIORITY,
        when_idle: bool = False,
        trace: TraceContext | None = None,
    ) -> Result:
        """Has the engine run pixels of `shape`, which an extent begins with."""
        images, height, width, channels = shape
        submit = Submit(
            self._link.next_job(),
            extent.offset,
            len(extent.memory),
            deadline,
            self.snapshot.id,
            images,
            height,
            width,
            MODES.index(mode),
            priority,
            when_idle,
            *pack_trace(trace),
        )
        settled: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        outputs_at = aligned(images * height * width * channels)
        return await self._link.run(_Job(settled, extent, images, outputs_at), submit)

    def admit(self, images: int, size_bytes: int, unmatched: Resolution | None = None) -> RemoteRequest:
        """Does as `ModelEngine.admit`; the engine bounds what all fronts bring when it comes to run it."""
        self._link.check()
        if unmatched is not None:
            self._openings.check(self.snapshot, unmatched)
        self.admission.admit(images, size_bytes)
        return RemoteRequest(self, self._link, images, size_bytes)

    def check_encoded(
        self, images: int, deadline: float, priority: int, *, shapes: Iterable[Shape], decode_s: float, decoding: int
    ) -> None:
        """Raises DeadlineUnreachable for what can't be decoded, or follow what waits in the engine, in time.

        The engine looks again, at priorities and shapes too, once the images are there.
        """
        outstanding_s = self.outstanding_s()
        if not decoding and not outstanding_s:
            return
        likely_s, slack_s = max(decode_s, outstanding_s), deadline - self._clock()
        if likely_s > slack_s:
            raise DeadlineUnreachable(
                f"model {self.snapshot.title}: the deadline is in {max(0.0, slack_s):.3f} s, and the answer would take"
                f" {likely_s:.3f} s with what waits already",
                likely_s - slack_s,
            )


class RemoteRequest:
    """A request that a front took in: it leaves once, at the end of the `with` that holds it."""

    __slots__ = ("_buffers", "_images", "_link", "_model", "_size_bytes")

    def __init__(self, model: RemoteModel, link: EngineLink, images: int, size_bytes: int) -> None:
        self._model = model
        self._link = link
        self._images = images
        self._size_bytes = size_bytes
        self._buffers: list[tuple[Images, Extent]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._buffers.clear()
        self._model.answered(self._images, self._size_bytes)

    def buffer(self, shape: tuple[int, int, int, int]) -> Images:
        """Returns shared memory for pixels `[n, height, width, 3]`, with any content. Raises QueueFull, EngineLost, or
        InvalidArgument for a size that the model does not take."""
        images, height, width, channels = shape
        self._link.check()
        size_bytes = images * height * width * channels
        try:
            room_bytes = self._model.snapshot.room_bytes(height, width, images)
        except KeyError:
            sizes = " or ".join(f"[n, {height}, {width}, 3]" for height, width in self._model.snapshot.output_bytes)
            raise InvalidArgument("pixels", f"shape {sizes}", list(shape)) from None
        extent = self._link.arena.take(aligned(size_bytes) + room_bytes, self._model.share)
        pixels = extent.memory[:size_bytes].reshape(shape)
        self._buffers.append((pixels, extent))
        return pixels

    async def open(self, resolution: Resolution, mode: Mode) -> Mode:
        """Does as `Ticket.open`; which modes there are is as the engine last said."""
        await self._model.open(resolution)
        return mode if self._model.largest(mode, *resolution) else Mode.GRAPH

    async def run(
        self,
        pixels: Images,
        mode: Mode,
        deadline: float,
        priority: int = DEFAULT_PRIORITY,
        trace: TraceContext | None = None,
    ) -> Result:
        """Does as `Ticket.run`. Pixels that are no `buffer` are copied into one."""
        count, height, width, channels = pixels.shape
        extent = next((extent for buffer, extent in self._buffers if buffer is pixels), None)
        if extent is None:
            buffer = self.buffer((count, height, width, channels))
            _, extent = self._buffers[-1]
            await self._link.copy(pixels, buffer)
        model, size_bytes = self._model, pixels.nbytes
        model.submitted_images += count
        model.submitted_bytes += size_bytes
        try:
            return await model.submit(extent, pixels.shape, mode, deadline, priority=priority, trace=trace)
        finally:
            model.submitted_images -= count
            model.submitted_bytes -= size_bytes

    async def run_when_idle(self, pixels: Images, mode: Mode, deadline: float) -> Result:
        """Does as `ModelEngine.run_when_idle`."""
        count, height, width, channels = pixels.shape
        buffer = self.buffer((count, height, width, channels))
        _, extent = self._buffers[-1]
        await asyncio.to_thread(np.copyto, buffer, pixels)  # no request's copy is to wait for it
        return await self._model.submit(extent, pixels.shape, mode, deadline, when_idle=True)


async def connect(
    address: Path | socket.socket,
    *,
    arena_bytes: int | None = None,
    max_jobs: int = MAX_JOBS,
    on_models: Callable[[EngineLink], object] = lambda link: None,
    tally: Callable[[], object] = dict,
) -> EngineLink:
    """Opens a link to an engine that listens at a path, or at the other end of a connected socket.

    Returns once the engine has said what models it has; `on_models` is called then and whenever that changes.
    `tally` returns, in plain data of JSON, what this front has counted, whenever the engine asks for it.
    `arena_bytes` bound the pixels and outputs that this front has there for all models; by default there are addresses
    enough. Raises EngineLost, and OSError where nobody listens.
    """
    if time.get_clock_info("perf_counter").implementation != MONOTONIC:
        raise RuntimeError("fronts and engines need a clock that is the same in all processes, as Linux has it")
    loop = asyncio.get_running_loop()
    connection = address if isinstance(address, socket.socket) else socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.setblocking(False)
    try:
        if isinstance(address, Path):
            await loop.sock_connect(connection, str(address))
        link = EngineLink(arena_bytes, max_jobs, on_models, tally)
    except BaseException:
        connection.close()
        raise
    try:
        socket.send_fds(connection, [pack_hello(link.arena.size_bytes, max_jobs)], [link.arena.file])
        await loop.connect_accepted_socket(lambda: link.channel, connection)
    except BaseException:
        link.arena.end()
        connection.close()
        raise
    try:
        async with asyncio.timeout(GREETING_S):
            await link.published()
    except BaseException:
        link.close()
        raise
    link.check()
    return link


def _addressable_bytes() -> int:
    """Returns how large an arena, which is a file, may be: more than will ever be used, unless limits are set."""
    wanted = min(max(MIN_ARENA_BYTES, ARENA_SHARE * machine_memory_bytes()), MAX_ARENA_BYTES)
    (file_bytes, _), (address_bytes, _) = getrlimit(RLIMIT_FSIZE), getrlimit(RLIMIT_AS)
    if file_bytes != RLIM_INFINITY:
        wanted = min(wanted, file_bytes)
    if address_bytes != RLIM_INFINITY:  # which the engine has for the arenas of all fronts
        wanted = min(wanted, address_bytes // ADDRESS_SHARE)
    return wanted // PAGE_BYTES * PAGE_BYTES


def _engine_lost() -> EngineLost:
    return EngineLost("the process that runs this model has ended; another one takes its place")
