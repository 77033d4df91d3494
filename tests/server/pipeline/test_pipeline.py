from __future__ import annotations

import asyncio
import io
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import numpy as np
import pytest
from PIL import Image
from tests.fakes import Clock

from xlaserve.admission.shared_counts import SharedCounts
from xlaserve.config import Bucket, Decoding, Fit, Grey16, Mode, ModelSettings, PixelRange, Settings, Window
from xlaserve.engine.inputs import RGB_IMAGE, Images, Rows
from xlaserve.engine.program import Outputs
from xlaserve.engine.request import BatchRows, EncodedRequest, EngineRequest, Result, check_row_shapes
from xlaserve.engine.timings import Timings
from xlaserve.errors import (
    DeadlineExceeded,
    DeadlineUnreachable,
    ExecutionFailed,
    ImageTooLarge,
    InvalidArgument,
    InvalidImage,
    QueueFull,
)
from xlaserve.images import decoder
from xlaserve.images.decoder import Decoded
from xlaserve.images.frame import Frame, place, whole
from xlaserve.images.image_file import Place
from xlaserve.images.image_input import RGB, ImageInput
from xlaserve.models import encoded_images
from xlaserve.models.catalog import Model
from xlaserve.models.task import Classification, Segmentation, Task
from xlaserve.models.version import Served
from xlaserve.pipeline import pipeline, request_inputs
from xlaserve.pipeline.pipeline import Pipeline, Request
from xlaserve.pipeline.request_inputs import Pending

DEADLINE = 123.0
PATIENCE_S = 20


class Batcher:
    """Answers each image with its first level, and keeps count of what is under way."""

    def __init__(self) -> None:
        self.buffers: list[Images] = []
        self.priorities: list[int] = []
        self.checked: list[tuple[int, float, int]] = []
        self.unreachable: DeadlineUnreachable | None = None
        self.unmatched: list[tuple[int, int]] = []
        """Resolutions without buckets that were admitted."""
        self.opened: dict[tuple[int, int], Mode] = {}
        """What those run in that were opened."""
        self.admitted: list[tuple[int, int]] = []
        self.left: list[tuple[int, int]] = []
        self.ran: list[tuple[Images, Mode, float]] = []
        self.full: QueueFull | None = None
        self.error: Exception | None = None
        self.hold: asyncio.Event | None = None
        self.values = np.ones(1, np.float32)
        """What a level becomes, times itself."""
        self.cuts: Sequence[int] = ()
        """Where a request is cut into batches."""

    @contextmanager
    def admit(self, images: int, size_bytes: int, unmatched: tuple[int, int] | None = None) -> Iterator[Batcher]:
        if self.full:
            raise self.full
        if unmatched is not None:
            self.unmatched.append(unmatched)
        self.admitted.append((images, size_bytes))
        try:
            yield self
        finally:
            self.left.append((images, size_bytes))

    async def open(self, resolution: tuple[int, int], mode: Mode) -> Mode:
        assert resolution in self.unmatched
        return self.opened.setdefault(resolution, Mode.GRAPH)

    def buffer(self, images: int, resolution: tuple[int, int]) -> Rows:
        self.buffers.append(np.empty((images, *resolution, 3), np.uint8))
        return (self.buffers[-1],)

    def check_encoded(self, request: EncodedRequest) -> None:
        self.checked.append((request.images, request.deadline, request.priority))
        if self.unreachable:
            raise self.unreachable

    async def run(self, request: EngineRequest) -> Result:
        pixels, *_ = request.rows
        self.ran.append((pixels, request.mode, request.deadline))
        self.priorities.append(request.priority)
        if self.hold:
            await self.hold.wait()
        if self.error:
            raise self.error
        outputs = pixels[:, 0, 0, :1].astype(np.float32) * self.values
        bounds = sorted({0, *self.cuts, len(pixels)})
        parts = [BatchRows(range(start, stop), (outputs[start:stop],)) for start, stop in pairwise(bounds)]
        return Result(parts[::-1], Timings(queue_s=1.0, gather_s=2.0, execute_s=3.0), [])


class Renders(NamedTuple):
    """A rendering controlled by the test."""

    render: pipeline.Render

    def renderer(self, task: Task) -> pipeline.Render:
        return self.render


@pytest.fixture
def batcher() -> Iterator[Batcher]:
    batcher = Batcher()
    yield batcher
    assert sorted(batcher.admitted) == sorted(batcher.left), "what was admitted must leave, in all cases"


def make_served(
    batcher: Batcher,
    *sizes: tuple[int, int],
    image: ImageInput = RGB,
    task: Task = Classification(3),  # noqa: B008 - which does not change
    **settings_of_all: Any,
) -> Served:
    modes = (Mode.XLA, Mode.GRAPH)
    settings = ModelSettings(name="m", source="fake", modes=modes, resolutions=sizes, **settings_of_all)
    version = SimpleNamespace(settings=settings)
    buckets = tuple(Bucket(2, *size) for size in sizes)
    model = Model(cast(Any, None), (None, None), task, "random", image=image, settings=settings, buckets=buckets)
    return Served(cast(Any, version), model, cast(Any, batcher))


@pytest.fixture
def served(batcher: Batcher) -> Served:
    return make_served(batcher, (4, 6))


@pytest.fixture
def of_two_sizes(batcher: Batcher) -> Served:
    """A model that takes 4 x 6 and 8 x 8 pixels."""
    return make_served(batcher, (4, 6), (8, 8))


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def make_pipeline(clock: Clock) -> Iterator[Callable[..., Pipeline]]:
    made = []

    def make(**settings: Any) -> Pipeline:
        made.append(Pipeline(Settings(**settings), clock))
        return made[-1]

    yield make
    for pipe in made:
        pipe.stop()


@pytest.fixture
def pipe(make_pipeline: Callable[..., Pipeline]) -> Pipeline:
    return make_pipeline()


def png(level: int, height: int = 4, width: int = 6) -> bytes:
    buffer = io.BytesIO()
    Image.new("L", (width, height), level).save(buffer, "PNG")
    return buffer.getvalue()


def pixels(*levels: int, height: int = 4, width: int = 6) -> Images:
    return np.broadcast_to(np.array(levels, np.uint8)[:, None, None, None], (len(levels), height, width, 3))


def levels(answer: pipeline.Answer) -> list[int]:
    return [int(level) for level in answer.outputs[0][:, 0]]


async def test_pixels_go_to_the_model_as_they_are(pipe: Pipeline, served: Served, batcher: Batcher) -> None:
    images = pixels(3, 1, 2)
    answer = await pipe.run(served, Request("graph", images, DEADLINE))
    assert batcher.ran == [(images, Mode.GRAPH, DEADLINE)]
    assert batcher.ran[0][0] is images
    assert levels(answer) == [3, 1, 2]
    assert (answer.mode, answer.images) == (Mode.GRAPH, 3)
    assert answer.timings == Timings(decode_s=0.0, queue_s=1.0, gather_s=2.0, execute_s=3.0)
    assert batcher.admitted == [(3, images.nbytes)]


async def test_pixels_of_any_size_that_has_buckets_are_taken(pipe: Pipeline, of_two_sizes: Served) -> None:
    assert levels(await pipe.run(of_two_sizes, Request("", pixels(7, height=8, width=8), DEADLINE))) == [7]


async def test_encoded_images_are_decoded_in_their_order_and_fitted(
    pipe: Pipeline, served: Served, batcher: Batcher
) -> None:
    encoded = [png(level, height=level + 1, width=9) for level in range(20)]
    answer = await pipe.run(served, Request("", encoded, DEADLINE))
    assert levels(answer) == list(range(20))
    ((images, mode, _),) = batcher.ran
    assert (images.shape, mode) == ((20, 4, 6, 3), Mode.XLA)
    assert images is batcher.buffers[0], "they are decoded where they run"
    assert images.dtype == np.uint8


async def test_the_time_that_decoding_and_rendering_take_is_told(
    pipe: Pipeline, served: Served, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(data: bytes, place: Place, *_: Any, **__: Any) -> Decoded:
        clock.now += 0.5
        return Decoded(pixels(1)[0], place(4, 6))

    def render(outputs: Outputs, frame: Frame) -> None:
        clock.now += 0.25

    for module in (pipeline, encoded_images):
        monkeypatch.setattr(module, "decode", slow)
    answer = await pipe.run(served, Request("", [png(1)], DEADLINE, Renders(render)))
    timings = answer.timings
    assert (timings.decode_s, timings.encode_s, answer.at) == (0.5, 0.25, clock.now)


async def test_a_rendering_without_options_is_done_like_any_other(pipe: Pipeline, served: Served) -> None:
    class Plain(NamedTuple):
        def renderer(self, task: Task) -> pipeline.Render:
            return lambda outputs, frame: "rendered"

    answer = await pipe.run(served, Request("", [png(1), png(2)], DEADLINE, Plain()))
    assert answer.rendered == ["rendered"] * 2


async def test_a_drawing_gets_the_image_upright_and_no_larger_than_it_wants(pipe: Pipeline, served: Served) -> None:
    class Shape(NamedTuple):
        def drawer(self, task: Task) -> pipeline.Draw:
            return lambda outputs, frame, image: (image.shape, frame.height, frame.width, float(outputs[0][0, 0]))

    file = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned
    Image.new("RGB", (40, 20), (3, 0, 0)).save(file, "PNG", exif=exif)
    for max_side, shape in ((100, (40, 20, 3)), (10, (10, 5, 3))):
        rendering = pipeline.Drawn(Shape(), max_side)
        answer = await pipe.run(served, Request("", [file.getvalue()], DEADLINE, rendering))
        assert answer.rendered == [(shape, 40, 20, 3.0)]


async def test_images_are_decoded_as_the_model_says_and_exactly_if_drawn_into(
    pipe: Pipeline, batcher: Batcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    ways = []

    def watched(data: bytes, place: Place, *_: Any, decoding: Decoding = Decoding.EXACT, **__: Any) -> Decoded:
        ways.append(decoding)
        return Decoded(pixels(1)[0], place(4, 6))

    class Nothing(NamedTuple):
        def drawer(self, task: Any) -> pipeline.Draw:
            return lambda outputs, frame, image: None

    for module in (pipeline, encoded_images):
        monkeypatch.setattr(module, "decode", watched)
    for decode in Decoding:
        said = make_served(batcher, (4, 6), decode=decode)
        await pipe.run(said, Request("", [png(1)], DEADLINE, pipeline.Drawn(Nothing(), 100)))
    assert ways == [each for decode in Decoding for each in (decode, Decoding.EXACT)]


async def test_both_the_encoded_and_the_decoded_bytes_are_admitted(
    pipe: Pipeline, served: Served, batcher: Batcher
) -> None:
    encoded = [png(1), png(2)]
    await pipe.run(served, Request("", encoded, DEADLINE))
    assert batcher.admitted == [(2, len(encoded[0]) + len(encoded[1]) + 2 * 4 * 6 * 3)]


async def test_decoding_never_runs_on_the_event_loop(
    pipe: Pipeline, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = set()
    decode = decoder.decode

    def watched(*args: Any, **options: Any) -> Decoded:
        threads.add(threading.current_thread())
        return decode(*args, **options)

    for module in (pipeline, encoded_images):
        monkeypatch.setattr(module, "decode", watched)
    await pipe.run(served, Request("", [png(1)] * 8, DEADLINE))
    assert threads
    assert threading.main_thread() not in threads


async def test_pixels_of_another_size_are_refused_with_those_that_have_buckets(
    pipe: Pipeline, of_two_sizes: Served, batcher: Batcher
) -> None:
    expected = r"pixels: expected shape \[n, 4, 6, 3\] or \[n, 8, 8, 3\], got \[1, 6, 4, 3\]"
    with pytest.raises(InvalidArgument, match=expected):
        await pipe.run(of_two_sizes, Request("", pixels(1, height=6, width=4), DEADLINE))
    assert not batcher.admitted


async def test_pixels_of_another_size_run_in_the_mode_that_it_is_opened_in(pipe: Pipeline, batcher: Batcher) -> None:
    served = make_served(batcher, (4, 6), unmatched="background")
    for mode in (Mode.GRAPH, Mode.XLA):
        batcher.opened = {(6, 4): mode}
        answer = await pipe.run(served, Request("", pixels(1, height=6, width=4), DEADLINE))
        assert (answer.mode, batcher.ran[-1][1]) == (mode, mode)
    await pipe.run(served, Request("", pixels(1), DEADLINE))
    assert batcher.unmatched == [(6, 4), (6, 4)]


async def test_an_unknown_mode_is_refused_before_anything_is_admitted(
    pipe: Pipeline, served: Served, batcher: Batcher
) -> None:
    with pytest.raises(InvalidArgument, match="mode: expected one of xla, graph, got 'turbo'"):
        await pipe.run(served, Request("turbo", [png(1)], DEADLINE))
    assert not batcher.admitted


async def test_a_full_queue_refuses_before_anything_is_decoded(
    pipe: Pipeline, served: Served, batcher: Batcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[bytes] = []
    monkeypatch.setattr(encoded_images, "decode", lambda data, *_, **__: decoded.append(data))
    batcher.full = QueueFull("model m: full")
    with pytest.raises(QueueFull):
        await pipe.run(served, Request("", [png(1)], DEADLINE))
    assert not decoded


async def test_a_request_that_would_be_too_late_is_refused_before_decoding(
    pipe: Pipeline, served: Served, batcher: Batcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[bytes] = []
    monkeypatch.setattr(encoded_images, "decode", lambda data, *_, **__: decoded.append(data))
    batcher.unreachable = DeadlineUnreachable("too much waits", 2.0)
    with pytest.raises(DeadlineUnreachable):
        await pipe.run(served, Request("", [png(1)] * 3, DEADLINE, priority=1))
    assert batcher.checked == [(3, DEADLINE, 1)]
    assert not decoded


@pytest.mark.parametrize("images", [[png(1)], pixels(1)], ids=["encoded", "pixels"])
async def test_the_queue_is_told_the_priority(pipe: Pipeline, served: Served, batcher: Batcher, images: Any) -> None:
    await pipe.run(served, Request("", images, DEADLINE, priority=3))
    assert batcher.priorities == [3]


@pytest.mark.parametrize("place", [0, 3, 6])
async def test_one_bad_image_fails_its_request_only(
    pipe: Pipeline, served: Served, batcher: Batcher, place: int
) -> None:
    encoded = [png(level) for level in range(7)]
    bad = [*encoded[:place], b"not an image", *encoded[place + 1 :]]
    calls = (pipe.run(served, Request("", images, DEADLINE)) for images in (bad, encoded))
    failed, answer = await asyncio.gather(*calls, return_exceptions=True)
    assert isinstance(failed, InvalidImage)
    assert isinstance(answer, pipeline.Answer)
    assert levels(answer) == list(range(7))
    assert len(batcher.ran) == 1


@pytest.mark.parametrize("count", [1, 3])
async def test_a_broken_image_is_named_by_its_place_among_several(pipe: Pipeline, served: Served, count: int) -> None:
    encoded = [png(level) for level in range(count)]
    encoded[-1] = b"GIF89a" + bytes(20)
    with pytest.raises(InvalidImage) as refusal:
        await pipe.run(served, Request("", encoded, DEADLINE))
    where = "image" if count == 1 else "images[2]"
    assert str(refusal.value) == f"{where}: expected JPEG, PNG or WebP, got a GIF (26 bytes)"


async def test_an_image_of_another_size_is_named_by_its_place(pipe: Pipeline, batcher: Batcher) -> None:
    served = make_served(batcher, (4, 6), fit=Fit.REJECT)
    with pytest.raises(InvalidArgument, match=r"^images\[1\]: expected 6 x 4 pixels"):
        await pipe.run(served, Request("", [png(1), png(1, 5, 6)], DEADLINE))


def png16(largest: int) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(np.full((4, 6), largest, np.uint16)).save(buffer, "PNG")
    return buffer.getvalue()


async def test_an_answer_warns_of_16_bit_grey_until_the_model_says_what_it_means(
    pipe: Pipeline, batcher: Batcher
) -> None:
    unset = make_served(batcher, (4, 6))
    answer = await pipe.run(unset, Request("", [png(7), png16(4095), png16(4095)], DEADLINE))
    assert levels(answer) == [7, 15, 15]
    assert answer.warning == f"images[1], images[2]: {decoder.GREY16_WARNING}"
    alone = await pipe.run(unset, Request("", [png16(4095)], DEADLINE))
    assert alone.warning == decoder.GREY16_WARNING
    many = await pipe.run(unset, Request("", [png(7), *[png16(4095)] * 12], DEADLINE))
    assert many.warning == f"{', '.join(f'images[{row}]' for row in range(1, 9))} and 4 more: {decoder.GREY16_WARNING}"
    assert (await pipe.run(unset, Request("", [png(7)], DEADLINE))).warning == ""
    chosen: dict[Grey16 | Window, int] = {Grey16.HIGH_BYTE: 15, Grey16.LARGEST: 255, (0, 8190): 128}
    for grey16, level in chosen.items():
        served = make_served(batcher, (4, 6), grey16=grey16)
        answer = await pipe.run(served, Request("", [png16(4095)], DEADLINE))
        assert (levels(answer), answer.warning) == ([level], "")


async def test_limits_on_an_image_come_from_the_settings(
    make_pipeline: Callable[..., Pipeline], served: Served
) -> None:
    with pytest.raises(ImageTooLarge, match="max_image_pixels"):
        await make_pipeline(max_image_pixels=23).run(served, Request("", [png(1)], DEADLINE))
    with pytest.raises(ImageTooLarge, match="max_image_bytes"):
        await make_pipeline(max_image_bytes=10).run(served, Request("", [png(1)], DEADLINE))


async def test_what_the_batcher_raises_comes_through(pipe: Pipeline, served: Served, batcher: Batcher) -> None:
    batcher.error = DeadlineExceeded("too late")
    with pytest.raises(DeadlineExceeded, match="too late"):
        await pipe.run(served, Request("", pixels(1), DEADLINE))


async def test_a_request_that_is_cancelled_while_it_runs_leaves(
    pipe: Pipeline, served: Served, batcher: Batcher
) -> None:
    batcher.hold = asyncio.Event()
    task = asyncio.create_task(pipe.run(served, Request("", pixels(1), DEADLINE)))
    await asyncio.sleep(0)
    assert len(batcher.ran) == 1
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


class HeldUp:
    """Decoding that begins, and ends when it may."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.decoded: list[bytes] = []
        self.begun, self.go_on = threading.Event(), threading.Event()
        monkeypatch.setattr(encoded_images, "decode", self._decode)

    def _decode(self, data: bytes, place: Place, *_: Any, **__: Any) -> Decoded:
        self.decoded.append(data)
        self.begun.set()
        assert self.go_on.wait(PATIENCE_S)
        return Decoded(pixels(1)[0], place(4, 6))


@pytest.fixture
def held_up(monkeypatch: pytest.MonkeyPatch) -> HeldUp:
    return HeldUp(monkeypatch)


def test_the_threads_are_divided_among_as_many_fronts_as_there_are(clock: Clock) -> None:
    usage = SharedCounts(fronts=40)
    pipe = Pipeline(Settings(decode_threads=8), clock, usage)
    counts = []
    for usage.serving in (1, 3, 40):
        counts.append(pipe._threads.count)
    assert counts == [8, 2, 1]


async def test_a_request_cancelled_while_decoded_leaves_other_images_undecoded(
    make_pipeline: Callable[..., Pipeline], served: Served, batcher: Batcher, held_up: HeldUp
) -> None:
    pipe = make_pipeline(decode_threads=1)
    task = asyncio.create_task(pipe.run(served, Request("", [png(1)] * 5, DEADLINE)))
    assert await asyncio.to_thread(held_up.begun.wait, PATIENCE_S)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert batcher.left, "it does not wait for the thread"
    held_up.go_on.set()
    assert levels(await pipe.run(served, Request("", [png(1)], DEADLINE))) == [1]
    assert len(held_up.decoded) == 2
    assert len(batcher.ran) == 1


@pytest.mark.parametrize("seconds", [0.05, -1.0])
async def test_a_request_past_its_deadline_leaves_its_other_images_undecoded(
    make_pipeline: Callable[..., Pipeline],
    served: Served,
    batcher: Batcher,
    held_up: HeldUp,
    seconds: float,
) -> None:
    decoded, go_on = held_up.decoded, held_up.go_on
    pipe = make_pipeline(decode_threads=1)
    with pytest.raises(DeadlineExceeded, match="before every image was decoded"):
        await pipe.run(served, Request("", [png(1)] * 50, seconds))
    assert batcher.left, "it does not wait for the thread"
    go_on.set()
    await pipe.run(served, Request("", [png(1)], DEADLINE))
    assert len(decoded) == (2 if seconds > 0 else 1)
    assert len(batcher.ran) == 1


async def test_images_for_one_model_are_decoded_between_those_for_another(
    make_pipeline: Callable[..., Pipeline], batcher: Batcher, held_up: HeldUp
) -> None:
    decoded, go_on = held_up.decoded, held_up.go_on
    pipe = make_pipeline(decode_threads=1)
    one, other = make_served(batcher, (4, 6)), make_served(batcher, (4, 6))
    other.settings.__dict__["name"] = "other"
    flood = [asyncio.create_task(pipe.run(one, Request("", [b"flood"] * 25, DEADLINE))) for _ in range(2)]
    assert await asyncio.to_thread(held_up.begun.wait, PATIENCE_S)
    single = asyncio.create_task(pipe.run(other, Request("", [b"single"], DEADLINE)))
    await asyncio.sleep(0)
    go_on.set()
    await asyncio.gather(single, *flood)
    assert decoded.index(b"single") <= 2


@pytest.mark.parametrize("fit", [fit for fit in Fit if fit is not Fit.REJECT])
async def test_images_are_fitted_as_the_model_says(pipe: Pipeline, batcher: Batcher, fit: Fit) -> None:
    served = make_served(batcher, (4, 6), fit=fit)
    answer = await pipe.run(served, Request("", [png(9, height=2, width=2)], DEADLINE))
    assert answer.frames == [place(2, 2, input_height=4, input_width=6, fit=fit)]


async def test_pixels_are_the_input_as_it_is(pipe: Pipeline, served: Served) -> None:
    answer = await pipe.run(served, Request("", pixels(1, 2), DEADLINE))
    assert answer.frames == [whole(4, 6)] * 2


async def test_each_image_is_rendered_with_its_outputs_off_the_event_loop(pipe: Pipeline, served: Served) -> None:
    threads = set()

    def render(outputs: Outputs, frame: Frame) -> tuple[list[list[float]], int]:
        threads.add(threading.current_thread())
        return outputs[0].tolist(), frame.height

    encoded = [png(level, height=level + 1) for level in range(9)]
    answer = await pipe.run(served, Request("", encoded, DEADLINE, Renders(render)))
    assert answer.rendered == [([[level]], level + 1) for level in range(9)]
    assert threading.main_thread() not in threads


class Watched:
    """Outputs that keep count of the threads on which they are copied."""

    def __init__(self, values: np.ndarray[Any, Any], threads: set[threading.Thread]) -> None:
        self._values = values
        self._threads = threads
        self.shape, self.dtype = values.shape, values.dtype

    def __len__(self) -> int:
        return len(self._values)

    def __array__(self, dtype: object = None, copy: object = None) -> np.ndarray[Any, Any]:
        self._threads.add(threading.current_thread())
        return self._values


@pytest.mark.parametrize("sizes", [[(4, 6)], [(4, 6), (8, 8)]])
async def test_large_outputs_of_several_batches_are_joined_off_the_event_loop(
    pipe: Pipeline, served: Served, of_two_sizes: Served, batcher: Batcher, sizes: Sequence[tuple[int, int]]
) -> None:
    threads: set[threading.Thread] = set()
    batcher.values = np.ones(pipeline.MAX_INLINE_BYTES, np.float32)
    batcher.cuts = (1, 3)
    run = batcher.run

    async def run_watched(request: EngineRequest) -> Result:
        result = await run(request)
        watched = [BatchRows(rows, (cast(Any, Watched(outputs[0], threads)),)) for rows, outputs in result.batches]
        return result._replace(batches=watched)

    batcher.run = run_watched  # type: ignore[method-assign]
    encoded = [png(level, *sizes[level % len(sizes)]) for level in range(8)]
    answer = await pipe.run(served if len(sizes) == 1 else of_two_sizes, Request("", encoded, DEADLINE))
    assert levels(answer) == list(range(8))
    assert (answer.outputs[0] == np.arange(8)[:, None]).all()
    assert threads
    assert threading.current_thread() not in threads


async def test_small_outputs_of_several_batches_are_put_together_in_order(
    pipe: Pipeline, served: Served, batcher: Batcher
) -> None:
    batcher.cuts = (1, 3)
    assert levels(await pipe.run(served, Request("", pixels(3, 1, 4, 2, 5), DEADLINE))) == [3, 1, 4, 2, 5]


def test_rows_that_differ_in_shape_between_batches_are_refused() -> None:
    one, other = (BatchRows([row], (np.zeros((1, sides), np.float32),)) for row, sides in enumerate((3, 1)))
    check_row_shapes([one, one])
    with pytest.raises(ExecutionFailed, match=r"\(3,\).*\(1,\)"):
        check_row_shapes([one, other])


async def test_a_rendering_that_fails_fails_its_request(pipe: Pipeline, served: Served) -> None:
    def render(outputs: Outputs, frame: Frame) -> None:
        raise ImageTooLarge("one too many")

    with pytest.raises(ImageTooLarge, match="one too many"):
        await pipe.run(served, Request("", pixels(1, 2), DEADLINE, Renders(render)))


async def test_what_is_rendered_still_counts_as_admitted(pipe: Pipeline, served: Served, batcher: Batcher) -> None:
    left = []
    renders = Renders(lambda outputs, frame: left.extend(batcher.left))
    await pipe.run(served, Request("", pixels(1), DEADLINE, renders))
    assert not left


def test_images_are_decoded_on_as_many_threads_as_a_container_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xlaserve.pipeline.pipeline.usable_cores", lambda: 3)
    pipe = Pipeline(Settings())
    pipe.stop()
    assert pipe._threads.count == 3


# Several resolutions


async def test_each_image_goes_to_its_best_resolution_and_answers_stay_in_order(
    pipe: Pipeline, of_two_sizes: Served, batcher: Batcher
) -> None:
    shapes = [(8, 8), (4, 6), (100, 100), (2, 3), (40, 60), (9, 9)]
    encoded = [png(level, height, width) for level, (height, width) in enumerate(shapes)]
    answer = await pipe.run(of_two_sizes, Request("", encoded, DEADLINE))
    assert levels(answer) == list(range(6))
    assert [(frame.input_height, frame.input_width) for frame in answer.frames] == [(8, 8), (4, 6)] * 2 + [
        (4, 6),
        (8, 8),
    ]
    assert sorted(images.shape for images, _, _ in batcher.ran) == [(3, 4, 6, 3), (3, 8, 8, 3)]
    timings = answer.timings
    assert (timings.queue_s, timings.gather_s, timings.execute_s) == (1.0, 2.0, 3.0)
    assert batcher.admitted == [(6, 6 * 8 * 8 * 3 + sum(map(len, encoded)))]


async def test_images_with_outputs_by_resolution_all_go_to_that_of_the_first(pipe: Pipeline, batcher: Batcher) -> None:
    of_two_sizes = make_served(batcher, (4, 6), (8, 8), task=Segmentation(3))
    encoded = [png(1, 4, 6), png(2, 8, 8), png(3, 2, 3)]
    assert levels(await pipe.run(of_two_sizes, Request("", encoded, DEADLINE))) == [
        1,
        114,
        3,
    ]  # a letterbox's border
    ((images, _, _),) = batcher.ran
    assert images.shape == (3, 4, 6, 3)


@pytest.fixture
def of_two_images(batcher: Batcher) -> Served:
    """A model of two images, which both have 4 x 6 or 8 x 8 pixels."""
    served = make_served(batcher, (4, 6), (8, 8))
    inputs = tuple(RGB_IMAGE[0]._replace(name=name) for name in ("before", "after"))
    model = replace(served.model, inputs=inputs, others=(RGB,))
    return Served(cast(Any, served.version), model, cast(Any, batcher))


@pytest.mark.parametrize("is_first_encoded", [True, False])
async def test_encoded_images_get_the_size_of_the_pixels_beside_them(
    pipe: Pipeline, of_two_images: Served, batcher: Batcher, is_first_encoded: bool
) -> None:
    encoded, array = [png(1, 4, 6), png(1, 8, 8)], pixels(1, 2, height=8, width=8)
    images, other = (encoded, array) if is_first_encoded else (array, encoded)
    answer = await pipe.run(of_two_images, Request("", images, DEADLINE, others=(other,)))
    assert [(frame.input_height, frame.input_width) for frame in answer.frames] == [(8, 8)] * 2
    assert len(batcher.ran) == 1


@pytest.mark.parametrize("sizes", [((4, 6),), ((4, 6), (8, 8))])
@pytest.mark.parametrize("shape", [(1, 1), (4, 1), (1, 6), (5, 6)])
async def test_pixels_of_another_size_beside_encoded_images_are_refused(
    pipe: Pipeline, of_two_images: Served, batcher: Batcher, shape: tuple[int, int], sizes: tuple[tuple[int, int], ...]
) -> None:
    buckets = tuple(Bucket(2, *size) for size in sizes)
    model = replace(of_two_images.model, buckets=buckets)
    served = Served(cast(Any, of_two_images.version), model, cast(Any, batcher))
    request = Request("", [png(1)], DEADLINE, others=(pixels(1, height=shape[0], width=shape[1]),))
    with pytest.raises(InvalidArgument, match=r"after: expected shape \[n, 4, 6, 3\]"):
        await pipe.run(served, request)
    assert not batcher.ran


async def test_a_failed_resolution_fails_the_request_and_cancels_other_images(
    pipe: Pipeline, of_two_sizes: Served, batcher: Batcher
) -> None:
    cancelled = []
    run = batcher.run

    async def fail_one(request: EngineRequest) -> Result:
        if request.shape[1] == 8:
            raise DeadlineExceeded("too late")
        try:
            await asyncio.sleep(PATIENCE_S)
        except asyncio.CancelledError:
            cancelled.append(request.images)
            raise
        return await run(request)

    batcher.run = fail_one  # type: ignore[method-assign]
    with pytest.raises(DeadlineExceeded, match="too late"):
        await pipe.run(of_two_sizes, Request("", [png(1, 8, 8), png(2, 4, 6), png(3, 4, 6)], DEADLINE))
    await asyncio.sleep(0)
    assert cancelled == [2]


async def test_an_image_that_no_resolution_fits_is_refused_where_none_is_fitted(
    pipe: Pipeline, batcher: Batcher
) -> None:
    of_two_sizes = make_served(batcher, (4, 6), (8, 8), fit=Fit.REJECT)
    assert levels(await pipe.run(of_two_sizes, Request("", [png(1, 8, 8), png(2, 4, 6)], DEADLINE))) == [
        1,
        2,
    ]
    with pytest.raises(InvalidArgument, match="expected 6 x 4 pixels, as the model's fit is reject, got 3 x 2"):
        await pipe.run(of_two_sizes, Request("", [png(1, 2, 3)], DEADLINE))


async def test_slow_checks_of_pixels_run_on_a_thread_after_admission(
    pipe: Pipeline, served: Served, batcher: Batcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = []
    given = np.full((2, 4, 6, 3), 7, np.float32)
    check_pixels = decoder.check_pixels

    def check(array: Any, pixel_range: PixelRange, image: ImageInput) -> Images:
        threads.append(threading.current_thread())
        assert batcher.admitted == [(2, given.nbytes)]
        return check_pixels(array, pixel_range, image)

    monkeypatch.setattr(request_inputs, "check_pixels", check)
    answer = await pipe.run(served, Request("", Pending(given, PixelRange.LEVELS), DEADLINE))
    assert levels(answer) == [7, 7]
    assert threads != [threading.current_thread()]
    assert batcher.ran[0][0].dtype == np.uint8


class Unread:
    """Pixels that become an array when they are asked to."""

    shape = (2, 4, 6, 3)
    nbytes = 2 * 4 * 6 * 3 * 4

    def __init__(self, batcher: Batcher, error: Exception | None = None) -> None:
        self._batcher = batcher
        self._error = error
        self.threads: list[threading.Thread] = []

    def __array__(self, dtype: object = None, copy: object = None) -> np.ndarray:
        self.threads.append(threading.current_thread())
        assert self._batcher.admitted == [(2, self.nbytes)]
        if self._error:
            raise self._error
        return np.full(self.shape, 7, np.int32)


async def test_pixels_that_take_long_are_read_on_a_thread_once_they_are_admitted(
    pipe: Pipeline, served: Served, batcher: Batcher
) -> None:
    unread = Unread(batcher)
    assert levels(await pipe.run(served, Request("", Pending(unread, PixelRange.LEVELS), DEADLINE))) == [7, 7]
    (thread,) = unread.threads
    assert thread is not threading.current_thread()


async def test_pixels_that_cannot_be_read_leave(pipe: Pipeline, served: Served, batcher: Batcher) -> None:
    unread = Unread(batcher, InvalidArgument("contents", "packed values", "other bytes"))
    with pytest.raises(InvalidArgument, match="contents: expected packed values"):
        await pipe.run(served, Request("", Pending(unread, PixelRange.LEVELS), DEADLINE))


async def test_pixels_of_a_wrong_size_are_refused_before_they_are_checked(pipe: Pipeline, served: Served) -> None:
    pending = Pending(np.full((1, 9, 9, 3), 300, np.float32), PixelRange.LEVELS)
    with pytest.raises(InvalidArgument, match="pixels: expected shape"):
        await pipe.run(served, Request("", pending, DEADLINE))


async def test_pixels_that_turn_out_wrong_leave(pipe: Pipeline, served: Served) -> None:
    pending = Pending(np.full((1, 4, 6, 3), 300, np.float32), PixelRange.LEVELS)
    with pytest.raises(InvalidArgument, match=r"pixels: expected .*, got 300"):
        await pipe.run(served, Request("", pending, DEADLINE))
