"""A request's way, in one straight line: admitted, decoded, queued, run, rendered, and back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np

from xlaserve.config import Mode, Settings
from xlaserve.engine.device import usable_cores
from xlaserve.engine.program import Images, Outputs
from xlaserve.errors import InvalidArgument
from xlaserve.frame import Frame, place, whole
from xlaserve.image import ImageLimits, Place, decode
from xlaserve.model.version import Served

CHANNELS = 3

Made = TypeVar("Made")
Render = Callable[[Outputs, Frame], Any]
"""From one image's rows of the outputs, and where it lies in the model's input, to what a protocol answers."""


@dataclass(frozen=True, slots=True)
class Request:
    """What a client asks for, whichever protocol it came by."""

    mode: str
    """Empty: the model's default."""
    images: Images | Sequence[bytes]
    """Pixels `[n, height, width, 3]` that passed `image.check_pixels`, or encoded images; at least one."""
    deadline: float
    """In seconds of the clock."""
    render: Render | None = None
    """What takes too long for the event loop to be done there; it may raise a RequestError."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What the model gave, and where the time went."""

    served: Served
    mode: Mode
    images: int
    outputs: Outputs
    frames: Sequence[Frame]
    """Where each image lies in the model's input."""
    rendered: Sequence[Any]
    """What the request's `render` made of each image; nothing without it."""
    decode_s: float
    queue_s: float
    gather_s: float
    execute_s: float
    render_s: float


class Pipeline:
    """Runs requests on ready models. Decodes and renders on threads of its own, so that the event loop never does."""

    def __init__(self, settings: Settings, clock: Callable[[], float] = time.perf_counter) -> None:
        self._limits = ImageLimits(settings.max_image_bytes, settings.max_image_pixels)
        self._threads = ThreadPoolExecutor(settings.decode_threads or usable_cores(), thread_name_prefix="decode")
        self.clock = clock

    async def run(self, served: Served, request: Request) -> Answer:
        """Returns the model's answer. Raises any RequestError, ModelError or OverloadError."""
        mode = served.mode(request.mode)
        images = request.images
        height, width = served.image_size
        size_bytes = len(images) * height * width * CHANNELS
        if isinstance(images, np.ndarray):
            _check_size(served, images)
            size_bytes = images.nbytes
        else:
            size_bytes += sum(map(len, images))
        served.batcher.admit(len(images), size_bytes)
        try:
            decode_s = render_s = 0.0
            rendered: list[Any] = []
            frames: Sequence[Frame]
            if isinstance(images, np.ndarray):
                pixels, frames = images, [whole(*images.shape[1:3])] * len(images)
            else:
                began = self.clock()
                fit = partial(place, input_height=height, input_width=width, fit=served.fit)
                pixels, frames = await self._decode(images, height, width, fit)
                decode_s = self.clock() - began
            result = await served.batcher.run(pixels, mode, request.deadline)
            if request.render:
                began = self.clock()
                rendered = await self._render(request.render, result.outputs, frames)
                render_s = self.clock() - began
        finally:
            served.batcher.leave(len(images), size_bytes)
        return Answer(
            served, mode, len(images), result.outputs, frames, rendered, decode_s, *result[1:], render_s=render_s
        )

    def stop(self) -> None:
        """Ends the decoding threads; what they have not begun is dropped."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _decode(
        self, encoded: Sequence[bytes], height: int, width: int, fit: Place
    ) -> tuple[Images, Sequence[Frame]]:
        """Returns the images as pixels `[n, height, width, 3]`, decoded side by side, and where in them they lie."""
        pixels = np.empty((len(encoded), height, width, CHANNELS), np.uint8)

        def decode_row(row: int) -> Frame:
            pixels[row], frame = decode(encoded[row], fit, self._limits)
            return frame

        return pixels, await self._on_threads(decode_row, len(encoded))

    async def _render(self, render: Render, outputs: Outputs, frames: Sequence[Frame]) -> list[Any]:
        def render_row(row: int) -> Any:
            return render(tuple(output[row : row + 1] for output in outputs), frames[row])

        return await self._on_threads(render_row, len(frames))

    async def _on_threads(self, work: Callable[[int], Made], rows: int) -> list[Made]:
        """Returns what `work` makes of each row, side by side; where one fails, those not yet begun are dropped."""
        loop = asyncio.get_running_loop()
        pending = [loop.run_in_executor(self._threads, work, row) for row in range(rows)]
        try:
            return await asyncio.gather(*pending)
        finally:
            for row in pending:
                row.cancel()


def _check_size(served: Served, pixels: Images) -> None:
    if pixels.shape[1:3] not in served.sizes:
        sizes = " or ".join(f"[n, {height}, {width}, 3]" for height, width in sorted(served.sizes))
        raise InvalidArgument("pixels", f"shape {sizes}", list(pixels.shape))
