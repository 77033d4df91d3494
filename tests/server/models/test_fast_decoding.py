from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from xlaserve.config import Bucket, Fit, Mode, ModelSettings
from xlaserve.engine.inputs import Images
from xlaserve.engine.program import Outputs
from xlaserve.engine.warmup.difference import Difference
from xlaserve.images.decoder import ImageLimits
from xlaserve.models.catalog import Model
from xlaserve.models.fast_decoding import encode, measure, photograph
from xlaserve.models.task import Classification, Embedding, Task

LIMITS = ImageLimits(max_image_bytes=1 << 24, max_image_pixels=1 << 24)


class Ran:
    """A program that answers with the means of the halves of an image, and keeps what it ran."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []

    def __call__(self, images: Images) -> Outputs:
        self.shapes.append(images.shape)
        halves = np.array_split(images, 2, axis=2)
        return (np.stack([half.mean(axis=(1, 2, 3), dtype=np.float32) for half in halves], axis=1),)


def found(
    program: Any, *buckets: Bucket, fit: Fit = Fit.RESIZE, task: Task | None = None, limits: ImageLimits = LIMITS
) -> Difference | None:
    settings = ModelSettings(name="m", source="fake", fit=fit)
    model = Model(cast(Any, None), (None, None), task or Classification(2), "random", settings=settings, buckets=())
    programs: Any = {(Mode.XLA, bucket): SimpleNamespace(executable=program) for bucket in buckets}
    return measure(model, programs, Mode.XLA, limits)


def test_the_difference_and_the_agreement_of_answers_are_measured() -> None:
    difference = found(Ran(), Bucket(1, 32, 32))
    assert difference is not None
    assert 0 < difference.largest < 0.01
    assert difference.agreement == 1.0
    assert difference.images == 8


def test_a_task_without_classes_has_a_difference_alone() -> None:
    difference = found(Ran(), Bucket(1, 32, 32), task=Embedding(2))
    assert difference is not None
    assert difference.largest > 0
    assert difference.agreement is None


def test_only_the_smallest_bucket_runs_in_whole_batches() -> None:
    program = Ran()
    difference = found(program, Bucket(8, 32, 32), Bucket(3, 32, 32), Bucket(1, 64, 64))
    assert set(program.shapes) == {(3, 32, 32, 3)}
    assert difference is not None
    assert difference.images == 8


@pytest.mark.parametrize("fit", [Fit.LETTERBOX, Fit.PAD])
def test_images_are_brought_to_the_models_size_as_it_wants_them(fit: Fit) -> None:
    difference = found(Ran(), Bucket(2, 48, 32), fit=fit)
    assert difference is not None
    assert 0 < difference.largest < 0.01


@pytest.mark.parametrize(
    ("fit", "limits"),
    [
        (Fit.REJECT, LIMITS),
        (Fit.RESIZE, ImageLimits(1 << 24, max_image_pixels=128 * 128)),
        (Fit.RESIZE, ImageLimits(max_image_bytes=100, max_image_pixels=1 << 24)),
    ],
    ids=["reject", "few pixels", "few bytes"],
)
def test_nothing_is_measured_where_no_image_is_ever_reduced(fit: Fit, limits: ImageLimits) -> None:
    program = Ran()
    assert found(program, Bucket(1, 32, 32), fit=fit, limits=limits) is None
    assert not program.shapes


def test_photographs_are_reproducible_and_have_contrast_at_every_scale() -> None:
    image = photograph(256, 384, seed=1)
    assert encode(image) == encode(photograph(256, 384, seed=1)) != encode(photograph(256, 384, seed=2))
    levels = np.asarray(image.getchannel("Y"), np.float64)
    for scale in (1, 4, 16, 64):
        means = levels.reshape(256 // scale, scale, 384 // scale, scale).mean(axis=(1, 3))
        assert np.abs(np.diff(means, axis=1)).mean() > 2
