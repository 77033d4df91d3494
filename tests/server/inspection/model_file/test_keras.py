from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import keras
import numpy as np
import pytest

from xlaserve.inspection.model_file import keras as described
from xlaserve.inspection.model_file import keras_layers
from xlaserve.inspection.model_file.description import Description, Tensor

layers = keras.layers
# Of Keras, as it saves weights.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning")


def describe(file: Path) -> Description:
    return described.describe(file, file)


def written(model: Any, folder: Path, suffix: str = ".keras") -> Path:
    file = folder / f"net{suffix}"
    model.save(file)
    return file


def classifier() -> Any:
    body = keras.Sequential([layers.Conv2D(4, 3, strides=2, padding="same"), layers.MaxPooling2D()], name="body")
    return keras.Sequential(
        [
            keras.Input((17, 13, 1), name="photo"),
            layers.Rescaling(1 / 255),
            layers.RandomFlip(),
            body,
            layers.Flatten(),
            layers.Dense(5, name="scores"),
            layers.Activation("softmax"),
        ]
    )


def autoencoder() -> Any:
    pixels = keras.Input((16, 24, 3), name="photo")
    small = layers.Conv2D(8, 3, strides=2, padding="same", activation="relu")(pixels)
    wide = layers.Conv2DTranspose(8, 3, strides=2, padding="same")(small)
    other = layers.UpSampling2D()(layers.DepthwiseConv2D(3, padding="same", depth_multiplier=2)(small))
    joined = layers.Concatenate()([wide, other, pixels])
    cut = layers.Cropping2D(((1, 2), (3, 4)))(layers.ZeroPadding2D(2)(joined))
    return keras.Model(pixels, layers.Conv2D(3, 1, activation="sigmoid", name="image")(cut))


def heads() -> Any:
    pixels = keras.Input((20, 20, 3), name="photo")
    x = layers.SeparableConv2D(4, 5, dilation_rate=2)(pixels)
    x = layers.Add()([x, layers.BatchNormalization()(x)])
    x = layers.GlobalAveragePooling2D()(layers.AveragePooling2D(3, padding="same")(x))
    outputs = [layers.Dense(1, name="age")(x), layers.Dense(1, activation="sigmoid", name="sex")(x)]
    return keras.Model(pixels, outputs)


def sequence() -> Any:
    pixels = keras.Input((50, 20, 1), name="photo")
    x = layers.Permute((2, 1, 3))(layers.Conv2DTranspose(4, 3, strides=2)(pixels))
    x = layers.Reshape((41, -1))(x)
    x = layers.LSTM(6, return_sequences=True)(x)
    return keras.Model(pixels, layers.Dense(7, activation="softmax", name="letters")(x))


@pytest.mark.parametrize("build", [classifier, autoencoder, heads, sequence])
@pytest.mark.parametrize("suffix", [".keras", ".h5"])
def test_inputs_outputs_and_parameters_are_those_that_keras_has(
    tmp_path: Path, build: Callable[[], Any], suffix: str
) -> None:
    model = build()
    found = describe(written(model, tmp_path, suffix))
    outputs = model.outputs
    assert [one.shape for one in found.inputs] == [tuple(one.shape) for one in model.inputs]
    assert [one.shape for one in found.outputs] == [tuple(one.shape) for one in outputs]
    assert [one.name for one in found.inputs] == ["photo"]
    assert found.parameters == model.count_params()
    assert found.written_by == f"Keras {keras.__version__}"


@pytest.mark.parametrize("name", ["MobileNetV2", "ResNet50V2", "DenseNet121"])
def test_shapes_of_networks_of_keras_applications_are_theirs(name: str) -> None:
    model = getattr(keras.applications, name)(weights=None, input_shape=(64, 64, 3), classes=7)
    found = described.network(json.loads(model.to_json()))
    assert found.outputs == (Tensor("predictions", (None, 7), "float32", "softmax"),)
    assert found.family == model.name
    assert found.custom == ()


def test_activations_are_those_of_the_last_layer_that_has_one(tmp_path: Path) -> None:
    assert [one.activation for one in describe(written(classifier(), tmp_path)).outputs] == ["softmax"]
    assert [one.activation for one in describe(written(heads(), tmp_path)).outputs] == ["linear", "sigmoid"]


def test_layers_that_scale_resize_and_augment_are_named(tmp_path: Path) -> None:
    model = keras.Sequential(
        [
            keras.Input((9, 9, 3)),
            layers.Resizing(8, 6),
            layers.Rescaling(1 / 127.5, offset=-1),
            layers.RandomRotation(0.1),
            layers.Conv2D(2, 3),
        ]
    )
    found = describe(written(model, tmp_path))
    assert found.layers == ("Resizing(8x6)", "Rescaling(1/127.5, offset -1)", "RandomRotation")
    assert found.scaling == ("Rescaling(1/127.5, offset -1)",)


def test_the_type_and_batch_of_an_input_are_its_own(tmp_path: Path) -> None:
    pixels = keras.Input(batch_shape=(4, 8, 8, 3), dtype="uint8", name="photo")
    file = written(keras.Model(pixels, layers.GlobalMaxPooling2D()(layers.Rescaling(0.5)(pixels))), tmp_path)
    assert describe(file).inputs == (Tensor("photo", (4, 8, 8, 3), "uint8"),)


def test_own_classes_and_python_code_are_named(tmp_path: Path) -> None:
    @keras.saving.register_keras_serializable("ours")
    class Doubled(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            return x * 2

    pixels = keras.Input((4, 4, 3))
    x = layers.Lambda(lambda x: x + 1, name="plus", output_shape=(4, 4, 3))(Doubled()(pixels))
    found = describe(written(keras.Model(pixels, layers.Dense(3, name="last")(x)), tmp_path))
    assert found.custom == ("Doubled",)
    assert found.has_code
    assert "Lambda plus of Python code that uses 1" in found.layers
    assert found.outputs == (Tensor("last", (None, 4, 4, 3), "float32", "linear"),)  # by what it was built for


def test_no_layer_of_keras_counts_as_custom_in_files_of_keras_2() -> None:
    abstract = {"Layer", "Wrapper", "InputSpec", "FlaxLayer", "JaxLayer", "TorchModuleWrapper"}
    known = {one.__name__ for one in vars(layers).values() if isinstance(one, type)} - abstract
    assert {name for name in known if keras_layers.is_custom({"class_name": name, "config": {}})} == set()


def old_file(file: Path, config: dict[str, Any] | None, version: str) -> Path:
    """Writes a file as Keras 2 did: of the weights only what counts."""
    with h5py.File(file, "w") as opened:
        opened.attrs["keras_version"] = version.encode()
        if config is not None:
            opened.attrs["model_config"] = json.dumps(config).encode()
        weights = opened.create_group("model_weights") if config is not None else opened
        weights.attrs["layer_names"] = [b"scores"]
        weights.create_dataset("scores/scores/kernel:0", data=np.zeros((12, 7)))
        if config is not None:
            opened.create_dataset("optimizer_weights/Adam/scores/kernel/m:0", data=np.zeros((12, 7)))
    return file


def test_a_file_of_keras_2_0_is_described(tmp_path: Path) -> None:
    flat = {"class_name": "Flatten", "name": "flat", "config": {"name": "flat"}, "inbound_nodes": [[["in", 0, 0, {}]]]}
    given = {"batch_input_shape": [None, 2, 2, 3], "dtype": "float32", "name": "in"}
    scores = {"name": "scores", "units": 7, "activation": "softmax"}
    config = {
        "class_name": "Model",
        "config": {
            "name": "old",
            "layers": [
                {"class_name": "InputLayer", "name": "in", "config": given, "inbound_nodes": []},
                flat,
                {
                    "class_name": "Dense",
                    "name": "scores",
                    "config": scores,
                    "inbound_nodes": [[["flat", 0, 0, {}]]],
                },
            ],
            "input_layers": [["in", 0, 0]],
            "output_layers": [["scores", 0, 0]],
        },
    }
    found = describe(old_file(tmp_path / "old.h5", config, "2.0.5"))
    assert found.inputs == (Tensor("in", (None, 2, 2, 3)),)
    assert found.outputs == (Tensor("scores", (None, 7), "float32", "softmax"),)
    assert (found.parameters, found.written_by, found.refusal) == (84, "Keras 2.0.5", "")


def test_the_input_of_a_sequential_model_of_keras_2_2_is_found() -> None:
    dense = {"name": "dense_2", "units": 3, "activation": "softmax", "batch_input_shape": [None, 5184]}
    found = described.network({"class_name": "Sequential", "config": [{"class_name": "Dense", "config": dense}]})
    assert found.inputs == (Tensor("dense_2_input", (None, 5184), "float32"),)
    assert found.outputs == (Tensor("dense_2", (None, 3), "float32", "softmax"),)


def test_weights_without_a_model_are_refused_with_what_they_need(tmp_path: Path) -> None:
    found = describe(old_file(tmp_path / "net.weights.h5", None, "2.1.5"))
    assert found.parameters == 84
    assert "architecture: my_package.my_module:build" in found.refusal


def test_arguments_of_an_unknown_form_leave_shapes_open() -> None:
    config = {
        "class_name": "Sequential",
        "config": {
            "layers": [
                {"class_name": "Conv2D", "config": {"name": "a", "batch_input_shape": [None, 8, 8, 3], "filters": 2}},
                {"class_name": "Dense", "config": {"name": "b", "units": 2, "activation": {"odd": 1}}},
            ]
        },
    }
    found = described.network(config)
    assert found.inputs == (Tensor("a_input", (None, 8, 8, 3)),)
    assert found.outputs == (Tensor("b", None),)
