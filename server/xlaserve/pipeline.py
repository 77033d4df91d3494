"""A request's way, in one straight line: admitted, decoded, queued, run, and back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from xlaserve.config import Mode, Settings
from xlaserve.engine.device import usable_cores
from xlaserve.engine.program import Images, Outputs
from xlaserve.errors import InvalidArgument
from xlaserve.image import ImageLimits, decode
from xlaserve.model.version import Served

CHANNELS = 3


@dataclass(frozen=True, slots=True)
class Request:
    """What a client asks for, whichever protocol it came by."""

    mode: str
    """Empty: the model's default."""
    images: Images | Sequence[bytes]
    """Pixels `[n, height, width, 3]` that passed `image.check_pixels`, or encoded images; at least one."""
    deadline: float
    """In seconds of the clock."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What the model gave, and where the time went."""

    served: Served
    mode: Mode
    images: int
    outputs: Outputs
    decode_s: float
    queue_s: float
    gather_s: float
    execute_s: float


class Pipeline:
    """Runs requests on ready models. Decodes on threads of its own, so that the event loop never does."""

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
            decode_s = 0.0
            if not isinstance(images, np.ndarray):
                began = self.clock()
                images = await self._decode(images, height, width)
                decode_s = self.clock() - began
            result = await served.batcher.run(images, mode, request.deadline)
        finally:
            served.batcher.leave(len(images), size_bytes)
        return Answer(served, mode, len(images), result.outputs, decode_s, *result[1:])

    def stop(self) -> None:
        """Ends the decoding threads; what they have not begun is dropped."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _decode(self, encoded: Sequence[bytes], height: int, width: int) -> Images:
        """Returns the images as pixels `[n, height, width, 3]`, decoded side by side."""
        pixels = np.empty((len(encoded), height, width, CHANNELS), np.uint8)

        def decode_row(row: int) -> None:
            pixels[row] = decode(encoded[row], height=height, width=width, limits=self._limits)

        loop = asyncio.get_running_loop()
        rows = [loop.run_in_executor(self._threads, decode_row, row) for row in range(len(encoded))]
        try:
            await asyncio.gather(*rows)
        finally:
            for row in rows:
                row.cancel()
        return pixels


def _check_size(served: Served, pixels: Images) -> None:
    if pixels.shape[1:3] not in served.sizes:
        sizes = " or ".join(f"[n, {height}, {width}, 3]" for height, width in sorted(served.sizes))
        raise InvalidArgument("pixels", f"shape {sizes}", list(pixels.shape))
