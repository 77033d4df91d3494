"""The path of a request: admitted, decoded, queued, run, rendered."""

from __future__ import annotations

import asyncio
import math
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from xlaserve.admission.image_memory import ImageMemory
from xlaserve.admission.shared_counts import SharedCounts
from xlaserve.config import Bucket, Mode, PixelRange, Settings
from xlaserve.engine.buckets.demand import Resolution
from xlaserve.engine.inputs import Images, Inputs, Rows, empty, selected
from xlaserve.engine.model_engine import Ticket
from xlaserve.engine.program import Outputs
from xlaserve.engine.request import DEFAULT_PRIORITY, BatchRows, EncodedRequest, EngineRequest, Result, check_row_shapes
from xlaserve.engine.timings import Timings
from xlaserve.engine.trace_context import TraceContext, TracedBatch
from xlaserve.errors import InvalidArgument, RequestError
from xlaserve.images.decoder import Encoded, ImageLimits, Place, check_pixels, decode, of_images
from xlaserve.images.frame import Frame, whole, within
from xlaserve.images.image_input import RGB, ImageInput
from xlaserve.images.threads import DecodingThreads
from xlaserve.models.version import Served
from xlaserve.programs.tf.device import usable_cores

MAX_INLINE_BYTES: Final = 2**19
"""Bytes of outputs that are put together on the event loop; four times as many take about a millisecond."""

Render = Callable[[Outputs, Frame], Any]
"""Maps one image's rows of the outputs, and where it lies in the model's input, to what a protocol answers."""


class Rendering(Protocol):
    """Work on the answer that takes too long for the event loop: plain data that names it."""

    def renderer(self, task: Any) -> Render:
        """Returns what does it for one request to a model of this task. It may raise a RequestError."""


Draw = Callable[[Outputs, Frame, Images], Any]
"""Maps the same, and the image itself upright and RGB, `[height, width, 3]`, to a picture."""


class Drawing(Protocol):
    """Work on the answer that needs the image itself: plain data that names it."""

    def drawer(self, task: Any) -> Draw:
        """Returns what does it for one request to a model of this task."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """A rendering into encoded images, which are decoded once more: no larger than `max_side`."""

    drawing: Drawing
    max_side: int


class Readable(Protocol):
    """An array, or what `numpy.asarray` makes one of. Plain data, which can be pickled."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array."""

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""

    def __array__(self) -> NDArray[Any]:
        """Returns the array. May raise InvalidArgument."""


@dataclass(frozen=True, slots=True)
class Pending:
    """Pixels that are read and checked on a thread, as that takes too long for the event loop."""

    pixels: Readable
    """The array, in a shape that `image` takes."""
    pixel_range: PixelRange
    image: ImageInput = RGB

    @property
    def shape(self) -> tuple[int, ...]:
        """`[n, height, width, channels]`. Raises InvalidArgument for another shape."""
        return self.image.arranged_shape(self.pixels.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return self.pixels.nbytes

    def __len__(self) -> int:
        return self.pixels.shape[0]

    def check(self) -> Images:
        """Reads the pixels and checks them as `decoder.check_pixels` does. Raises InvalidArgument."""
        return check_pixels(np.asarray(self.pixels), self.pixel_range, self.image)


class Request(NamedTuple):
    """A client's request, from any protocol."""

    mode: str
    """The mode to run in; empty for the model's default."""
    images: Images | Pending | Sequence[Encoded]
    """Pixels `[n, height, width, channels]` that passed `decoder.check_pixels`, or encoded images; at least one."""
    deadline: float
    """When it has to be answered, in seconds of the clock."""
    rendering: Rendering | Drawn | None = None
    priority: int = DEFAULT_PRIORITY
    """A key of `engine.request.WEIGHTS`."""
    trace: TraceContext | None = None
    """The span of its call, where that is recorded."""

    def with_rows(self, rows: Rows, mode: Mode) -> EngineRequest:
        """Returns the request for an engine, which runs all or some of the images as pixels, in this mode."""
        return EngineRequest(rows, mode, self.deadline, self.priority, self.trace)


class Answer(NamedTuple):
    """A model's answer."""

    mode: Mode
    images: int
    outputs: Outputs
    frames: Sequence[Frame]
    """Where each image lies in the model's input."""
    rendered: Sequence[Any]
    """The results of the request's `rendering`, one for each image; empty without a rendering."""
    timings: Timings
    """The stages so far."""
    at: float
    """When the model had answered, in seconds of the clock."""
    traced: Sequence[TracedBatch] = ()
    """The batches that it was in, where it is traced."""
    warning: str = ""
    """A choice that was made for want of a setting; for the client."""


class Group(NamedTuple):
    """Images of a request that have one resolution."""

    images: Sequence[int]
    """Which of the request's images."""
    rows: Rows


class Pipeline:
    """Runs requests on ready models. Decodes and renders on threads of its own, where models take turns.

    All fronts together have `decode_threads`, those of `usage`.
    """

    def __init__(
        self, settings: Settings, clock: Callable[[], float] = time.perf_counter, usage: SharedCounts | None = None
    ) -> None:
        usage = usage or SharedCounts()
        threads = settings.decode_threads or usable_cores()
        self._limits = ImageLimits.of(settings)
        self.memory = ImageMemory(settings.max_decode_bytes, usage)
        self._threads = DecodingThreads(lambda: max(1, threads // usage.serving), clock)
        self.clock = clock

    def run(self, served: Served, request: Request) -> Coroutine[Any, Any, Answer]:
        """Returns the model's answer. Raises any RequestError, ModelError or OverloadError."""
        images = request.images
        if isinstance(images, (np.ndarray, Pending)):
            return self._run_pixels(served, request, images)
        return self._run_encoded(served, request, images)

    def stop(self) -> None:
        """Ends the decoding threads; what they have not begun is dropped."""
        self._threads.stop()

    async def _run_pixels(self, served: Served, request: Request, images: Images | Pending) -> Answer:
        mode = served.mode(request.mode)
        count, height, width, channels = images.shape
        if channels != served.model.image.channels:
            raise InvalidArgument("pixels", f"shape {served.model.image.text()}", list(images.shape))
        unmatched = None if (height, width) in served.sizes else (height, width)
        if unmatched is not None and not served.takes_unmatched:
            sizes = " or ".join(served.model.image.text(*size) for size in sorted(served.sizes))
            raise InvalidArgument("pixels", f"shape {sizes}", list(images.shape))
        with served.engine.admit(count, images.nbytes, unmatched) as admitted:
            if isinstance(images, Pending):
                images = await self._checked(served, images, request.deadline)
            if unmatched is not None:
                mode = await admitted.open(unmatched, mode)
            result = await admitted.run(request.with_rows((images,), mode))
            return await self._answer(served, request, mode, [whole(height, width)] * count, result)

    async def _run_encoded(self, served: Served, request: Request, images: Sequence[Encoded]) -> Answer:
        mode = served.mode(request.mode)
        pixels = max(height * width for height, width in served.inputs) * served.model.color.channels
        size_bytes = len(images) * pixels + sum(map(len, images))
        with served.engine.admit(len(images), size_bytes) as admitted:
            self._check_deadline(served, mode, request)
            began = self.clock()
            groups, frames, warning = await self._decode(images, served, admitted, request.deadline)
            decode_s = self.clock() - began
            result = await _run_groups(admitted, groups, mode, request)
            result.timings.decode_s = decode_s
            answer = await self._answer(served, request, mode, frames, result)
            return answer._replace(warning=warning) if warning else answer

    def _check_deadline(self, served: Served, mode: Mode, request: Request) -> None:
        """Raises DeadlineUnreachable for encoded images that can't be decoded and run before their deadline."""
        if request.deadline == math.inf:
            return
        images, shapes = len(request.images), [(mode, *size) for size in served.inputs]
        decoded = self._threads.expect(served.settings.name, images)
        served.engine.check_encoded(
            EncodedRequest(images, request.deadline, request.priority, shapes, decoded.likely_s, decoded.waiting)
        )

    async def _answer(
        self, served: Served, request: Request, mode: Mode, frames: Sequence[Frame], result: Result
    ) -> Answer:
        """Puts together what the batches gave, and renders it where the request names a rendering."""
        batches, timings, traced = result
        if len(batches) == 1:
            outputs = batches[0].outputs
        else:
            outputs = await self._put_together(served, len(frames), batches, request.deadline)
        rendered: Sequence[Any] = ()
        if request.rendering is not None:
            began = self.clock()
            rendered = await self._render(served, request, outputs, frames)
            timings.encode_s = self.clock() - began
        return Answer(mode, len(frames), outputs, frames, rendered, timings, self.clock(), traced)

    async def _checked(self, served: Served, pending: Pending, deadline: float) -> Images:
        (images,) = await self._threads.map(served.settings.name, lambda row: pending.check(), 1, deadline)
        return images

    async def _decode(
        self, encoded: Sequence[Encoded], served: Served, admitted: Ticket, deadline: float
    ) -> tuple[list[Group], Sequence[Frame], str]:
        """Returns the images as pixels, decoded on several threads, the frame of each, and what to warn the client of.

        Each gets the resolution that suits it best; where outputs can't have several, all get that of the first.
        """
        # Where all have one resolution, they are decoded to where they run. Unused arrays are never paged in.
        inputs, color = served.model.inputs, served.model.color
        allocate = admitted.buffer if len(served.inputs) == 1 else partial(_allocate, inputs)
        buffers = {size: allocate(len(encoded), size) for size in served.inputs}
        place: Place = served.place
        settings, warned = served.settings, defaultdict[str, list[int]](list)

        def decode_row(row: int) -> Frame:
            try:
                image, frame, warning = decode(
                    encoded[row],
                    place,
                    self._limits,
                    self.memory.hold,
                    served.model.decode,
                    color=color,
                    grey16=settings.grey16,
                    resize=served.model.resize,
                )
            except RequestError as error:
                if len(encoded) > 1:
                    error.name_image(row)
                raise
            (pixels,) = buffers[frame.input_height, frame.input_width]
            pixels[row] = image
            if warning:
                warned[warning].append(row)
            return frame

        model = settings.name
        if served.has_sized_outputs and len(buffers) > 1:
            (first,) = await self._threads.map(model, decode_row, 1, deadline)
            place = partial(served.place_into, (first.input_height, first.input_width))
            rest = len(encoded) - 1
            frames = [first, *await self._threads.map(model, lambda row: decode_row(row + 1), rest, deadline)]
        else:
            frames = await self._threads.map(model, decode_row, len(encoded), deadline)
        rows: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        for row, frame in enumerate(frames):
            rows[frame.input_height, frame.input_width].append(row)
        warning = "; ".join(of_images(said, images, len(encoded)) for said, images in warned.items())
        if len(rows) == 1:
            (size,) = rows
            return [Group(range(len(encoded)), buffers[size])], frames, warning
        chosen = list(rows.items())

        def select(group: int) -> Group:
            size, images = chosen[group]
            return Group(images, selected(buffers[size], images))

        groups = await self._threads.map(model, select, len(chosen), deadline)
        return groups, frames, warning

    async def _put_together(self, served: Served, images: int, batches: list[BatchRows], deadline: float) -> Outputs:
        """Returns the outputs of all images. Copies them on the threads where they are large, and empties `batches`.

        Raises ExecutionFailed where their rows differ in shape.
        """
        check_row_shapes(batches)
        outputs = tuple(np.empty((images, *output.shape[1:]), output.dtype) for output in batches[0].outputs)

        def copy(index: int) -> None:
            rows, of_batch = batches.pop()
            for output, values in zip(outputs, of_batch, strict=True):
                output[slice(rows.start, rows.stop) if isinstance(rows, range) else rows] = values

        if sum(output.nbytes for output in outputs) <= MAX_INLINE_BYTES:
            for index in range(len(batches)):
                copy(index)
        else:
            await self._threads.map(served.settings.name, copy, len(batches), deadline, is_rendering=True)
        return outputs

    async def _render(self, served: Served, request: Request, outputs: Outputs, frames: Sequence[Frame]) -> list[Any]:
        rendering, task = request.rendering, served.model.task
        assert rendering is not None
        if isinstance(rendering, Drawn):
            encoded = request.images
            assert not isinstance(encoded, (np.ndarray, Pending))
            draw, grey16 = rendering.drawing.drawer(task), served.settings.grey16
            place = partial(within, rendering.max_side)

            def render_row(row: int) -> Any:
                image = decode(encoded[row], place, self._limits, self.memory.hold, grey16=grey16)
                return draw(tuple(output[row : row + 1] for output in outputs), frames[row], image.pixels)

        else:
            render = rendering.renderer(task)

            def render_row(row: int) -> Any:
                return render(tuple(output[row : row + 1] for output in outputs), frames[row])

        model = served.settings.name
        return await self._threads.map(model, render_row, len(frames), request.deadline, is_rendering=True)


def _allocate(inputs: Inputs, images: int, size: Resolution) -> Rows:
    return empty(inputs, Bucket(images, *size))


async def _run_groups(admitted: Ticket, groups: Sequence[Group], mode: Mode, request: Request) -> Result:
    """Returns what the batches gave, in any order, and the slowest stages; where one group fails, so do the others."""
    if len(groups) == 1:
        return await admitted.run(request.with_rows(groups[0].rows, mode))
    running = [asyncio.ensure_future(admitted.run(request.with_rows(group.rows, mode))) for group in groups]
    try:
        results = await asyncio.gather(*running)
    finally:
        for one in running:
            one.cancel()
    gathered = [
        BatchRows(group.images[rows[0] : rows[-1] + 1], outputs)
        for group, result in zip(groups, results, strict=True)
        for rows, outputs in result.batches
    ]
    traced = [batch for result in results for batch in result.traced]
    return Result(gathered, Timings.slowest(result.timings for result in results), traced)
