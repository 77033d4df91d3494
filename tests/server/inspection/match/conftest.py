from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from xlaserve.models.fast_decoding import photograph

SIDE = 24
SIZES = ((40, 60), (60, 40), (24, 24), (50, 50), (90, 30), (25, 26))


@pytest.fixture(scope="session")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Photographs of several sizes and shapes, as JPEG and PNG."""
    folder = tmp_path_factory.mktemp("photos")
    for number, (height, width) in enumerate(SIZES):
        photo = photograph(height, width, number).convert("RGB")
        # Sides are reddish or bluish, so that the order of the channels matters.
        red, green, blue = photo.split()
        tinted = Image.merge("RGB", (Image.eval(red, lambda level: level // 2), green, blue)) if number % 2 else photo
        tinted.save(folder / f"{number}.{'png' if number % 3 else 'jpg'}")
    return folder


@pytest.fixture(scope="session")
def networks(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Saves a Keras model of random weights: `networks(channels=3, classes=5, activation="softmax")`."""
    from xlaserve.models.networks.keras_runtime import keras

    folder = tmp_path_factory.mktemp("networks")

    def make(channels: int = 3, classes: int = 5, activation: str | None = "softmax") -> Path:
        path = folder / f"{channels}-{classes}-{activation}.keras"
        if not path.exists():
            keras.utils.set_random_seed(1)
            pixels = keras.Input((SIDE, SIDE, channels))
            x = keras.layers.Conv2D(6, 3, strides=2, activation="tanh")(pixels)
            x = keras.layers.Conv2D(8, 3, strides=2, activation="tanh")(x)
            outputs = keras.layers.Dense(classes, activation=activation)(keras.layers.Flatten()(x))
            with warnings.catch_warnings():
                # Where it saves them, Keras hands its variables to NumPy 2 in the way of NumPy 1.
                warnings.filterwarnings("ignore", "__array__ implementation doesn't accept", DeprecationWarning)
                keras.Model(pixels, outputs).save(path)
        return path

    return make
