"""`builtin:digits`: a small convolutional network that reads one handwritten digit, white ink on black paper.

`scripts/train_digits.py` trains it; the weights in `data/digits.npz` are what it wrote.
"""

from __future__ import annotations

from importlib import resources
from typing import Any, Final

import numpy as np

from xlaserve.models.networks.keras_runtime import keras

SIDE: Final = 32
LABELS: Final = tuple(str(digit) for digit in range(10))
WEIGHTS: Final = "digits.npz"


def build() -> Any:
    """Returns the untrained Keras model: RGB `[n, 32, 32, 3]` from 0 to 255 in, probabilities `[n, 10]` out."""
    pixels = keras.Input((SIDE, SIDE, 3), name="pixels")
    x = keras.ops.mean(pixels, axis=-1, keepdims=True) / 255
    for index, (filters, size) in enumerate(((16, 5), (32, 3), (48, 3)), start=1):
        x = keras.layers.Conv2D(filters, size, strides=2, padding="same", activation="relu", name=f"conv{index}")(x)
    x = keras.layers.Flatten(name="flat")(x)
    x = keras.layers.Dropout(0.4, name="drop")(x)
    return keras.Model(pixels, keras.layers.Dense(len(LABELS), activation="softmax", name="scores")(x), name="digits")


def load() -> Any:
    """Returns the trained Keras model."""
    return trained(build(), WEIGHTS)


def trained(model: Any, weights: str) -> Any:
    """Gives a model of the same variables the weights in `data/<weights>`, and returns it."""
    with (resources.files("xlaserve.models.sources") / "data" / weights).open("rb") as file, np.load(file) as arrays:
        model.set_weights([arrays[variable.path] for variable in model.weights])
    return model
