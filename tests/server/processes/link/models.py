"""Models with known answers, for an engine in this process or in another one."""

from __future__ import annotations

import asyncio
import os
import select
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import numpy as np
from tests.fakes import Observer

from xlaserve.config import Bucket, Mode, ModelSettings
from xlaserve.engine.batching.batcher import Batcher
from xlaserve.engine.batching.lanes import Lanes
from xlaserve.engine.batching.worker import Worker
from xlaserve.engine.buckets.planner import Cost
from xlaserve.engine.inputs import Images, pixels
from xlaserve.engine.program import Compilation, Executable, Outputs, Warmed
from xlaserve.engine.warmup.background import Background
from xlaserve.engine.warmup.beside_traffic import BesideTraffic
from xlaserve.engine.warmup.ledger import Ledger
from xlaserve.errors import OutOfDeviceMemory
from xlaserve.processes.link.engine_state import ModelSnapshot

PATIENCE_S: Final = 20
SMALL, TALL, LARGE = (2, 2), (4, 2), (640, 640)
SIZES: Final = (SMALL, TALL, LARGE)
MAX_IMAGES, MAX_BYTES = 2000, 200 * 2**20
NARROW_IMAGES: Final = 24
FAILS: Final = 7
"""A batch of `flaky` with a number that this divides fails."""
COST_S: Final = {1: 0.002, 2: 0.0025, 4: 0.004, 8: 0.006}
"""By batch size: more than what runs on the event loop, and eight at a time are cheapest."""
MAP_SIDE: Final = 640
OTHER, BROKEN = (3, 2), (5, 2)
"""Resolutions without buckets: one that "any size" can run, and one that it can't."""


def pictures(*numbers: int, size: tuple[int, int] = SMALL) -> Images:
    """Returns images that tell the numbers 0 to 2**24 - 1."""
    channels = np.array(numbers, np.uint32)[:, np.newaxis] >> np.array([0, 8, 16], np.uint32)
    images = np.empty((len(numbers), *size, 3), np.uint8)
    images[...] = (channels & 255).astype(np.uint8)[:, np.newaxis, np.newaxis, :]
    return images


def numbers_of(images: Images) -> Outputs:
    """Returns the numbers of images `[n]`, and once more doubled, as `[n, 1]`."""
    numbers = (images[:, 0, 0, :] @ np.array([1, 256, 65536], np.uint32)).astype(np.float32)
    return numbers, 2 * numbers[:, np.newaxis]


def channels_of(name: str) -> int:
    """Returns the channels of a model's images."""
    return 1 if name == "grey" else 3


class Gate:
    """Holds up batches in any process: each lets `started` know, and goes on once `open` has let it."""

    def __init__(self) -> None:
        self.at_gate, self.opened = os.pipe(), os.pipe()

    @property
    def files(self) -> tuple[int, int]:
        """The descriptors with which a process holds up its batches."""
        return self.opened[0], self.at_gate[1]

    def open(self, batches: int = 1000) -> None:
        """Lets so many batches through, by default all of a test."""
        os.write(self.opened[1], bytes(batches))

    async def started(self) -> None:
        """Returns once one more batch has come."""
        await asyncio.to_thread(self._read)

    def _read(self) -> None:
        assert select.select([self.at_gate[0]], [], [], PATIENCE_S)[0], "no batch started"
        os.read(self.at_gate[0], 1)

    def close(self) -> None:
        """Holds up what comes from now on."""
        for file in (self.at_gate[0], self.opened[0]):
            while select.select([file], [], [], 0)[0]:
                os.read(file, 2**16)

    def end(self) -> None:
        """Closes the files."""
        for file in (*self.at_gate, *self.opened):
            os.close(file)


class Numbers:
    """A program that has compiled once it may."""

    platform = "fake"

    def __init__(self) -> None:
        self.may_compile = threading.Event()

    def compile(self, mode: Mode, bucket: Bucket) -> Compilation:
        assert self.may_compile.wait(PATIENCE_S)
        return Compilation(numbers_of, 0.0, 0.0)


class Models:
    """Batchers by name, each with a lane of its own. `on_change` is called where one takes another resolution."""

    def __init__(self, gate_files: tuple[int, int], on_change: Callable[[], object] = lambda: None) -> None:
        self._on_change = on_change
        self._compiling = ThreadPoolExecutor(1)
        opened, at_gate = gate_files

        def gated(images: Images) -> Outputs:
            os.write(at_gate, b".")
            os.read(opened, 1)
            return numbers_of(images)

        self.programs: dict[str, Executable] = {
            "numbers": numbers_of,
            "gated": gated,
            "failing": _fail,
            "flaky": _fail_some,
            "narrow": _slow,
            "nan": lambda images: (np.full(len(images), np.nan, np.float32),),
            "short of memory": _small_batches_only,
            "maps": lambda images: (np.broadcast_to(images[:, :1, :1, 0], (len(images), MAP_SIDE, MAP_SIDE)).copy(),),
            "slow": _slow,
            "any size": _all_but_broken,
            "grey": lambda images: (images[:, -1, -1, :].sum(axis=1, dtype=np.float32), images[:, 0, 0, :1] * 2.0),
        }
        self.ids = {name: number for number, name in enumerate(self.programs)}
        self.workers: list[Worker] = []
        self.batchers = {name: self._make(name) for name in self.programs}

    def _make(self, name: str) -> Batcher:
        worker, lanes = Worker(1, 0), Lanes(1, 0)
        self.workers.append(worker)
        if name == "any size":
            self._background = self._takes_other_sizes(worker, lanes)
        return Batcher(
            name=name,
            programs={
                (mode, Bucket(batch, *size)): Warmed(self.programs[name], Cost(cost_s, cost_s))
                for mode in (Mode.XLA, Mode.GRAPH)
                for batch, cost_s in COST_S.items()
                for size in SIZES
            },
            lanes=lanes,
            worker=worker,
            observer=Observer(),
            max_images=max_images_of(name),
            max_bytes=MAX_BYTES,
            inputs=pixels(channels_of(name)),
            on_traced=lambda batch: None,
            opener=self._background if name == "any size" else None,
        )

    def _takes_other_sizes(self, worker: Worker, lanes: Lanes) -> Background:
        self._program = Numbers()
        settings = ModelSettings(name="any", source="fake", max_background_resolutions=3)
        return Background(
            settings=settings,
            any_size=self.programs["any size"],
            sides=(None, SMALL[1]),
            modes=settings.compiled_modes,
            buckets=[Bucket(batch, *size) for batch in COST_S for size in SIZES],
            beside=BesideTraffic(
                program=self._program,
                lanes=lanes,
                worker=worker,
                ledger=Ledger("any", "1"),
                compiling=self._compiling,
            ),
            on_change=self._on_change,
        )

    def compile(self) -> None:
        """Lets the programs compile of all resolutions that were opened, and will be."""
        self._program.may_compile.set()

    def snapshot(self, name: str, *, is_open: bool = True) -> ModelSnapshot:
        """Returns the snapshot of a model for fronts."""
        row_bytes = (4, 4) if name != "maps" else (MAP_SIDE**2,)
        batcher = self.batchers[name]
        largest = batcher.shapes()
        return ModelSnapshot(
            id=self.ids[name],
            title=name,
            is_open=is_open and not batcher.admission.is_closed,
            max_images=max_images_of(name),
            max_bytes=MAX_BYTES,
            inputs=pixels(channels_of(name)),
            output_bytes={(height, width): row_bytes for _, height, width in largest},
            largest=largest,
            unmatched=batcher.unmatched,
        )

    async def renew(self, name: str, timeout_s: float) -> None:
        """Drains a model; what comes later goes to another loading of it."""
        await self.batchers[name].drain(timeout_s)
        if name == "any size":
            await self._end_compiling()
        self.ids[name] = max(self.ids.values()) + 1
        self.batchers[name] = self._make(name)

    def held(self) -> dict[str, tuple[int, int, int]]:
        """Returns images and bytes that were admitted, and images that wait, of models that have any."""
        of_all = {
            name: (one.admission.images, one.admission.size_bytes, one.waiting_images)
            for name, one in self.batchers.items()
        }
        return {name: held for name, held in of_all.items() if any(held)}

    async def _end_compiling(self) -> None:
        self._program.may_compile.set()
        await self._background.close()

    async def stop(self) -> None:
        await self._end_compiling()
        self._compiling.shutdown()
        await asyncio.gather(*(batcher.drain(0) for batcher in self.batchers.values()))
        for worker in self.workers:
            await asyncio.to_thread(worker.stop)


def max_images_of(name: str) -> int:
    return NARROW_IMAGES if name == "narrow" else MAX_IMAGES


def _fail(images: Images) -> Outputs:
    raise ValueError("/etc/secret")


def _fail_some(images: Images) -> Outputs:
    time.sleep(0.002)
    numbers, doubled = numbers_of(images)
    if not (numbers % FAILS).all():
        raise ValueError("/etc/secret")
    return numbers, doubled


def _small_batches_only(images: Images) -> Outputs:
    if len(images) > 2:
        raise OutOfDeviceMemory("the device's memory did not hold a batch")
    return numbers_of(images)


def _slow(images: Images) -> Outputs:
    time.sleep(0.005)
    return numbers_of(images)


def _all_but_broken(images: Images) -> Outputs:
    if images.shape[1:3] == BROKEN:
        raise ValueError("negative dimension")
    return numbers_of(images)
