"""The preparation of images by default: as the training of a source did it."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image, ImageOps
from tests.server.images.encoded import LIMITS

from xlaserve.config import (
    PILLOW_BILINEAR,
    TENSORFLOW_BILINEAR,
    Fit,
    ModelSettings,
)
from xlaserve.images.decoder import decode
from xlaserve.models import catalog
from xlaserve.models.catalog import Model
from xlaserve.models.networks.keras_runtime import keras
from xlaserve.models.networks.preparation import IMAGENET, KERAS, TEACHABLE_MACHINE, UNKNOWN
from xlaserve.models.sources import applications

SaveKeras = Callable[..., str]
SIDE = 24


def classifier(name: str = "scores") -> Any:
    pixels = keras.Input((SIDE, SIDE, 3))
    means = keras.layers.GlobalAveragePooling2D()(pixels)
    return keras.Model(pixels, keras.layers.Dense(3, activation="softmax", name=name)(means))


def load(source: str, **fields: Any) -> Model:
    return catalog.load(ModelSettings(name="it", source=source, **fields))


def photograph() -> Image.Image:
    noise = np.random.default_rng(0).integers(0, 256, (75, 101, 3), dtype=np.uint8)
    return Image.fromarray(noise)


def prepared(model: Model) -> Any:
    """The pixels that a model gets of the photograph."""
    file = io.BytesIO()
    photograph().save(file, "PNG")
    return decode(file.getvalue(), partial(model.place, (SIDE, SIDE)), LIMITS, resize=model.resize).pixels


def test_a_model_of_keras_gets_the_pixels_of_image_dataset_from_directory(
    keras_file: SaveKeras, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    model = load(keras_file(classifier()))
    assert (model.fit, model.resize, model.preparation) == (Fit.RESIZE, TENSORFLOW_BILINEAR, KERAS)
    assert any("resized as tensorflow bilinear" in line and KERAS.reason in line for line in caplog.messages)
    folder = tmp_path / "images" / "class"
    folder.mkdir(parents=True)
    photograph().save(folder / "photograph.png")
    dataset = keras.utils.image_dataset_from_directory(
        folder.parent, labels=None, image_size=(SIDE, SIDE), shuffle=False, verbose=False
    )
    (trained,) = [batch.numpy() for batch in dataset]
    np.testing.assert_array_equal(prepared(model), np.rint(trained[0]))


def test_settings_go_before_what_is_known_of_the_training(
    keras_file: SaveKeras, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    model = load(keras_file(classifier()), resize=PILLOW_BILINEAR, fit=Fit.PAD)
    assert (model.fit, model.resize, model.resize_reason) == (Fit.PAD, PILLOW_BILINEAR, "")
    assert not any("resized as" in line for line in caplog.messages)


def test_a_model_of_teachable_machine_gets_the_middle_of_an_image(keras_file: SaveKeras) -> None:
    model = load(keras_file(classifier("dense_Dense1")))
    assert model.preparation == TEACHABLE_MACHINE
    expected = ImageOps.fit(photograph(), (SIDE, SIDE), Image.Resampling.LANCZOS)
    np.testing.assert_array_equal(prepared(model), expected)


@pytest.mark.parametrize("save", ["export", "save"])
def test_a_saved_model_of_keras_is_known(tmp_path: Path, save: str) -> None:
    folder = str(tmp_path / "saved")
    if save == "export":
        classifier().export(folder, verbose=False)
    else:
        tf.saved_model.save(classifier(), folder)
    assert load(folder).preparation == KERAS


def test_of_a_saved_model_that_keras_has_not_written_nothing_is_known(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    class Means(tf.Module):
        @tf.function(
            input_signature=[tf.TensorSpec((None, SIDE, SIDE, 3))],
            autograph=False,
        )
        def __call__(self, pixels: tf.Tensor) -> tf.Tensor:
            return tf.nn.softmax(tf.reduce_mean(pixels, axis=(1, 2)))

    tf.saved_model.save(module := Means(), str(tmp_path / "means"), signatures=module.__call__)
    model = load(str(tmp_path / "means"))
    assert (model.preparation, model.resize) == (UNKNOWN, PILLOW_BILINEAR)
    (line,) = [line for line in caplog.messages if "resized as pillow bilinear" in line]
    assert "xlaserve match" in line, "nothing else tells"


@pytest.mark.parametrize(("weights", "expected"), [("imagenet", IMAGENET), ("random", KERAS)])
def test_published_weights_are_evaluated_on_a_centre_crop(
    monkeypatch: pytest.MonkeyPatch, weights: str, expected: object
) -> None:
    monkeypatch.setattr(applications, "_download", lambda build, arguments: build(weights=None, **arguments))
    model = load("keras.applications:MobileNet", weights=weights, input_size=(32, 32))
    assert model.preparation == expected
    assert model.fit is (Fit.CENTER_CROP if weights == "imagenet" else Fit.RESIZE)
