from __future__ import annotations

from typing import Any, cast

import pytest

from xlaserve.config import Color, Fit, ModelSettings
from xlaserve.errors import ModelFailed
from xlaserve.models.catalog import Model
from xlaserve.models.network_settings import check_fit
from xlaserve.models.networks.preparation import Preparation
from xlaserve.models.task import (
    Classification,
    Detection,
    Embedding,
    ImageToImage,
    Reading,
    Segmentation,
    Task,
    Tensors,
)


@pytest.mark.parametrize(
    ("task", "configured", "used"),
    [
        (Classification(3), None, Fit.RESIZE),
        (Embedding(3), None, Fit.RESIZE),
        (Detection(3, max_detections=5), None, Fit.LETTERBOX),
        (Segmentation(3), None, Fit.LETTERBOX),
        (ImageToImage(Color.RGB), None, Fit.LETTERBOX),
        (Classification(3), Fit.PAD, Fit.PAD),
        (Detection(3, max_detections=5), Fit.RESIZE, Fit.RESIZE),
    ],
)
def test_images_are_fitted_as_configured_or_as_suits_the_task(task: Task, configured: Fit | None, used: Fit) -> None:
    settings = ModelSettings(name="m", source="fake", fit=configured)
    assert Model(cast(Any, None), (None, None), task, "random", settings=settings, buckets=()).fit is used


@pytest.mark.parametrize("fit", [Fit.CROP, Fit.CENTER_CROP])
@pytest.mark.parametrize("task", [Segmentation(3), ImageToImage(Color.RGB)])
def test_no_part_of_an_image_is_left_out_where_each_pixel_has_an_answer(task: Task, fit: Fit) -> None:
    with pytest.raises(ModelFailed, match="fit: expected one of resize, letterbox, pad, reject"):
        check_fit(ModelSettings(name="m", source="fake", fit=fit), task, None)
    check_fit(ModelSettings(name="m", source="fake", fit=fit), Detection(3, max_detections=5), None)
    check_fit(ModelSettings(name="m", source="fake", fit=Fit.PAD), task, None)


def test_a_shorter_side_needs_the_fit_that_it_belongs_to() -> None:
    with pytest.raises(ValueError, match="shorter_side: expected fit: center_crop with it, got crop"):
        ModelSettings(name="m", source="fake", shorter_side=256, fit=Fit.CROP)
    check_fit(ModelSettings(name="m", source="fake", shorter_side=256, fit=Fit.CENTER_CROP), Classification(3), None)


def test_a_shorter_side_belongs_to_the_fit_of_the_training_too() -> None:
    settings = ModelSettings(name="m", source="fake", shorter_side=288)
    check_fit(settings, Classification(3), Fit.CENTER_CROP)
    with pytest.raises(ModelFailed, match="shorter_side: expected fit: center_crop with it, got letterbox"):
        check_fit(settings, Detection(3, max_detections=5), Fit.CENTER_CROP)
    with pytest.raises(ModelFailed, match="shorter_side: expected fit: center_crop with it, got resize"):
        check_fit(settings, Classification(3), None)


@pytest.mark.parametrize("cut", [Fit.CROP, Fit.CENTER_CROP])
@pytest.mark.parametrize(("reading", "is_cut"), [(Segmentation(3), False), (Embedding(3), True)])
def test_no_pixels_are_cut_as_in_training_where_an_output_has_them(cut: Fit, reading: Reading, is_cut: bool) -> None:
    settings = ModelSettings(name="m", source="fake")
    facts: dict[str, Any] = {"settings": settings, "buckets": (), "preparation": Preparation(fit=cut)}
    model = Model(cast(Any, None), (None, None), Tensors(reading.outputs, (reading,)), "random", **facts)
    assert model.fit is (cut if is_cut else Fit.RESIZE)
