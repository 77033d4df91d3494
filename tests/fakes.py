"""What tests put in the place of time, of a device and of models."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import numpy as np
import pytest

from xlaserve.config import Bucket, Mode, PixelRange
from xlaserve.engine.batching.lanes import Lanes, Share
from xlaserve.engine.batching.worker import Batch, Run, Worker, gather
from xlaserve.engine.inputs import RGB_IMAGE, Images, Inputs, pixels
from xlaserve.engine.program import Compilation, Outputs, run_batch
from xlaserve.engine.request import Result
from xlaserve.images.image_input import RGB, ImageInput
from xlaserve.models.task import Task
from xlaserve.models.version import Served


class Clock:
    """A clock that tests advance."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def outputs_of(result: Result) -> Outputs:
    """Returns the outputs of all of a job's images, in their order."""
    parts = sorted(result.batches, key=lambda part: part.rows[0])
    assert [row for part in parts for row in part.rows] == list(range(parts[-1].rows[-1] + 1))
    return tuple(np.concatenate(outputs) for outputs in zip(*(part.outputs for part in parts), strict=True))


class Executable:
    """Answers with the numbers of the pictures, once `before` has let it."""

    def __init__(self, mode: Mode, echo: Callable[[Images], Outputs]) -> None:
        self.mode = mode
        self.before: Callable[[], None] = lambda: None
        self._echo = echo

    def __call__(self, images: Images) -> Outputs:
        self.before()
        return self._echo(images)


class Started(NamedTuple):
    at: float
    mode: Mode
    bucket: int
    numbers: list[int]


class FakeWorker(Worker):
    """Runs batches in virtual time: as many at once as there are lanes, each for what its bucket costs."""

    def __init__(self, loop: asyncio.AbstractEventLoop, lanes: int, cost_s: Mapping[int, float]) -> None:
        self.started: list[Started] = []
        self.running = 0
        self.staged: deque[tuple[float, Batch, Callable[[Run | BaseException], object]]] = deque()
        self.error_of: Callable[[Started], BaseException | None] = lambda batch: None
        self.reserved: Counter[Bucket] = Counter()
        self._loop = loop
        self._at_once = lanes
        self._cost_s = cost_s

    def reserve(self, buckets: Iterable[Bucket], inputs: Inputs = RGB_IMAGE) -> None:
        self.reserved.update(buckets)

    def free(self, buckets: Iterable[Bucket], inputs: Inputs = RGB_IMAGE) -> None:
        self.reserved.subtract(buckets)

    def submit(self, batch: Batch, done: Callable[[Run | BaseException], object]) -> None:
        self.staged.append((self._loop.time(), batch, done))
        self._start()

    def _start(self) -> None:
        while self.staged and self.running < self._at_once:
            self.running += 1
            since, batch, done = self.staged.popleft()
            rows = np.concatenate([rows for (rows,) in batch.rows])
            assert isinstance(batch.executable, Executable)
            numbers = [int(number) for number in batch.executable(rows)[0]]
            started = Started(self._loop.time(), batch.executable.mode, batch.bucket.batch, numbers)
            self.started.append(started)
            self._loop.call_later(self._cost_s[batch.bucket.batch], self._end, batch, started, started.at - since, done)

    def _end(
        self, batch: Batch, started: Started, wait_s: float, done: Callable[[Run | BaseException], object]
    ) -> None:
        self.running -= 1
        result: Run | BaseException | None = self.error_of(started)
        if result is None:
            buffer = np.empty((*batch.bucket, 3), np.uint8)
            gather(batch.rows, (buffer,))
            took_s = self._cost_s[batch.bucket.batch]
            try:
                result = Run(run_batch(batch.executable, buffer), 0.0, wait_s, took_s, ended=self._loop.time())
            except Exception as error:
                result = error
        done(result)
        del result  # an error that was caught here refers to this call, which holds requests' images
        self._start()


class Observer:
    """Keeps the mode, the bucket's batch and the images of each batch."""

    def __init__(self) -> None:
        self.ran: list[tuple[Mode, int, int]] = []
        self.failed: list[tuple[Mode, int, int]] = []

    def batch_ran(self, mode: Mode, bucket: Bucket, images: int, run: Run) -> None:
        self.ran.append((mode, bucket.batch, images))

    def batch_failed(self, mode: Mode, bucket: Bucket, images: int) -> None:
        self.failed.append((mode, bucket.batch, images))


class FakeProgram:
    """Compiles as `compilation` says, and keeps what was asked for in `compiled`."""

    platform = "fake"

    def __init__(self, compilation: Callable[[Mode, Bucket], Compilation]) -> None:
        self.compiled: list[tuple[Mode, Bucket]] = []
        self._compilation = compilation

    def compile(self, mode: Mode, bucket: Bucket) -> Compilation:
        self.compiled.append((mode, bucket))
        return self._compilation(mode, bucket)


def of_one_image(image: ImageInput = RGB) -> dict[str, Any]:
    """Returns what a model that takes one image says of its inputs."""
    inputs = pixels(image.channels)
    return {
        "image": image,
        "color": image.color,
        "inputs": inputs,
        "others": (),
        "names": tuple(each.name for each in inputs),
        "is_of_one_image": True,
    }


def served_with(task: Task, side: int = 32) -> Served:
    """Returns a model of `task` that takes images of `side` x `side` pixels, as far as requests look at it."""
    names = {"name": "m", "version": "1", "input_name": "", "output_name": ""}
    settings = SimpleNamespace(**names, pixel_range=PixelRange.LEVELS, strict_parameters=False)
    model = SimpleNamespace(task=task, **of_one_image())
    return cast(Served, SimpleNamespace(settings=settings, model=model, inputs=frozenset({(side, side)})))


def lanes_are_free(lanes: Lanes) -> bool:
    """Returns whether all lanes and the place ahead of them can be had at once."""
    turns = [lanes.acquire(Share(lambda: True)) for _ in range(lanes.count + 1)]
    for turn in turns:
        with pytest.raises(StopIteration):
            turn.send(None)
    for _ in turns:
        lanes.release()
    return True
