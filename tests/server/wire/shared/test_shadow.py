from __future__ import annotations

import asyncio
import io
import os
import random
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from PIL import Image

from xlaserve.admission import shared_counts
from xlaserve.admission.shared_counts import Kind, SharedCounts
from xlaserve.config import Bucket, Color, Decoding, Fit, Mode, ModelSettings, ShadowSettings
from xlaserve.engine.inputs import Images
from xlaserve.engine.program import Outputs
from xlaserve.engine.request import BatchRows, EngineRequest, Result
from xlaserve.engine.timings import Timings
from xlaserve.errors import DeadlineExceeded, EngineLost, InvalidArgument, ModelNotReady, QueueFull, XlaserveError
from xlaserve.images.decoder import ImageLimits
from xlaserve.images.image_input import RGB, ImageInput
from xlaserve.models.catalog import Model
from xlaserve.models.task import Classification, Embedding, Task
from xlaserve.models.version import Served
from xlaserve.telemetry.findings import Findings, Pair
from xlaserve.telemetry.metrics import Metrics
from xlaserve.wire.shared import shadow as shadow_module
from xlaserve.wire.shared.shadow import PATIENCE_S, Shadows

LIMITS = ImageLimits(2**20, 2**20)
GRAPH = ShadowSettings(mode=Mode.GRAPH, share=1.0)


class Batcher:
    """Answers each image with its first level, in seconds by the mode, once it is let; at most 4 images at a time."""

    def __init__(self, ran: list[tuple[str, Mode, list[int]]], name: str) -> None:
        self.answer_of: Callable[[Mode, Images], Outputs] = lambda mode, pixels: (_one_hot(pixels),)
        self.seconds = {Mode.XLA: 0.25, Mode.GRAPH: 0.5}
        self.error: XlaserveError | None = None
        self.deadlines: list[float] = []
        self.hold: asyncio.Event | None = None
        self._ran = ran
        self._name = name

    def largest(self, mode: Mode, height: int, width: int) -> int:
        return 4 if (height, width) in ((4, 6), (8, 8)) else 0

    async def run_when_idle(self, request: EngineRequest) -> Result:
        (pixels,), mode, deadline, *_ = request
        self.deadlines.append(deadline)
        if self.hold:
            await self.hold.wait()
        if self.error:
            raise self.error
        self._ran.append((self._name, mode, pixels[:, 0, 0, 0].tolist()))
        rows = BatchRows(range(len(pixels)), self.answer_of(mode, pixels))
        return Result([rows], Timings(execute_s=self.seconds[mode]), [])


def _one_hot(pixels: Images) -> Any:
    return np.eye(10, dtype=np.float32)[pixels[:, 0, 0, 0]]


class World:
    """A model in two modes, and versions of it."""

    def __init__(self, table: SharedCounts | None = None) -> None:
        self.metrics = Metrics()
        self.ran: list[tuple[str, Mode, list[int]]] = []
        self.versions: dict[str, Served] = {}
        self.served = self.add("1", GRAPH)
        repository: Any = SimpleNamespace(get=self._get)
        self.shadows = Shadows(
            repository,
            LIMITS,
            self.metrics,
            draw=random.Random(0).random,
            clock=lambda: 100.0,
            held=(table or SharedCounts()).amount(Kind.SHADOW_BYTES),
        )

    def add(
        self,
        version: str,
        shadow: ShadowSettings | None = None,
        *,
        task: Task | None = None,
        size: tuple[int, int] = (4, 6),
        fit: Fit = Fit.RESIZE,
        decode: Decoding | None = None,
        image: ImageInput = RGB,
        border: int | None = None,
    ) -> Served:
        settings = ModelSettings(
            name="m",
            source="builtin:noop",
            version=version,
            modes=(Mode.XLA, Mode.GRAPH),
            shadow=shadow,
            fit=fit,
            decode=decode,
            border=border,
        )
        buckets, task = (Bucket(4, *size),), task or Classification(10)
        model = Model(cast(Any, None), size, task, "random", image=image, settings=settings, buckets=buckets)
        batcher = Batcher(self.ran, version)
        made: Any = SimpleNamespace(settings=settings, shadows={})
        self.versions[version] = Served(made, model, cast(Any, batcher))
        return self.versions[version]

    def _get(self, name: str, version: str) -> Served:
        if version not in self.versions:
            raise ModelNotReady(f"{name} {version}")
        return self.versions[version]

    @property
    def batcher(self) -> Batcher:
        return cast(Batcher, self.served.engine)

    @property
    def findings(self) -> dict[Pair, Findings]:
        return self.served.version.shadows

    def offer(self, *levels: int, mode: Mode = Mode.XLA) -> None:
        self.shadows.offer(self.served, pixels(*levels), mode)

    async def done(self) -> None:
        """Waits until no shadow is under way."""
        while tasks := [task for task in asyncio.all_tasks() if task.get_name().startswith("shadow ")]:
            await asyncio.wait(tasks)
        await asyncio.sleep(0)

    def dropped(self) -> dict[str, int]:
        (findings,) = self.findings.values()
        counted = {
            sample.labels["reason"]: int(sample.value)
            for family in self.metrics.registry.collect()
            for sample in family.samples
            if sample.name == "xlaserve_shadow_dropped_total"
        }
        assert counted == findings.dropped
        return counted


def pixels(*levels: int, height: int = 4, width: int = 6) -> Images:
    return np.broadcast_to(np.array(levels, np.uint8)[:, None, None, None], (len(levels), height, width, 3))


def png(level: int, height: int = 4, width: int = 6) -> bytes:
    buffer = io.BytesIO()
    Image.new("L", (width, height), level).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.fixture
async def world() -> AsyncIterator[World]:
    world = World()
    yield world
    await world.shadows.stop()


async def test_images_run_in_both_and_answers_and_times_are_compared(world: World) -> None:
    world.batcher.answer_of = lambda mode, images: (_one_hot(images * (mode is Mode.XLA)),)
    world.offer(0, 1, 0, 0)
    await world.done()
    assert sorted(world.ran) == [("1", Mode.GRAPH, [0, 1, 0, 0]), ("1", Mode.XLA, [0, 1, 0, 0])]
    found = world.findings[Pair(Mode.XLA, "1", Mode.GRAPH)]
    assert (found.agreement.value, found.agreement.count, found.largest_difference) == (0.75, 4, 1.0)
    assert [one.ratio for one in found.time_ratios] == [2.0]
    labels = {"model": "m", "version": "1", "mode": "xla", "shadow_version": "1", "shadow_mode": "graph"}
    sample = world.metrics.registry.get_sample_value
    assert sample("xlaserve_shadow_agreement_count", labels) == 4
    assert sample("xlaserve_shadow_agreement_sum", labels) == 3
    assert sample("xlaserve_shadow_execute_seconds_sum", {**labels, "side": "served"}) == 0.25
    assert sample("xlaserve_shadow_execute_seconds_sum", {**labels, "side": "shadow"}) == 0.5


async def test_the_two_take_turns_at_being_first(world: World) -> None:
    for level in range(4):
        world.offer(level)
        await world.done()
    firsts = [mode for _, mode, _ in world.ran[::2]]
    assert firsts == [Mode.GRAPH, Mode.XLA, Mode.GRAPH, Mode.XLA]


async def test_a_share_of_the_requests_is_drawn_at_random(world: World) -> None:
    world.served = world.add("1", ShadowSettings(mode=Mode.GRAPH, share=0.25))
    drawn: list[int] = []
    for request in range(400):
        world.offer(1)
        await world.done()
        if len(world.ran) > 2 * len(drawn):
            drawn.append(request)
    assert 70 <= len(drawn) <= 130
    assert max(np.diff(drawn)) > 2 * min(np.diff(drawn)), "not every fourth"


async def test_what_already_ran_in_the_shadows_mode_has_none(world: World) -> None:
    world.offer(1, mode=Mode.GRAPH)
    await world.done()
    assert not world.ran
    assert not world.findings


async def test_another_version_runs_the_mode_of_the_request(world: World) -> None:
    world.served = world.add("1", ShadowSettings(version="2", share=1.0))
    world.add("2")
    world.offer(1, mode=Mode.GRAPH)
    await world.done()
    assert sorted(world.ran) == [("1", Mode.GRAPH, [1]), ("2", Mode.GRAPH, [1])]
    assert [*world.findings] == [Pair(Mode.GRAPH, "2", Mode.GRAPH)]


async def test_encoded_images_are_decoded_as_each_version_takes_them(world: World) -> None:
    world.served = world.add("1", ShadowSettings(version="2", share=1.0))
    world.add("2", size=(8, 8), fit=Fit.LETTERBOX)
    shapes = []

    def answer(mode: Mode, images: Images) -> Outputs:
        shapes.append(images.shape)
        return (_one_hot(images[:, 3:, 3:]),)

    for served in world.versions.values():
        cast(Batcher, served.engine).answer_of = answer
    world.shadows.offer(world.served, [png(1), png(2)], Mode.XLA)
    await world.done()
    assert sorted(shapes) == [(2, 4, 6, 3), (2, 8, 8, 3)]
    (found,) = world.findings.values()
    assert found.agreement.value == 1.0


async def test_a_version_with_another_border_is_compared_as_it_answers(world: World) -> None:
    world.served = world.add("1", ShadowSettings(version="2", share=1.0), size=(8, 8), fit=Fit.LETTERBOX, border=0)
    world.add("2", size=(8, 8), fit=Fit.LETTERBOX, border=9)
    corners: dict[str, int] = {}

    def answer_of(version: str) -> Callable[[Mode, Images], Outputs]:
        def answer(mode: Mode, images: Images) -> Outputs:
            corners[version] = int(images[0, 0, 0, 0])
            return (_one_hot(images[:, 3:, 3:]),)

        return answer

    for version, served in world.versions.items():
        cast(Batcher, served.engine).answer_of = answer_of(version)
    world.shadows.offer(world.served, [png(1)], Mode.XLA)
    await world.done()
    assert corners == {"1": 0, "2": 9}


async def test_a_version_that_decodes_fast_is_compared_as_it_answers(world: World) -> None:
    world.served = world.add("1", ShadowSettings(version="2", share=1.0))
    world.add("2", decode=Decoding.FAST)
    ran: list[Images] = []

    def answer(mode: Mode, images: Images) -> Outputs:
        ran.append(images)
        return (_one_hot(images % 4),)

    for served in world.versions.values():
        cast(Batcher, served.engine).answer_of = answer
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 96, 3), np.uint8)).save(file, "JPEG")
    world.shadows.offer(world.served, [file.getvalue()], Mode.XLA)
    await world.done()
    exact, fast = ran
    assert not np.array_equal(exact, fast)


async def test_no_more_images_are_decoded_than_fit_into_a_batch(world: World) -> None:
    world.shadows.offer(world.served, [png(level) for level in range(6)], Mode.XLA)
    await world.done()
    assert [levels for _, _, levels in world.ran] == [[0, 1, 2, 3]] * 2


async def test_a_model_has_one_shadow_at_a_time(world: World) -> None:
    world.batcher.hold = asyncio.Event()
    for level in range(3):
        world.offer(level)
    world.batcher.hold.set()
    await world.done()
    assert [levels for _, _, levels in world.ran] == [[0], [0]]
    assert world.dropped() == {"busy": 2}


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (DeadlineExceeded("the device was not idle"), "busy"),
        (QueueFull("no memory is left for shadows"), "busy"),
        (ModelNotReady("it is draining"), "not_ready"),
        (EngineLost("it has ended"), "not_ready"),
        (InvalidArgument("pixels", "at most 2 images", 4), "unlike"),
    ],
)
async def test_what_cannot_run_soon_is_dropped(
    world: World, error: XlaserveError, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    world.batcher.error = error
    world.offer(1)
    await world.done()
    assert world.dropped() == {reason: 1}
    assert world.batcher.deadlines == [100.0 + PATIENCE_S]
    assert not caplog.records


async def test_requests_are_held_only_up_to_a_number_of_bytes(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shadow_module, "MAX_HELD_BYTES", pixels(1).nbytes)
    world.offer(1, 2)
    assert world.dropped() == {"memory": 1}
    for _ in range(2):  # what was held is given back
        world.offer(1)
        await world.done()
    assert len(world.ran) == 4


async def test_bytes_that_are_held_at_other_fronts_count_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shadow_module, "MAX_HELD_BYTES", pixels(1).nbytes)
    table = shared_counts.create(fronts=2)
    elsewhere = SharedCounts(table, 2, 0).amount(Kind.SHADOW_BYTES)
    elsewhere.own = 1
    world = World(SharedCounts(table, 2, 1))
    os.close(table)
    world.offer(1)
    assert world.dropped() == {"memory": 1}
    elsewhere.own = 0
    world.offer(1)
    await world.done()
    assert len(world.ran) == 2
    await world.shadows.stop()


async def test_pixels_of_other_channels_are_not_compared(world: World) -> None:
    world.served = world.add("1", ShadowSettings(version="2", share=1.0))
    world.add("2", image=ImageInput(1, Color.GREY))
    world.offer(1)
    await world.done()
    assert world.dropped() == {"unlike": 1}
    assert not world.ran


async def test_pictures_are_converted_to_the_channels_of_each_version(world: World) -> None:
    world.served = world.add("1", ShadowSettings(version="2", share=1.0))
    world.add("2", image=ImageInput(1, Color.GREY))
    world.shadows.offer(world.served, [png(7)], Mode.XLA)
    await world.done()
    assert sorted(world.ran) == [("1", Mode.XLA, [7]), ("2", Mode.XLA, [7])]


@pytest.mark.parametrize(
    ("version", "levels", "reason"),
    [("3", pixels(1), "not_ready"), ("vectors", pixels(1), "unlike"), ("large", pixels(1), "unlike")],
)
async def test_what_cannot_be_compared_is_dropped(world: World, version: str, levels: Images, reason: str) -> None:
    world.versions = {"vectors": world.add("7", task=Embedding(3)), "large": world.add("8")}
    large = cast(Batcher, world.versions["large"].engine)
    large.largest = lambda mode, height, width: 0  # type: ignore[method-assign]
    settings = ShadowSettings(share=1.0, mode=Mode.GRAPH).model_copy(update={"version": version})
    world.served.version.settings = world.served.settings.model_copy(update={"shadow": settings})
    world.shadows.offer(world.served, levels, Mode.XLA)
    await world.done()
    assert world.dropped() == {reason: 1}


async def test_an_error_in_a_shadow_is_counted_and_goes_nowhere(world: World, caplog: pytest.LogCaptureFixture) -> None:
    def fail(mode: Mode, images: Images) -> Outputs:
        raise ZeroDivisionError

    world.batcher.answer_of = fail
    world.offer(1)
    await world.done()
    assert world.dropped() == {"failed": 1}
    assert "model m version 1: its shadow, version 1 in graph, failed" in caplog.text


async def test_stopping_ends_what_is_under_way(world: World) -> None:
    world.batcher.hold = asyncio.Event()
    world.offer(1)
    await asyncio.sleep(0)
    await world.shadows.stop()
    assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("shadow ")]
    assert not world.findings
