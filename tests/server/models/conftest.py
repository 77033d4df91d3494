from __future__ import annotations

import warnings
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from tests.server.models.house import House


@pytest.fixture(scope="session")
def tiny_model() -> Callable[..., Any]:
    """Makes a Keras model of a few weights: `tiny_model(height, width, dtype=..., classes=...)`."""
    from xlaserve.models.networks.keras_runtime import keras

    def make(
        height: int | None = 6, width: int | None = 5, *, channels: int = 3, dtype: str = "float32", classes: int = 4
    ) -> Any:
        pixels = keras.Input((height, width, channels), dtype=dtype)
        x = keras.layers.Rescaling(1 / 255)(pixels)
        x = keras.layers.Conv2D(8, 3, activation="relu")(x)
        x = keras.layers.GlobalAveragePooling2D()(x)
        return keras.Model(pixels, keras.layers.Dense(classes)(x))

    return make


@pytest.fixture
def keras_file(tmp_path: Path) -> Callable[..., str]:
    """Saves a model, or with another ending its weights, and returns the file's path."""

    def save(model: Any, name: str = "flowers.keras") -> str:
        file = tmp_path / name
        with warnings.catch_warnings():
            # Where it saves them, Keras hands its variables to NumPy 2 in the way of NumPy 1.
            warnings.filterwarnings("ignore", "__array__ implementation doesn't accept a copy", DeprecationWarning)
            model.save_weights(file) if name.endswith(".weights.h5") else model.save(file)
        return str(file)

    return save


@pytest_asyncio.fixture
async def make_house() -> AsyncIterator[Callable[..., House]]:
    houses: list[House] = []

    def make(**settings: Any) -> House:
        houses.append(House(**settings))
        return houses[-1]

    yield make
    for house in houses:
        await house.close()


@pytest.fixture
def house(make_house: Callable[..., House]) -> House:
    return make_house()
