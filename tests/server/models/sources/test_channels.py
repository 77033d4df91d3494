"""Models of grey images, of any number of channels, and with their channels first, from files and SavedModels."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from xlaserve.config import Bucket, BucketSettings, Color, Mode, ModelSettings
from xlaserve.engine.buckets.planner import Cost
from xlaserve.engine.program import Warmed
from xlaserve.errors import InvalidArgument, ModelFailed
from xlaserve.images.image_input import ImageInput
from xlaserve.models import catalog, scores
from xlaserve.models.networks.keras_runtime import keras
from xlaserve.models.networks.preprocess import Scaling, apply
from xlaserve.models.task import Segmentation

MODES = (Mode.XLA, Mode.GRAPH, Mode.EAGER)


def load(source: Path, **settings: Any) -> catalog.Model:
    return catalog.load(ModelSettings(name="m", source=str(source), buckets=(BucketSettings(2),), **settings))


def save(network: keras.Model, file: Path) -> Path:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "__array__ implementation doesn't accept a copy", DeprecationWarning)
        network.save(file)
    return file


def answers(model: catalog.Model, pixels: Any, mode: Mode) -> Any:
    (bucket,) = model.buckets
    return model.program.compile(mode, bucket).executable(pixels)[0]


def noise(*shape: int) -> Any:
    return np.random.default_rng(4).integers(0, 256, shape, dtype=np.uint8)


def saved(folder: Path, weights: Any, shape: tuple[int | None, ...], axes: tuple[int, ...], dtype: tf.DType) -> Path:
    """Writes a SavedModel of `shape` whose scores are weighted means over `axes`."""
    module = tf.Module()
    module.weights = tf.Variable(weights, dtype=tf.float32)

    @tf.function(autograph=False, input_signature=[tf.TensorSpec(shape, dtype, name="image")])
    def scores(image: tf.Tensor) -> dict[str, tf.Tensor]:
        means = tf.reshape(tf.reduce_mean(tf.cast(image, tf.float32), axes), (-1, len(weights)))
        return {"scores": means @ module.weights}

    tf.saved_model.save(module, str(folder), signatures={"serving_default": scores})
    return folder


@pytest.mark.parametrize("channels", [1, 2, 4, 5])
@pytest.mark.parametrize("mode", MODES)
def test_a_keras_model_of_any_number_of_channels_answers_as_keras(tmp_path: Path, channels: int, mode: Mode) -> None:
    keras.utils.set_random_seed(0)
    network = keras.Sequential(
        [
            keras.Input((9, 7, channels)),
            keras.layers.Conv2D(6, 3, activation="relu"),
            keras.layers.MaxPooling2D(2),
            keras.layers.Flatten(),
            keras.layers.Dense(3, activation="softmax"),
        ]
    )
    model = load(save(network, tmp_path / "net.keras"), preprocess="unit")
    assert model.image == ImageInput(channels, {1: Color.GREY, 4: Color.RGBA}.get(channels))
    assert model.buckets == (Bucket(2, 9, 7),)
    pixels = noise(2, 9, 7, channels)
    np.testing.assert_allclose(answers(model, pixels, mode), network(pixels / 255.0), atol=2e-6)


@pytest.mark.parametrize("mode", MODES)
def test_a_keras_model_without_an_axis_of_channels_is_grey(tmp_path: Path, mode: Mode) -> None:
    network = keras.Sequential([keras.Input((9, 7)), keras.layers.Flatten(), keras.layers.Dense(3)])
    model = load(save(network, tmp_path / "net.keras"), preprocess="tf")
    assert model.image == ImageInput(1, Color.GREY, "NHW")
    assert model.pixels == "[n, 9, 7] grey"
    pixels = noise(2, 9, 7, 1)
    expected = network(pixels[..., 0] / 127.5 - 1)
    np.testing.assert_allclose(answers(model, pixels, mode), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [tf.float32, tf.float16, tf.uint8, tf.uint16, tf.int32])
@pytest.mark.parametrize(
    ("shape", "axes"), [((None, 8, 6, 3), (1, 2)), ((None, 3, 8, 6), (2, 3)), ((None, 8, 6), (1, 2))]
)
def test_a_saved_model_gets_pixels_in_its_own_layout_and_type(
    tmp_path: Path, dtype: tf.DType, shape: tuple[int | None, ...], axes: tuple[int, ...]
) -> None:
    channels = 3 if len(shape) == 4 else 1
    weights = np.arange(2.0 * channels).reshape(channels, 2)
    model = load(saved(tmp_path / "net", weights, shape, axes, dtype))
    assert model.image.shape(-1, 8, 6) == (-1, *shape[1:])
    pixels = noise(2, 8, 6, channels)
    expected = pixels.mean(axis=(1, 2)) @ weights
    pixels = pixels.astype(model.inputs[0].dtype)
    np.testing.assert_allclose(answers(model, pixels, Mode.XLA), expected, rtol=2e-3 if dtype is tf.float16 else 1e-5)


def test_maps_of_a_network_with_its_channels_first_are_taken_so(tmp_path: Path) -> None:
    module = tf.Module()

    @tf.function(autograph=False, input_signature=[tf.TensorSpec((None, 3, 8, 6), tf.float32, name="image")])
    def scores(image: tf.Tensor) -> dict[str, tf.Tensor]:
        return {"maps": image}

    tf.saved_model.save(module, str(tmp_path / "net"), signatures={"serving_default": scores})
    model = load(tmp_path / "net", task="segmentation")
    assert model.task == Segmentation(3)
    pixels = noise(2, 8, 6, 3)
    np.testing.assert_array_equal(answers(model, pixels, Mode.XLA), pixels.argmax(axis=3))
    tensors = load(tmp_path / "net", task="tensors")
    np.testing.assert_array_equal(answers(tensors, pixels, Mode.XLA), np.moveaxis(pixels, -1, 1))


@pytest.mark.parametrize("channels", [1, 3, 5])
def test_scaling_goes_channel_by_channel(channels: int) -> None:
    scaling = Scaling((*range(1, channels + 1),), (*range(channels),))
    pixels = noise(2, 4, 3, channels)
    expected = pixels * np.arange(1.0, channels + 1) + np.arange(channels)
    np.testing.assert_allclose(apply(tf.constant(pixels), scaling), expected)


@pytest.mark.parametrize(
    ("channels", "settings", "field"),
    [
        (1, {"preprocess": "torch"}, "preprocess"),
        (3, {"preprocess": "caffe", "color": "bgr"}, "preprocess"),
        (1, {"preprocess": {"mean": [1, 2, 3]}}, "preprocess"),
        (3, {"equalize": True}, "equalize"),
        (2, {"equalize": True}, "equalize"),
        (1, {"color": "rgb"}, "color"),
        (5, {"color": "rgba"}, "color"),
    ],
)
def test_settings_that_do_not_fit_the_channels_fail_the_model(
    tmp_path: Path, channels: int, settings: dict[str, Any], field: str
) -> None:
    keras.Sequential([keras.Input((4, 4, channels)), keras.layers.GlobalAveragePooling2D()]).save(tmp_path / "m.keras")
    with pytest.raises(ModelFailed) as failed:
        load(tmp_path / "m.keras", task="embedding", **settings)
    assert str(failed.value).partition(":")[0] == field


@pytest.mark.parametrize("channels", [1, 4])
def test_scores_of_any_number_of_channels_are_looked_at(tmp_path: Path, channels: int) -> None:
    layers = [keras.Input((4, 4, channels)), keras.layers.Flatten(), keras.layers.Dense(3)]
    model = load(save(keras.Sequential(layers), tmp_path / "m.keras"))
    (bucket,) = model.buckets
    program = Warmed(model.program.compile(Mode.XLA, bucket).executable, Cost(0.0, 0.0))
    (doubt,) = scores.measure(model, {(Mode.XLA, bucket): program})
    assert "activation: softmax" in doubt


def test_a_model_of_two_channels_takes_no_pictures(tmp_path: Path) -> None:
    keras.Sequential([keras.Input((4, 4, 2)), keras.layers.GlobalAveragePooling2D()]).save(tmp_path / "m.keras")
    model = load(tmp_path / "m.keras")
    assert model.pixels == "[n, 4, 4, 2] as they are"
    with pytest.raises(InvalidArgument) as refused:
        _ = model.color
    assert refused.value.field == "image"
