"""Answers of models with outputs of all kinds, compared with Keras or NumPy on the same pixels."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from numpy.typing import NDArray

from xlaserve.config import Bucket, BucketSettings, Color, Mode, ModelSettings
from xlaserve.engine.buckets.planner import Cost
from xlaserve.engine.program import Outputs, Warmed
from xlaserve.errors import ModelFailed
from xlaserve.models import catalog, scores
from xlaserve.models.networks.keras_runtime import keras
from xlaserve.models.task import DATATYPES, Classification, ImageToImage, Regression, Segmentation, Tensors

SIDE = 8
BUCKET = Bucket(2, SIDE, SIDE)
PIXELS = np.random.default_rng(0).integers(0, 256, (2, SIDE, SIDE, 3), np.uint8)
MODES = [Mode.XLA, Mode.GRAPH, Mode.EAGER]

SaveKeras = Callable[..., str]


class AllTypes(tf.Module):
    """An output of each type that is served."""

    @tf.function(autograph=False)
    def give(self, photo: tf.Tensor) -> dict[str, tf.Tensor]:
        means = tf.reduce_mean(photo, axis=(1, 2)) / 4.0
        given = {dtype.name: tf.cast(means, dtype.name) for dtype in DATATYPES if dtype != np.bool_}
        return {
            **given,
            "bool": means > 32.0,
            "bfloat16": tf.cast(means, tf.bfloat16),
            "deep": tf.reshape(photo, (-1, 4, 2, SIDE, 3, 1)),
            "row": tf.argmax(means, axis=1),
        }


def load(source: str, **fields: Any) -> catalog.Model:
    return catalog.load(ModelSettings(name="it", source=source, buckets=(BucketSettings(2),), **fields))


def run(model: catalog.Model, mode: Mode = Mode.XLA) -> Outputs:
    return model.program.compile(mode, BUCKET).executable(PIXELS)


def headed(*heads: Any) -> Any:
    """A Keras model whose heads see a few features of the image."""
    keras.utils.set_random_seed(2)  # of its weights, by which outputs are spread out or not
    pixels = keras.Input((SIDE, SIDE, 3))
    values = keras.layers.Rescaling(1 / 255)(pixels)
    values = keras.layers.Conv2D(4, 3, padding="same", activation="relu")(values)
    return keras.Model(pixels, [head(values) for head in heads])


def dense(units: int, activation: str = "linear", name: str | None = None) -> Any:
    layers = [keras.layers.Flatten(), keras.layers.Dense(units, activation=activation, name=name)]
    return lambda values: layers[1](layers[0](values))


def truth(model: Any) -> list[NDArray[Any]]:
    outputs = model(PIXELS.astype(np.float32), training=False)
    return [np.asarray(one) for one in (outputs if isinstance(outputs, (list, tuple)) else [outputs])]


@pytest.mark.parametrize("mode", MODES)
def test_tensors_of_every_type_are_what_the_model_gives(tmp_path: Path, mode: Mode) -> None:
    module = AllTypes()
    spec = tf.TensorSpec((None, SIDE, SIDE, 3), tf.float32, name="photo")
    tf.saved_model.save(module, str(tmp_path / "all"), signatures=module.give.get_concrete_function(spec))
    wanted = {name: np.asarray(value) for name, value in module.give(PIXELS.astype(np.float32)).items()}
    model = load(str(tmp_path / "all"))
    assert isinstance(model.task, Tensors)
    assert [output.name for output in model.task.outputs] == sorted(wanted)
    for output, values in zip(model.task.outputs, run(model, mode), strict=True):
        assert DATATYPES[values.dtype] == output.datatype
        assert values.shape[1:] == output.shape[1:]
        rtol = 1e-2 if "float16" in output.name else 0  # XLA leaves out casts to less and back
        np.testing.assert_allclose(values, wanted[output.name].astype(values.dtype), rtol=rtol)
    assert {output.datatype for output in model.task.outputs} == set(DATATYPES.values())


def test_features_and_several_numbers_are_tensors_with_the_models_names(keras_file: SaveKeras) -> None:
    model = headed(dense(1, name="age"), keras.layers.AveragePooling2D(2, name="features"))
    loaded = load(keras_file(model))
    assert isinstance(loaded.task, Tensors)
    assert {output.name for output in loaded.task.outputs} == {"age", "features"}
    for values, wanted in zip(run(loaded), truth(model), strict=True):
        np.testing.assert_allclose(values, wanted, atol=1e-4)


def test_one_sigmoid_is_the_second_of_two_classes(keras_file: SaveKeras) -> None:
    model = headed(dense(1, "sigmoid"))
    (wanted,) = truth(model)
    threshold = float(wanted[0, 0])  # the first image is at it, and the other one beyond or below
    loaded = load(keras_file(model), task="classification", labels=["df", "real"], threshold=threshold)
    assert loaded.task == Classification(2, ("df", "real"), threshold=threshold)
    outputs = run(loaded)
    np.testing.assert_allclose(outputs[0], np.concatenate((1 - wanted, wanted), axis=1), atol=1e-4)
    assert scores.doubts(loaded, outputs) == []
    assert load(keras_file(model), labels=["df", "real"]).task == Classification(2, ("df", "real"), threshold=0.5)
    assert isinstance(load(keras_file(model)).task, Tensors)


@pytest.mark.parametrize(("activation", "function"), [("softmax", tf.nn.softmax), ("sigmoid", tf.sigmoid)])
def test_an_activation_makes_scores_of_logits(keras_file: SaveKeras, activation: str, function: Any) -> None:
    model = headed(dense(4))
    source = keras_file(model)
    (wanted,) = truth(model)
    (got,) = run(load(source, activation=activation))
    np.testing.assert_allclose(got, function(wanted), atol=1e-4)
    (got,) = run(load(source))
    np.testing.assert_allclose(got, wanted, atol=1e-4)


def test_logits_are_doubted_until_the_settings_say_what_they_are(keras_file: SaveKeras) -> None:
    logits, chances = keras_file(headed(dense(4))), headed(dense(4, "softmax"))
    loaded = load(logits)
    (doubt,) = scores.doubts(loaded, run(loaded))
    assert doubt.startswith("scores: ")
    assert "activation: softmax" in doubt
    for activation in ("none", "softmax"):
        loaded = load(logits, activation=activation)
        assert scores.doubts(loaded, run(loaded)) == []
    loaded = load(keras_file(chances))
    assert scores.doubts(loaded, run(loaded)) == []


@pytest.mark.parametrize("channels", [1, 2, 4])
def test_logits_of_images_of_any_channels_are_doubted(keras_file: SaveKeras, channels: int) -> None:
    pixels = keras.Input((SIDE, SIDE, channels))
    loaded = load(keras_file(keras.Model(pixels, dense(4, name="scores")(pixels))), task="classification")
    executable = loaded.program.compile(Mode.XLA, BUCKET).executable
    (doubt,) = scores.measure(loaded, {(Mode.XLA, BUCKET): Warmed(executable, Cost(1.0, 1.0))})
    assert doubt.startswith("scores: ")


@pytest.mark.parametrize("is_flat", [False, True])
def test_a_mask_of_one_number_a_pixel_is_a_map_of_two_classes(keras_file: SaveKeras, is_flat: bool) -> None:
    def mask(values: Any) -> Any:
        found = keras.layers.Conv2D(1, 1, activation="sigmoid")(values)
        return keras.layers.Reshape((SIDE, SIDE))(found) if is_flat else found

    model = headed(mask)
    (wanted,) = truth(model)
    threshold = float(np.median(wanted))
    loaded = load(keras_file(model), task="segmentation", threshold=threshold)
    assert loaded.task == Segmentation(2)
    (class_map,) = run(loaded)
    assert class_map.dtype == np.uint8
    same = class_map == (wanted.reshape(2, SIDE, SIDE) >= threshold)
    assert same.mean() > 0.98  # rounding may put the median itself on either side
    assert 0 < class_map.mean() < 1


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("activation", "output_range", "to_levels"),
    [("sigmoid", None, [255, 0]), ("tanh", "-1..1", [127.5, 127.5]), ("relu", "0..255", [1, 0])],
)
def test_images_are_what_numpy_makes_of_the_models_output(
    keras_file: SaveKeras, mode: Mode, activation: str, output_range: str | None, to_levels: list[float]
) -> None:
    model = headed(lambda values: keras.layers.Conv2D(3, 3, padding="same", activation=activation)(9 * values))
    (wanted,) = truth(model)
    loaded = load(keras_file(model), task="image", output_range=output_range)
    assert loaded.task == ImageToImage(Color.RGB, (SIDE, SIDE))
    (levels,) = run(loaded, mode)
    assert levels.dtype == np.uint8
    scale, offset = map(np.float32, to_levels)
    expected = np.clip(np.rint(wanted * scale + offset), 0, 255)
    assert np.abs(levels - expected).max() <= 1  # where rounding of float32 decides between two levels
    assert (levels == expected).mean() > 0.98
    assert len(np.unique(expected)) > 3


def test_a_mask_of_fewer_pixels_is_enlarged(keras_file: SaveKeras) -> None:
    model = headed(keras.Sequential([keras.layers.AveragePooling2D(2), keras.layers.Conv2D(1, 1)]))
    (class_map,) = run(load(keras_file(model), task="segmentation", activation="sigmoid"))
    assert class_map.shape == (2, SIDE, SIDE)


@pytest.mark.parametrize("units", [1, 3])
def test_numbers_are_a_regression_with_names_and_units(keras_file: SaveKeras, units: int) -> None:
    model = headed(dense(units))
    (wanted,) = truth(model)
    values = {f"value {index}": "mm" for index in range(units)}
    loaded = load(keras_file(model), values=values)
    assert loaded.task == Regression(units, tuple(values.items()))
    (got,) = run(loaded)
    np.testing.assert_allclose(got, wanted, atol=1e-4)


def test_heads_are_read_each_in_its_own_way(keras_file: SaveKeras) -> None:
    heads = dense(1, name="age"), dense(1, name="sex"), keras.layers.AveragePooling2D(4, name="features")
    model = headed(*heads)
    outputs = {
        "age": {"task": "regression", "values": {"age": "years"}},
        "sex": {"task": "classification", "labels": ["female", "male"], "activation": "sigmoid"},
    }
    loaded = load(keras_file(model), outputs=outputs)
    assert isinstance(loaded.task, Tensors)
    age, sex, features = truth(model)
    male = np.asarray(tf.sigmoid(sex))
    got = dict(zip((output.name for output in loaded.task.outputs), run(loaded), strict=True))
    np.testing.assert_allclose(got["age"], age, atol=1e-4)
    np.testing.assert_allclose(got["sex"], np.concatenate((1 - male, male), axis=1), atol=1e-4)
    np.testing.assert_allclose(got["features"], features, atol=1e-4)


def test_tensors_of_unknown_size_need_buckets_for_each_resolution(keras_file: SaveKeras) -> None:
    images = keras.Input((None, None, 3))
    source = keras_file(keras.Model(images, keras.layers.UpSampling2D(2)(images)))
    loaded = load(source, input_size=(SIDE, SIDE))
    assert [output.shape for output in loaded.task.outputs] == [(-1, -1, -1, 3)]
    (larger,) = run(loaded)
    np.testing.assert_array_equal(larger, PIXELS.repeat(2, axis=1).repeat(2, axis=2))
    with pytest.raises(ModelFailed, match="unmatched: expected reject"):
        load(source, input_size=(SIDE, SIDE), unmatched="background")
