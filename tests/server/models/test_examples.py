from __future__ import annotations

import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from PIL import Image

from xlaserve.config import Bucket, ExampleSettings, Mode, ModelSettings
from xlaserve.engine.inputs import Images
from xlaserve.engine.program import Outputs, Program
from xlaserve.engine.warmup.difference import Difference
from xlaserve.errors import ModelFailed
from xlaserve.images.decoder import Decoded, ImageLimits
from xlaserve.images.frame import whole
from xlaserve.models import examples
from xlaserve.models.catalog import Model
from xlaserve.models.encoded_images import decode_for
from xlaserve.models.examples import check, compare
from xlaserve.models.task import Classification, Detection, Embedding, Segmentation

LIMITS = ImageLimits(max_image_bytes=1 << 24, max_image_pixels=1 << 24)
LEVELS = (10, 200, 60)
"""The level of each example: its share of 255 is the score of the second class."""


class Ran:
    """A program that answers with the mean levels of images, and keeps the shapes that it ran."""

    def __init__(self, off: float = 0.0) -> None:
        self.shapes: list[tuple[int, ...]] = []
        self.off = off

    def __call__(self, images: Images) -> Outputs:
        self.shapes.append(images.shape)
        second = images.mean(axis=(1, 2, 3), dtype=np.float32) / 255 + np.float32(self.off)
        return (np.stack([1 - second, second], axis=1),)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for level in LEVELS:
        Image.new("RGB", (9, 7), (level,) * 3).save(tmp_path / f"{level}.png")
    second = np.array(LEVELS) / 255
    np.savez(
        tmp_path / "predictions.npz",
        files=[f"{level}.png" for level in LEVELS],
        scores=np.stack([1 - second, second], axis=1),
    )
    return tmp_path


def checked(
    folder: Path,
    programs: dict[tuple[Mode, Bucket], Any],
    *,
    narrow: dict[Mode, float] | None = None,
    **limits: Any,
) -> dict[Mode, Difference]:
    settings = ModelSettings(name="a", source="a.keras", examples=ExampleSettings(folder=folder, **limits))
    task, buckets = Classification(2, ("dark", "light")), tuple(bucket for _, bucket in programs)
    model = Model(cast(Program, None), (None, None), task, "built in", settings=settings, buckets=buckets)
    made: Any = {key: SimpleNamespace(executable=program) for key, program in programs.items()}
    return check(model, made, LIMITS, narrow or {})


def test_answers_are_compared_in_every_mode_that_runs(folder: Path) -> None:
    program = Ran()
    found = checked(
        folder,
        {
            (Mode.AUTO, Bucket(2, 8, 8)): program,
            (Mode.GRAPH, Bucket(2, 8, 8)): Ran(off=0.005),
            (Mode.XLA, Bucket(2, 8, 8)): program,
            (Mode.XLA, Bucket(4, 8, 8)): program,
        },
    )
    assert [*found] == [mode for mode in Mode if mode in found]
    assert set(found) == {Mode.XLA, Mode.GRAPH}
    assert found[Mode.XLA].largest < 1e-6
    assert found[Mode.XLA].agreement == 1.0
    assert found[Mode.XLA].images == 3
    assert found[Mode.GRAPH].largest == pytest.approx(0.005 / (245 / 255), abs=1e-4)
    assert program.shapes == [(2, 8, 8, 3)] * 2, "the smallest bucket, filled"


def test_each_image_runs_at_the_resolution_that_suits_it(folder: Path) -> None:
    Image.new("RGB", (40, 7), (200,) * 3).save(folder / "200.png")
    tall, wide = Ran(), Ran()
    found = checked(folder, {(Mode.XLA, Bucket(1, 8, 8)): tall, (Mode.XLA, Bucket(1, 8, 40)): wide})
    assert (len(tall.shapes), len(wide.shapes)) == (2, 1)
    assert found[Mode.XLA].largest < 1e-6, "rows are in the order of the files"


def test_images_are_held_until_their_batches_have_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[weakref.ref[Images]] = []
    held: list[int] = []

    def decode(*args: Any) -> Decoded:
        image = decode_for(*args)
        decoded.append(weakref.ref(image.pixels))
        return image

    class Counted(Ran):
        def __call__(self, images: Images) -> Outputs:
            held.append(sum(image() is not None for image in decoded))
            return super().__call__(images)

    monkeypatch.setattr(examples, "decode_for", decode)
    found = checked(folder, {(Mode.XLA, Bucket(2, 8, 8)): Counted(), (Mode.GRAPH, Bucket(1, 8, 8)): Counted()})
    assert len(decoded) == len(LEVELS)
    assert sorted(held) == [1, 1, 1, 2, 2], "three batches of one image, two of two"
    assert max(difference.largest for difference in found.values()) < 1e-6


def test_a_model_that_is_too_far_off_is_refused_with_its_worst_image(folder: Path) -> None:
    programs = {(Mode.XLA, Bucket(1, 8, 8)): Ran(off=0.3)}
    with pytest.raises(ModelFailed) as failed:
        checked(folder, programs)
    said = str(failed.value)
    assert said.startswith("examples: mode xla: largest difference 0.31, agreement 0.667 of 3 images")
    assert "at most 0.01 and at least 0.95" in said
    assert "of 60.png the expected answer is dark 0.7647, the model's light 0.5353" in said
    assert str(folder) not in said


@pytest.mark.parametrize(
    ("limits", "narrow", "is_refused"),
    [
        ({}, {}, True),
        ({"max_difference": 0.05}, {}, False),
        ({"max_difference": 0.03}, {Mode.XLA: 0.1}, True),
        ({}, {Mode.XLA: 0.1}, False),
        ({}, {Mode.GRAPH: 0.1}, True),
        ({"max_difference": 0.0}, {}, True),
    ],
)
def test_the_limit_is_the_settings_or_what_the_precision_allows(
    folder: Path, limits: dict[str, float], narrow: dict[Mode, float], is_refused: bool
) -> None:
    programs = {(Mode.XLA, Bucket(1, 8, 8)): Ran(off=0.04)}
    if is_refused:
        with pytest.raises(ModelFailed, match="largest difference"):
            checked(folder, programs, narrow=narrow, **limits)
    else:
        assert checked(folder, programs, narrow=narrow, **limits)


def test_another_likeliest_class_is_refused_however_close_it_is(folder: Path) -> None:
    def even(images: Images) -> Outputs:
        return (np.full((len(images), 2), 0.5, np.float32),)

    with pytest.raises(ModelFailed, match=r"agreement 0\.667"):
        checked(folder, {(Mode.XLA, Bucket(1, 8, 8)): even}, max_difference=1)
    assert checked(folder, {(Mode.XLA, Bucket(1, 8, 8)): even}, max_difference=1, min_agreement=0.6)


def test_answers_that_are_not_finite_are_refused(folder: Path) -> None:
    programs = {(Mode.XLA, Bucket(1, 8, 8)): Ran(off=float("nan"))}
    with pytest.raises(ModelFailed, match="largest difference inf"):
        checked(folder, programs, max_difference=1, min_agreement=0)


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"GIF89a......", "examples: 60.png: image: expected JPEG, PNG or WebP"), (None, "no 60.png")],
)
def test_an_image_that_can_not_be_read_is_named(folder: Path, content: bytes | None, said: str) -> None:
    (folder / "60.png").unlink()
    if content is not None:
        (folder / "60.png").write_bytes(content)
    with pytest.raises(ModelFailed) as failed:
        checked(folder, {(Mode.XLA, Bucket(1, 8, 8)): Ran()})
    assert said in str(failed.value)


def test_outputs_of_another_shape_are_refused(folder: Path) -> None:
    def three(images: Images) -> Outputs:
        return (np.zeros((len(images), 3), np.float32),)

    with pytest.raises(ModelFailed, match=r"scores: expected outputs of shape \[3, 3\], got \[3, 2\]"):
        checked(folder, {(Mode.XLA, Bucket(1, 8, 8)): three})


def test_objects_are_compared_wherever_they_stand_in_the_answer() -> None:
    task = Detection(3, max_detections=2)
    boxes = np.array([[[0, 0, 4, 4], [4, 4, 8, 8]]], np.float32)
    scores, classes = np.array([[0.75, 0.5]], np.float32), np.array([[1, 2]], np.int32)
    count = np.array([2], np.int32)
    other = (boxes[:, ::-1], scores, classes[:, ::-1], count)
    found = compare(task, (boxes, scores, classes, count), other, [whole(8, 8)])
    assert found.difference == Difference(0.25, 1.0, 1)


def test_pixels_are_compared_by_their_class() -> None:
    wanted = np.zeros((2, 4, 4), np.uint8)
    got = wanted.copy()
    got[1, 0, :2] = 1
    found = compare(Segmentation(2), (wanted,), (got,), [whole(4, 4)] * 2)
    assert found.difference == Difference(0.0, 1 - 1 / 16, 2)
    assert found.worst == 1


def test_vectors_have_a_difference_alone() -> None:
    wanted, got = (np.array([[1, 2], [3, last]], np.float32) for last in (4, 5))
    found = compare(Embedding(2), (wanted,), (got,), [whole(4, 4)] * 2)
    assert found.difference == Difference(0.25, None, 2)
    assert found.worst == 1
