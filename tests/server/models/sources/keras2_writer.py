"""Writes models with Keras 2, and how it answers, into the folder of its argument: a program for tests to run."""

from __future__ import annotations

import io
import json
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import tf_keras as keras

SIDE = 8
PIXELS = np.random.default_rng(0).integers(0, 256, (2, SIDE, SIDE, 3), np.uint8)
layers = keras.layers


def classifier(batch: int | None = None) -> Any:
    pixels = keras.Input(batch_shape=(batch, SIDE, SIDE, 3), name="photo")
    x = layers.Rescaling(1 / 255)(pixels)
    x = layers.RandomRotation(0.5)(x)  # changes nothing but in training
    x = layers.Conv2D(4, 3, activation="relu")(x)
    x = layers.BatchNormalization()(x)
    x = layers.Dropout(0.5)(x)
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(pixels, layers.Dense(3, activation="softmax", name="scores")(x))


def machine() -> Any:
    """A model in the form of Teachable Machine: models within a model, and depthwise convolutions with groups."""
    body = keras.Sequential(
        [
            keras.Sequential(
                [
                    layers.DepthwiseConv2D(3, input_shape=(SIDE, SIDE, 3)),
                    layers.ReLU(6.0),
                    layers.GlobalAveragePooling2D(),
                ]
            )
        ]
    )
    return keras.Sequential([body, keras.Sequential([layers.Dense(2, activation="softmax", input_shape=(3,))])])


def plain() -> Any:
    """A Sequential of layers that Keras 2.1 had."""
    return keras.Sequential(
        [layers.Conv2D(4, 3, input_shape=(SIDE, SIDE, 3), activation="relu"), layers.Flatten(), layers.Dense(3)]
    )


def as_of_2_1(model: Any) -> str:
    """Returns a Sequential's configuration as Keras 2.1 wrote it: a list of layers."""
    config = json.loads(model.to_json())
    own = ("name", "trainable", "batch_input_shape", "filters", "kernel_size", "units", "activation")
    written = [one for one in config["config"]["layers"] if one["class_name"] != "InputLayer"]
    for one in written:
        one["config"] = {name: value for name, value in one["config"].items() if name in own}
    return json.dumps({"class_name": "Sequential", "config": written, "keras_version": "2.1.5"})


def lambdas() -> Any:
    pixels = keras.Input((SIDE, SIDE, 3))
    x = layers.Lambda(lambda x: x * 2 - 1, name="centre")(pixels)
    return keras.Model(pixels, layers.GlobalAveragePooling2D()(x))


def as_of_2_14(weights: h5py.File) -> None:
    """Names groups as Keras 2.14 did."""
    weights.move("layers", "_layer_checkpoint_dependencies")


def as_on_windows(weights: h5py.File) -> None:
    """Names groups as Keras 2 did on Windows, by paths that make no groups within groups."""
    names: list[str] = []
    weights.visit(names.append)
    for name in sorted(names, key=len, reverse=True):  # layers before the model that they are in
        if name.startswith("layers/") and f"{name}/vars" in names:
            weights.move(name, name.replace("/", "\\"))
    del weights["layers"]


def written_as(file: Path, version: str, change: Callable[[h5py.File], None]) -> None:
    """Writes the weights of a `.keras` file, and its version, as another Keras did."""
    with zipfile.ZipFile(file) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
    contents["metadata.json"] = json.dumps({"keras_version": version}).encode()
    weights = io.BytesIO(contents["model.weights.h5"])
    with h5py.File(weights, "r+") as opened:
        change(opened)
    contents["model.weights.h5"] = weights.getvalue()
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in contents.items():
            archive.writestr(name, content)


def main(folder: Path) -> None:
    keras.utils.set_random_seed(0)
    written = {
        "whole.h5": classifier(),
        "old.keras": classifier(),
        "eight.keras": classifier(8),
        "windows.keras": machine(),
        "machine.h5": machine(),
        "lambdas.h5": lambdas(),
        "weights.h5": classifier(),
        "plain.h5": plain(),
        "plain_weights.h5": plain(),
    }
    answers: dict[str, Any] = {}
    for name, model in written.items():
        for variable in model.weights:  # as training leaves them: no mean is 0, no variance 1
            values = np.random.default_rng(len(answers)).uniform(0.1, 1.0, variable.shape)
            variable.assign(values.astype(np.float32))
        if "weights" in name:
            config = as_of_2_1(model) if "plain" in name else model.to_json()
            model.save_weights(folder / name)
            (folder / name).with_suffix(".json").write_text(config)
        else:
            model.save(folder / name)
        pixels = np.resize(PIXELS, (8, *PIXELS.shape[1:])) if name == "eight.keras" else PIXELS
        answers[name] = model(pixels.astype(np.float32), training=False).numpy()[:2]
    written_as(folder / "old.keras", "2.14.0", as_of_2_14)
    written_as(folder / "windows.keras", "2.15.0", as_on_windows)
    with h5py.File(folder / "plain.h5", "r+") as opened:
        opened.attrs.update({"model_config": as_of_2_1(written["plain.h5"]), "keras_version": "2.1.5"})
    np.savez(folder / "answers.npz", pixels=PIXELS, **answers)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
