"""Initial weights: the same every time, and not all answers alike."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import tensorflow as tf

from xlaserve.models.networks.keras_runtime import keras

RANDOM_SEED: Final = 1

_seeds: Any = keras.src.random.seed_generator
_seeding = threading.Lock()


@contextmanager
def seeded() -> Iterator[None]:
    """Makes initial weights the same every time.

    Keras draws the seeds of its initializers from Python's generator, and so do other threads, for the ids of requests:
    Keras has one of its own meanwhile.
    """
    with _seeding:
        pythons, _seeds.python_random = _seeds.python_random, random.Random(RANDOM_SEED)
        try:
            yield
        finally:
            _seeds.python_random = pythons


def settle(model: Any, size: tuple[int, int], call: Callable[[tf.Tensor], object]) -> None:
    """Gives batch normalization the statistics of four random images, from a coarse one to a noise of pixels.

    As Keras builds it, it normalizes nothing, and the signal dies out on its way through a deep network: every image
    would get the same answer. With the statistics of smooth images only, noise would grow from layer to layer, and
    rounding with it. `call` runs the model on pixels from 0 to 255 as in training.
    """
    normalizations = [layer for layer in model._flatten_layers() if isinstance(layer, keras.layers.BatchNormalization)]
    if not normalizations:
        return
    for layer in normalizations:
        layer.momentum = 0.0
    noise = np.random.default_rng(RANDOM_SEED)
    grids = ((8, 8), (32, 32), (128, 128), size)
    images = [tf.image.resize(noise.uniform(0, 255, (1, *grid, 3)), size) for grid in grids]
    call(tf.concat(images, axis=0))
