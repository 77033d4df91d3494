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
from xlaserve.config import Bucket, Grey16, Mode, Settings
from xlaserve.engine.buckets.demand import Resolution
from xlaserve.engine.inputs import Images, Inputs, Rows, empty, row_bytes, selected
from xlaserve.engine.model_engine import Ticket
from xlaserve.engine.program import Outputs
from xlaserve.engine.request import DEFAULT_PRIORITY, BatchRows, EncodedRequest, EngineRequest, Result, check_row_shapes
from xlaserve.engine.timings import Timings
from xlaserve.engine.trace_context import TraceContext, TracedBatch
from xlaserve.images.decoder import Encoded, ImageLimits, decode, of_images
from xlaserve.images.frame import Frame, whole, within
from xlaserve.images.threads import DecodingThreads
from xlaserve.models.version import Served
from xlaserve.pipeline.request_decoding import RowDecoder
from xlaserve.pipeline.request_inputs import (
    ARRAYS,
    Array,
    Given,
    check_colors,
    check_others,
    check_size,
    size_of,
    sizes_of,
)
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


class Request(NamedTuple):
    """A client's request, from any protocol."""

    mode: str
    """The mode to run in; empty for the model's default."""
    images: Given
    """The model's first input."""
    deadline: float
    """When it has to be answered, in seconds of the clock."""
    rendering: Rendering | Drawn | None = None
    priority: int = DEFAULT_PRIORITY
    """A key of `engine.request.WEIGHTS`."""
    trace: TraceContext | None = None
    """The span of its call, where that is recorded."""
    others: tuple[Given, ...] = ()
    """The model's other inputs, in its order, with as many rows as the first."""

    def with_rows(self, rows: Rows, mode: Mode, resolution: Resolution | None = None) -> EngineRequest:
        """Returns the request for an engine, which runs all or some of the rows, in this mode.

        `resolution` is the size of the buckets, None where it is that of the first input.
        """
        return EngineRequest(rows, mode, self.deadline, self.priority, self.trace, resolution)


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
        if not request.others and isinstance(images, ARRAYS):
            return self._run_arrays(served, request, (images,))
        given = (images, *request.others)
        arrays = tuple(one for one in given if isinstance(one, ARRAYS))
        if len(arrays) == len(given):
            return self._run_arrays(served, request, arrays)
        return self._run_encoded(served, request, given)

    def stop(self) -> None:
        """Ends the decoding threads; what they have not begun is dropped."""
        self._threads.stop()

    async def _run_arrays(self, served: Served, request: Request, given: tuple[Array, ...]) -> Answer:
        mode = served.mode(request.mode)
        size = size_of(served.model, given[0])
        unmatched = None if size in served.sizes else size
        if unmatched is not None and not served.takes_unmatched:
            check_size(served, given[0], size)
        check_others(served.model, given, size)
        size_bytes = sum([one.nbytes for one in given])
        with served.engine.admit(len(given[0]), size_bytes, unmatched) as admitted:
            rows = [one for one in given if isinstance(one, np.ndarray)]
            if len(rows) != len(given):
                rows = [await self._checked(served, one, request.deadline) for one in given]
            if unmatched is not None:
                mode = await admitted.open(unmatched, mode)
            result = await admitted.run(request.with_rows((*rows,), mode, None if size[0] else size))
            return await self._answer(served, request, mode, [whole(*size)] * len(rows[0]), result)

    async def _run_encoded(self, served: Served, request: Request, given: Sequence[Given]) -> Answer:
        mode, count = served.mode(request.mode), len(given[0])
        check_colors(served.model, given)
        most_bytes = max(row_bytes(served.model.inputs, *size) for size in served.inputs)
        encoded_bytes = sum(len(image) for one in given if not isinstance(one, ARRAYS) for image in one)
        with served.engine.admit(count, count * most_bytes + encoded_bytes) as admitted:
            self._check_deadline(served, mode, request)
            began = self.clock()
            read = [
                await self._checked(served, one, request.deadline) if isinstance(one, ARRAYS) else one for one in given
            ]
            groups, frames, warning = await self._decode(read, served, admitted, request.deadline)
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

    async def _checked(self, served: Served, pending: Array, deadline: float) -> NDArray[Any]:
        """Returns an array, read and checked on a thread where it is not yet."""
        if isinstance(pending, np.ndarray):
            return pending
        (images,) = await self._threads.map(served.settings.name, lambda row: pending.check(), 1, deadline)
        return images

    async def _decode(
        self, given: Sequence[NDArray[Any] | Sequence[Encoded]], served: Served, admitted: Ticket, deadline: float
    ) -> tuple[list[Group], Sequence[Frame], str]:
        """Returns the rows with images as pixels, decoded on several threads, the frame of each image of the first
        input, and what to warn the client of.

        Each gets the resolution that suits it best; where outputs can't have several, all get that of the first.
        """
        count, sizes = len(given[0]), sizes_of(served, given)
        # Where all have one resolution, they are decoded to where they run. Unused arrays are never paged in.
        allocate = admitted.buffer if len(served.inputs) == 1 else partial(_allocate, served.model.inputs)
        buffers = {size: allocate(count, size) for size in sizes}
        rows_of_given = RowDecoder(served, given, buffers, self._limits, self.memory)
        decode_row, warned = rows_of_given.decode, rows_of_given.warned
        model = served.settings.name
        if len(sizes) == 1:
            rows_of_given.place = partial(served.place_into, sizes[0])
        if served.has_sized_outputs and len(sizes) > 1:
            (of_first,) = await self._threads.map(model, decode_row, 1, deadline)
            rows_of_given.place = partial(served.place_into, (of_first.input_height, of_first.input_width))
            rest = count - 1
            frames = [of_first, *await self._threads.map(model, lambda row: decode_row(row + 1), rest, deadline)]
        else:
            frames = await self._threads.map(model, decode_row, count, deadline)
        rows: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        for row, frame in enumerate(frames):
            rows[frame.input_height, frame.input_width].append(row)
        warning = "; ".join(of_images(said, images, count, name) for (name, said), images in warned.items())
        if len(rows) == 1:
            (only,) = rows
            return [Group(range(count), buffers[only])], frames, warning
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
            assert not isinstance(encoded, ARRAYS)
            draw, grey16 = rendering.drawing.drawer(task), served.settings.grey16
            if grey16 is None and served.model.image.is_deep:
                grey16 = Grey16.LARGEST  # a picture of 12 bits would be black
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
