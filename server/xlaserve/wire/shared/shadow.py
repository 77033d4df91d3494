"""Shadows: a share of the requests runs in another version or mode as well, to be compared with what answers them.

Nothing here is on a request's path. Once a request is answered, its images are handed over; they are decoded again on a
thread that yields to the traffic, and run in both, one after the other and alone on the device, so that both times are
of the same work. A batch begins only while the device is idle: a request waits for one such batch at most. Each model
has one shadow at a time at a front, and what can't be compared at once is dropped and counted.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, NamedTuple, TypeVar

import numpy as np

from xlaserve.admission.shared_counts import Amount
from xlaserve.config import Mode
from xlaserve.engine import gil
from xlaserve.engine.inputs import Images
from xlaserve.engine.niceness import yield_to_traffic
from xlaserve.engine.request import EngineRequest, Result
from xlaserve.errors import DeadlineExceeded, EngineLost, InvalidArgument, ModelNotReady, QueueFull, XlaserveError
from xlaserve.images.decoder import Decoded, Encoded, ImageLimits
from xlaserve.images.frame import Frame, whole
from xlaserve.models.encoded_images import conversion, decode_for
from xlaserve.models.likeness import OfImage, can_compare, likeness
from xlaserve.models.task import Task
from xlaserve.models.version import Served
from xlaserve.models.version_lookup import Directory
from xlaserve.pipeline.request_inputs import Given, Pending, PendingTensor
from xlaserve.telemetry.findings import Findings, Likeness, Pair, TimeRatio
from xlaserve.telemetry.metrics import Metrics

log = logging.getLogger(__name__)

MAX_HELD_BYTES: Final = 64 * 2**20
"""Bytes of requests that are held for shadows, of all models at all fronts together."""
PATIENCE_S: Final = 1.0
"""How long a batch waits for an idle device."""

Made = TypeVar("Made")
RequestImages = Images | Pending | Sequence[Encoded]


class Side(NamedTuple):
    """One of the two that are compared."""

    served: Served
    mode: Mode


class Input(NamedTuple):
    """Images as one model takes them."""

    pixels: Images
    """Of one resolution."""
    frames: Sequence[Frame]


class Dropped(Exception):
    """The shadow of a request was given up; the message is the reason, a label of a metric."""


class Shadows:
    """The shadows of all models. All methods run on the event loop.

    `held` are the bytes of requests that are held for them, at all fronts.
    """

    def __init__(
        self,
        directory: Directory,
        limits: ImageLimits,
        metrics: Metrics,
        *,
        draw: Callable[[], float] = random.random,
        clock: Callable[[], float] = time.perf_counter,
        held: Amount | None = None,
    ) -> None:
        self._directory = directory
        self._limits = limits
        self._metrics = metrics
        self._draw = draw
        self._clock = clock
        self._held = held or Amount()
        self._running: dict[str, asyncio.Task[None]] = {}
        self._is_shadow_first = False
        self._thread = ThreadPoolExecutor(1, "shadow", initializer=yield_to_traffic)

    def offer(self, served: Served, images: Given, mode: Mode) -> None:
        """Takes the images of a request that `served` has answered in `mode`. Returns at once and raises nothing."""
        settings = served.settings.shadow
        if settings is None or self._draw() >= settings.share:
            return
        try:
            self._begin(Side(served, mode), settings.version, settings.mode, images)
        except Exception:
            log.exception("model %s: no shadow could be begun", served.settings.title)

    async def stop(self) -> None:
        """Gives up what runs, and waits for nothing but its end."""
        running = [*self._running.values()]
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _begin(self, ours: Side, version: str | None, mode: Mode | None, images: Given) -> None:
        name = ours.served.settings.name
        try:
            served = ours.served if version is None else self._directory.get(name, version)
        except XlaserveError:
            self._drop(ours, Pair(ours.mode, version or "", mode or ours.mode), "not_ready")
            return
        theirs = Side(served, mode or _mode_like(ours.mode, served))
        if theirs == ours:
            return
        pair = Pair(ours.mode, served.settings.version, theirs.mode)
        # Other inputs than one image are not compared.
        if isinstance(images, PendingTensor) or not all(side.served.model.is_of_one_image for side in (ours, theirs)):
            self._drop(ours, pair, "unlike")
            return
        size_bytes = _size_bytes(images)
        if name in self._running:
            self._drop(ours, pair, "busy")
        elif self._held.total + size_bytes > MAX_HELD_BYTES:
            self._drop(ours, pair, "memory")
        elif theirs.mode not in served.settings.modes or not can_compare(ours.served.model.task, served.model.task):
            self._drop(ours, pair, "unlike")
        else:
            self._held.own += size_bytes
            task = asyncio.create_task(self._run(ours, theirs, pair, images), name=f"shadow {name}")
            self._running[name] = task
            task.add_done_callback(lambda _: self._end(name, size_bytes))

    def _end(self, name: str, size_bytes: int) -> None:
        del self._running[name]
        self._held.own -= size_bytes

    async def _run(self, ours: Side, theirs: Side, pair: Pair, images: RequestImages) -> None:
        try:
            await self._compare(ours, theirs, pair, images)
        except Dropped as dropped:
            self._drop(ours, pair, str(dropped))
        except Exception as error:
            self._drop(ours, pair, "failed")
            names = ours.served.settings.title, theirs.served.settings.version, theirs.mode
            log.warning("model %s: its shadow, version %s in %s, failed", *names, exc_info=error)

    async def _compare(self, ours: Side, theirs: Side, pair: Pair, images: RequestImages) -> None:
        inputs = await self._on_thread(lambda: _inputs((ours, theirs), images, self._limits))
        self._is_shadow_first = not self._is_shadow_first  # the first finds the caches as the traffic left them
        if self._is_shadow_first:
            got = await self._run_when_idle(theirs, inputs[1].pixels)
            wanted = await self._run_when_idle(ours, inputs[0].pixels)
        else:
            wanted = await self._run_when_idle(ours, inputs[0].pixels)
            got = await self._run_when_idle(theirs, inputs[1].pixels)
        found = await self._on_thread(lambda: _likenesses(ours.served.model.task, inputs, (wanted, got)))
        self._record(ours, pair, found, wanted.timings.execute_s, got.timings.execute_s)

    async def _run_when_idle(self, side: Side, pixels: Images) -> Result:
        """Returns what one batch gave. Raises Dropped, and ExecutionFailed."""
        deadline = self._clock() + PATIENCE_S
        try:
            return await side.served.engine.run_when_idle(EngineRequest((pixels,), side.mode, deadline))
        except (DeadlineExceeded, QueueFull):
            raise Dropped("busy") from None
        except (ModelNotReady, EngineLost):
            raise Dropped("not_ready") from None
        except InvalidArgument:  # memory has turned out not to hold such batches
            raise Dropped("unlike") from None

    async def _on_thread(self, work: Callable[[], Made]) -> Made:
        def shared() -> Made:
            with gil.shared():
                return work()

        return await asyncio.get_running_loop().run_in_executor(self._thread, shared)

    def _record(self, ours: Side, pair: Pair, found: list[Likeness], served_s: float, shadow_s: float) -> None:
        metrics, labels = self._metrics, _labels(ours, pair)
        findings = _findings(ours, pair)
        for one in found:
            findings.add(one)
            metrics.shadow_agreement.labels(*labels).observe(one.agreement)
            if one.iou is not None:
                metrics.shadow_iou.labels(*labels).observe(one.iou)
            if one.difference is not None:
                metrics.shadow_difference.labels(*labels).observe(one.difference)
        metrics.shadow_execute_s.labels(*labels, "served").observe(served_s)
        metrics.shadow_execute_s.labels(*labels, "shadow").observe(shadow_s)
        if served_s > 0 and shadow_s > 0:
            findings.time_ratios.append(TimeRatio(time.time(), shadow_s / served_s))

    def _drop(self, ours: Side, pair: Pair, reason: str) -> None:
        _findings(ours, pair).dropped[reason] += 1
        self._metrics.shadow_dropped.labels(*_labels(ours, pair), reason).inc()


def _mode_like(mode: Mode, served: Served) -> Mode:
    settings = served.settings
    return mode if mode in settings.modes else settings.effective_default_mode


def _size_bytes(images: RequestImages) -> int:
    return images.nbytes if isinstance(images, (np.ndarray, Pending)) else sum(map(len, images))


def _findings(ours: Side, pair: Pair) -> Findings:
    return ours.served.version.shadows.setdefault(pair, Findings())


def _labels(ours: Side, pair: Pair) -> tuple[str, ...]:
    settings = ours.served.settings
    return settings.name, settings.version, *pair


def _inputs(sides: tuple[Side, Side], images: RequestImages, limits: ImageLimits) -> tuple[Input, Input]:
    """Returns a request's images as both take them: the first, as many as fit into one batch. Raises Dropped."""
    if isinstance(images, (np.ndarray, Pending)):
        ours, theirs = (side.served.model.image for side in sides)
        if (ours.channels, ours.color, ours.dtype) != (theirs.channels, theirs.color, theirs.dtype):
            raise Dropped("unlike")
        pixels = images.check() if isinstance(images, Pending) else images
        _, height, width, _ = pixels.shape
        pixels = pixels[: _fitting(sides, [whole(height, width)] * 2)]
        both = Input(pixels, [whole(height, width)] * len(pixels))
        return both, both
    try:
        return _decoded(sides, images, limits)
    except InvalidArgument:  # an image of another size, where the other version takes only its own
        raise Dropped("unlike") from None


def _decoded(sides: tuple[Side, Side], images: Sequence[Encoded], limits: ImageLimits) -> tuple[Input, Input]:
    """Decodes images. Those that go into another resolution than the first are left out."""
    ours, theirs = (side.served for side in sides)
    ways = [(served.inputs, served.model.placing, conversion(served.model)) for served in (ours, theirs)]
    is_alike = ways[0] == ways[1]

    def decode_row(image: Encoded) -> tuple[Decoded, Decoded]:
        decoded = decode_for(ours.model, image, ours.place, limits)
        return decoded, decoded if is_alike else decode_for(theirs.model, image, theirs.place, limits)

    first = decode_row(images[0])
    rows = [first, *map(decode_row, images[1 : _fitting(sides, [one.frame for one in first])])]
    shapes = [one.pixels.shape for one in first]
    columns = zip(*(row for row in rows if [one.pixels.shape for one in row] == shapes), strict=True)
    mine, other = (Input(np.stack([one.pixels for one in column]), [one.frame for one in column]) for column in columns)
    return mine, other


def _fitting(sides: tuple[Side, Side], frames: Sequence[Frame]) -> int:
    """Returns how many images both run in one batch, where these are their inputs. Raises Dropped for none."""
    largest = [
        served.engine.largest(mode, frame.input_height, frame.input_width)
        for (served, mode), frame in zip(sides, frames, strict=True)
    ]
    if not all(largest):
        raise Dropped("unlike")
    return min(largest)


def _likenesses(task: Task, inputs: tuple[Input, Input], results: tuple[Result, Result]) -> list[Likeness]:
    """Returns how alike the answers to each image are."""

    def answer(side: int, row: int) -> OfImage:
        outputs = results[side].batches[0].outputs
        return OfImage(tuple(output[row : row + 1] for output in outputs), inputs[side].frames[row])

    return [likeness(task, answer(0, row), answer(1, row)) for row in range(len(inputs[0].frames))]
