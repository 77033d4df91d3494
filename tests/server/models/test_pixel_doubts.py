"""Warnings about the scale of the pixels that a model of a file gets."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from xlaserve.config import BucketSettings, Mode, ModelSettings, ScalingSettings
from xlaserve.engine.buckets.planner import Cost
from xlaserve.engine.program import Warmed
from xlaserve.models import catalog, pixel_doubts
from xlaserve.models.catalog import Model
from xlaserve.models.networks.keras_runtime import keras

layers = keras.layers
SIDE = 6


def rescaling() -> Any:
    return layers.Rescaling(1 / 127.5, offset=-1)


def normalization() -> Any:
    return layers.Normalization(mean=[100.0, 110, 120], variance=[4000.0, 3600, 3500])


def padded() -> Any:
    return keras.Sequential([layers.ZeroPadding2D(), rescaling()])


def load(folder: Path, *first: Any, dtype: str = "float32", bias: Any = None, **settings: Any) -> Model:
    pixels = keras.Input((SIDE, SIDE, 3), dtype=dtype)
    x = pixels
    for layer in first:
        x = layer(x)
    x = layers.GlobalAveragePooling2D()(layers.Conv2D(4, 3)(x))
    network = keras.Model(pixels, layers.Dense(3, activation="softmax", name="scores")(x))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "__array__ implementation doesn't accept a copy", DeprecationWarning)
        network.save(folder / "it.keras")
    return catalog.load(
        ModelSettings(name="it", source=str(folder / "it.keras"), buckets=(BucketSettings(1),), **settings)
    )


def measured(model: Model) -> list[str]:
    (bucket,) = model.buckets
    program = Warmed(model.program.compile(Mode.GRAPH, bucket).executable, Cost(0.0, 0.0))
    return pixel_doubts.measure(model, {(Mode.GRAPH, bucket): program})


@pytest.mark.parametrize("first", [(), (layers.BatchNormalization,), (layers.ZeroPadding2D,)])
def test_pixels_of_unknown_scale_get_a_warning_with_the_line_to_write(tmp_path: Path, first: tuple[Any, ...]) -> None:
    model = load(tmp_path, *(make() for make in first))
    assert model.pixel_scale == pytest.approx(1, rel=1e-3)
    (doubt,) = pixel_doubts.doubts(model)
    assert "write preprocess: unit" in doubt


@pytest.mark.parametrize("first", [rescaling, normalization, padded])
def test_a_model_that_scales_pixels_itself_gets_no_warning(tmp_path: Path, first: Any) -> None:
    model = load(tmp_path, first())
    assert model.pixel_scale is not None
    assert model.pixel_scale < 1 / 32
    assert measured(model) == []


def test_settings_that_say_so_end_the_warning(tmp_path: Path) -> None:
    assert pixel_doubts.doubts(load(tmp_path, preprocess="none")) == []
    assert pixel_doubts.doubts(load(tmp_path, preprocess="unit")) == []


@pytest.mark.parametrize("how", ["unit", "tf", "torch", ScalingSettings(mean=127, deviation=128)])
@pytest.mark.parametrize("first", [rescaling, normalization])
def test_pixels_that_are_scaled_twice_get_a_warning(tmp_path: Path, first: Any, how: str | ScalingSettings) -> None:
    (doubt,) = pixel_doubts.doubts(load(tmp_path, first(), preprocess=how))
    assert "twice" in doubt
    assert doubt.endswith("write preprocess: none")


def test_batch_normalization_after_scaling_is_no_second_scaling(tmp_path: Path) -> None:
    assert pixel_doubts.doubts(load(tmp_path, layers.BatchNormalization(), preprocess="unit")) == []


def test_a_model_that_comes_from_no_file_gets_no_warning() -> None:
    settings = ModelSettings(name="it", source="builtin:shapes-detector", buckets=(BucketSettings(1),))
    assert catalog.load(settings).pixel_scale is None


def test_one_answer_to_all_images_gets_a_warning(tmp_path: Path) -> None:
    layer = layers.Rescaling(0.0)
    (doubt,) = measured(load(tmp_path, layer, preprocess="none"))
    assert doubt.startswith("4 different images get the same answer")


@pytest.mark.parametrize(
    ("answers", "are_alike"),
    [
        ([[1.0, 0.0], [1.0, 0.0]], True),
        ([[1.0, 0.0], [0.9, 0.1]], False),
        ([[np.nan, 0.0], [np.nan, 0.0]], False),
        ([[], []], False),
    ],
)
def test_answers_are_compared_as_floats(answers: list[list[float]], are_alike: bool) -> None:
    assert (
        pixel_doubts.are_alike([(np.array([row], np.float32), np.array([[5]], np.int32)) for row in answers])
        is are_alike
    )
