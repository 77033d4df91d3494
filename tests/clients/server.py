"""The server that clients are run against."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from tests.clients import locked
from tests.clients.registry import Target
from tests.integration.conftest import DIGITS, Server

MODELS: Final = [
    {**DIGITS, "modes": ["graph"]},
    {**DIGITS, "name": "digits-images", "modes": ["graph"], "metadata_input": "image"},
    {**DIGITS, "name": "digits-named", "modes": ["graph"], "input_name": "input_1", "output_name": "probs"},
]


def _change(folder: Path) -> dict[str, Any]:
    """Writes a model of several inputs: the weighted differences of two images, `[n, 3]`, and returns its settings."""
    from xlaserve.models.networks.keras_runtime import keras

    layers = keras.layers
    before, after = (keras.Input((32, 32, 3), name=name) for name in ("before", "after"))
    weight = keras.Input((1,), name="weight")
    means = [layers.GlobalAveragePooling2D()(one) for one in (after, before)]
    change = layers.Multiply(name="change")([layers.Subtract()(means), weight])
    file = folder / "change.keras"
    keras.Model([before, after, weight], change).save(file)
    settings = {"task": "tensors", "preprocess": "none", "buckets": [1, 4], "modes": ["graph"]}
    return {"name": "change", "source": str(file), **settings}


@contextmanager
def running(folder: Path) -> Iterator[Target]:
    """Yields a server that is ready."""
    server = Server({"models": [*MODELS, _change(folder)], "shared_memory": True}, folder)
    try:
        with locked.running(folder / "locked") as needed:
            server.wait_until_ready()
            yield Target(server.grpc, server.http, needed)
    finally:
        server.stop()
