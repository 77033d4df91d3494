"""Pooling as the largest, or the sum, of shifted images, which XLA fuses into one vectorized loop."""

from __future__ import annotations

from functools import reduce
from typing import Any, Final

import tensorflow as tf

from xlaserve.model.keras_runtime import keras
from xlaserve.model.lowering.replacement import Replacement, WindowReplacement
from xlaserve.model.lowering.windows import Windows

MOST_POSITIONS: Final = 25
"""Positions in a window; larger ones, such as global pooling, stay what they are."""


def replace(layer: Any) -> Replacement | None:
    """Replaces maximum and average pooling over small windows."""
    kind = type(layer)
    if kind not in (keras.layers.MaxPooling2D, keras.layers.AveragePooling2D):
        return None
    if layer.pool_size[0] * layer.pool_size[1] > MOST_POSITIONS:
        return None
    return Maximum(layer) if kind is keras.layers.MaxPooling2D else Average(layer)


class Maximum(WindowReplacement):
    """Maximum pooling."""

    def compute(self, images: tf.Tensor, windows: Windows) -> tf.Tensor:
        """Pools."""
        return reduce(tf.maximum, (shifted for _, _, shifted in windows.shifted(images, fill=images.dtype.min)))


class Average(WindowReplacement):
    """Average pooling over the pixels that are there."""

    def compute(self, images: tf.Tensor, windows: Windows) -> tf.Tensor:
        """Pools."""
        total = reduce(tf.add, (shifted for _, _, shifted in windows.shifted(images)))
        with tf.init_scope():  # now, and not in the program
            ones = tf.ones((1, *windows.size, 1))
            counts = reduce(tf.add, (shifted for _, _, shifted in windows.shifted(ones))).numpy()
        return total * tf.constant(1 / counts, images.dtype)
