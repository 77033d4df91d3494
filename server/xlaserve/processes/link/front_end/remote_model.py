"""A model that an engine in another process runs, as its front sees it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Self

from xlaserve.config import Mode
from xlaserve.engine.batching.image_admission import ImageAdmission
from xlaserve.engine.batching.model_queues import Live
from xlaserve.engine.batching.unmatched import refusal
from xlaserve.engine.buckets.demand import Resolution
from xlaserve.engine.inputs import Rows, layout, size_bytes
from xlaserve.engine.request import EncodedRequest, EngineRequest, Result
from xlaserve.errors import DeadlineUnreachable, InvalidArgument, QueueFull
from xlaserve.processes.link.arena import Extent, Share, arrays_bytes, arrays_in
from xlaserve.processes.link.engine_state import ModelSnapshot
from xlaserve.processes.link.front_end.engine_calls import EngineCalls, copy_rows
from xlaserve.processes.link.link_records import ReleaseModel


class Openings:
    """The resolutions without buckets that an engine is making one model ready for.

    `ask` asks the engine to do so, and returns once the model is ready. All methods run on the event loop.
    """

    def __init__(self, ask: Callable[[Resolution], Coroutine[Any, Any, None]]) -> None:
        self._ask = ask
        self._asking: dict[Resolution, asyncio.Task[None]] = {}

    def check(self, snapshot: ModelSnapshot, resolution: Resolution) -> None:
        """Raises InvalidArgument where the model takes no images of a resolution. The engine checks again."""
        if resolution in snapshot.output_bytes:
            return
        if snapshot.unmatched is None:
            raise refusal(resolution, "a size that has buckets")
        snapshot.unmatched.check(resolution, self._asking)

    def begin(self, snapshot: ModelSnapshot, resolution: Resolution) -> asyncio.Task[None]:
        """Asks the engine, unless it is asked already. Raises InvalidArgument."""
        if (asking := self._asking.get(resolution)) is None:
            self.check(snapshot, resolution)
            asking = asyncio.create_task(self._ask(resolution), name=f"open {resolution}")
            self._asking[resolution] = asking
            asking.add_done_callback(lambda _: self._end(resolution))
        return asking

    def _end(self, resolution: Resolution) -> None:
        asking = self._asking.pop(resolution)
        if not asking.cancelled():
            asking.exception()  # retrieved here, as there may be no caller left that awaits it


class RemoteModel:
    """A `ModelEngine` in another process, at the other end of the link that `calls` belong to."""

    def __init__(self, calls: EngineCalls, snapshot: ModelSnapshot) -> None:
        self.snapshot = snapshot
        """The last snapshot of the model."""
        self.admission = ImageAdmission(snapshot.title, 0, 0, self.outstanding_s)
        """Images admitted by this front alone; the engine has its own count."""
        self.submitted_images = 0
        """Images of this front that are in the engine."""
        self.submitted_bytes = 0
        self.share = Share(snapshot.title, 0)
        """The model's share of the arena."""
        self._calls = calls
        self._clock = time.perf_counter
        self._outstanding_s = 0.0
        self._told_at = 0.0
        self._live = Live(in_flight_images_limit=snapshot.max_images)
        self._is_released = False
        self._openings = Openings(self._ask_to_open)
        self._emptied: asyncio.Event | None = None
        """Set once this front has no request to the model, where a call of `drained` waits for that."""
        self.update(snapshot)

    def update(self, snapshot: ModelSnapshot) -> None:
        """Applies a new snapshot of the model."""
        self.snapshot = snapshot
        self.admission.max_images, self.admission.max_bytes = snapshot.max_images, snapshot.max_bytes
        self.admission.is_closed = not snapshot.is_open
        self.share.max_bytes = snapshot.share_bytes

    def close(self) -> None:
        """Admits no more requests: the engine no longer has the model."""
        self.admission.is_closed = True

    @property
    def images(self) -> int:
        """Images of the requests that this front has admitted and not answered."""
        return self.admission.images

    def release(self) -> None:
        """Tells the engine, once, that this front does not use the model any more, so that the engine may end it."""
        if not self._is_released:
            self._is_released = True
            self._calls.send(ReleaseModel(self.snapshot.id))

    async def drained(self) -> None:
        """Returns once all requests that this front has admitted are answered; it must admit no others meanwhile."""
        while self.admission.images:
            self._emptied = self._emptied or asyncio.Event()
            await self._emptied.wait()

    def answered(self, images: int, size_bytes: int) -> None:
        """Counts a request as answered."""
        self.admission.leave(images, size_bytes)
        if self._emptied is not None and not self.admission.images:
            self._emptied.set()

    def update_outstanding(self, seconds: float) -> None:
        """Notes the seconds in which the engine should have answered all that waits and runs there."""
        self._outstanding_s, self._told_at = seconds, self._clock()

    def update_live(self, live: Live) -> None:
        """Notes the engine's load from all fronts."""
        self._live = live
        self.update_outstanding(live.outstanding_s)

    def live(self) -> Live:
        """Returns the load from all fronts, as the engine last told it; see `ModelEngine.live`."""
        return self._live

    def outstanding_s(self) -> float:
        """Returns the seconds in which all that waits and runs should be answered, by the engine's last record."""
        return max(0.0, self._told_at + self._outstanding_s - self._clock())

    def largest(self, mode: Mode, height: int, width: int) -> int:
        """Returns the most images of a shape that run in one batch, by the last snapshot; see `ModelEngine.largest`."""
        return self.snapshot.largest.get((mode, height, width), 0)

    def has(self, resolution: Resolution) -> bool:
        """Returns whether the engine can run images of a resolution now."""
        return resolution in self.snapshot.output_bytes

    async def open(self, resolution: Resolution) -> None:
        """Has the engine make the model ready for a resolution without buckets. Raises what `Ticket.open` raises."""
        if not self.has(resolution):
            # A request that is cancelled must not take the question with it, whose answer others wait for.
            await asyncio.shield(self._openings.begin(self.snapshot, resolution))

    def open_soon(self, resolution: Resolution) -> None:
        """Has the engine make the model ready for a resolution that other engines are ready for, unless this engine
        has tried already."""
        unmatched = self.snapshot.unmatched
        if unmatched is not None and resolution not in unmatched.opened:
            with suppress(InvalidArgument):
                self._openings.begin(self.snapshot, resolution)

    async def _ask_to_open(self, resolution: Resolution) -> None:
        height, width = resolution
        await self._calls.ask("open", model=self.snapshot.id, height=height, width=width)

    async def run_when_idle(self, request: EngineRequest) -> Result:
        """Runs a batch that no client waits for; see `ModelEngine.run_when_idle`.

        Raises QueueFull as well where more than half of the model's share of the arena is in use.
        """
        if 2 * self._calls.arena.used_of(self.share) > self.share.max_bytes:
            raise QueueFull(f"more than half of {self.share.max_bytes} bytes for images and outputs is in use")
        with RemoteTicket(self, self._calls, 0, 0) as ticket:
            return await ticket.run_when_idle(request)

    def admit(self, images: int, size_bytes: int, unmatched: Resolution | None = None) -> RemoteTicket:
        """Admits a request; see `ModelEngine.admit`. The engine applies the limits for all fronts when it runs it."""
        self._calls.check()
        if unmatched is not None:
            self._openings.check(self.snapshot, unmatched)
        self.admission.admit(images, size_bytes)
        return RemoteTicket(self, self._calls, images, size_bytes)

    def check_encoded(self, request: EncodedRequest) -> None:
        """Raises DeadlineUnreachable for images that can't be decoded, or run after all that waits, in time.

        The engine checks again, with priorities and shapes too, once the images are there.
        """
        outstanding_s = self.outstanding_s()
        if not request.decoding and not outstanding_s:
            return
        likely_s, slack_s = max(request.decode_s, outstanding_s), request.deadline - self._clock()
        if likely_s > slack_s:
            raise DeadlineUnreachable(
                f"model {self.snapshot.title}: the deadline is in {max(0.0, slack_s):.3f} s, and the answer would take"
                f" {likely_s:.3f} s with what waits already",
                likely_s - slack_s,
            )


class RemoteTicket:
    """A `Ticket` for a request that a front has admitted. It counts until the `with` that holds it ends."""

    __slots__ = ("_buffers", "_calls", "_images", "_model", "_size_bytes")

    def __init__(self, model: RemoteModel, calls: EngineCalls, images: int, size_bytes: int) -> None:
        self._model = model
        self._calls = calls
        self._images = images
        self._size_bytes = size_bytes
        self._buffers: list[tuple[Rows, Extent]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._buffers.clear()
        self._model.answered(self._images, self._size_bytes)

    def buffer(self, images: int, resolution: Resolution) -> Rows:
        """Returns shared memory for rows, with any content. Raises QueueFull, EngineLost, or InvalidArgument for a size
        that the model does not take."""
        rows, _ = self._buffer(images, resolution)
        return rows

    async def open(self, resolution: Resolution, mode: Mode) -> Mode:
        """Makes the model ready for a resolution; see `Ticket.open`. Returns a mode by the engine's last snapshot."""
        await self._model.open(resolution)
        return mode if self._model.largest(mode, *resolution) else Mode.GRAPH

    async def run(self, request: EngineRequest) -> Result:
        """Runs rows; see `Ticket.run`. Rows that are no `buffer` are copied into one."""
        rows, model = request.rows, self._model
        extent = next((extent for buffer, extent in self._buffers if buffer is rows), None)
        if extent is None:
            buffer, extent = self._buffer_for(request)
            await self._calls.copy(rows, buffer)
        images, submitted_bytes = request.images, size_bytes(rows)
        model.submitted_images += images
        model.submitted_bytes += submitted_bytes
        try:
            return await self._calls.run(model.snapshot.id, request, extent)
        finally:
            model.submitted_images -= images
            model.submitted_bytes -= submitted_bytes

    async def run_when_idle(self, request: EngineRequest) -> Result:
        """Runs a batch that no client waits for; see `ModelEngine.run_when_idle`."""
        buffer, extent = self._buffer_for(request)
        await asyncio.to_thread(copy_rows, buffer, request.rows)  # no request's copy is to wait for this one
        return await self._calls.run(self._model.snapshot.id, request, extent, when_idle=True)

    def _buffer_for(self, request: EngineRequest) -> tuple[Rows, Extent]:
        _, height, width = request.shape
        return self._buffer(request.images, (height, width))

    def _buffer(self, images: int, resolution: Resolution) -> tuple[Rows, Extent]:
        self._calls.check()
        snapshot = self._model.snapshot
        try:
            room_bytes = snapshot.room_bytes(*resolution, images)
        except KeyError:
            sizes = " or ".join(f"{height} x {width}" for height, width in snapshot.output_bytes)
            raise refusal(resolution, sizes) from None
        of_rows = layout(snapshot.inputs, *resolution)
        extent = self._calls.arena.take(arrays_bytes(images, of_rows) + room_bytes, self._model.share)
        rows = arrays_in(extent.memory, 0, images, of_rows)
        self._buffers.append((rows, extent))
        return rows, extent
