"""Pooling as the largest, or the sum, of shifted images, which XLA fuses into one vectorized loop."""

from __future__ import annotations

from functools import reduce
from typing import Any, Final

import tensorflow as tf

from xlaserve.model.lowering.materialize import materialized
from xlaserve.model.lowering.replacement import Replacement, WindowReplacement
from xlaserve.model.lowering.windows import Windows, total
from xlaserve.model.networks.keras_runtime import keras

MAX_POSITIONS: Final = 25
"""Positions in a window; larger windows are not replaced."""
MAX_SLICES: Final = 16
"""Slices of the pixels in one of global pooling's sums: more are slower to compile, and no faster."""


def replace(layer: Any) -> Replacement | None:
    """Replaces maximum and average pooling over small windows, and average pooling over all pixels."""
    kind = type(layer)
    if kind is keras.layers.GlobalAveragePooling2D and layer.data_format == "channels_last":
        return GlobalAverage(layer)
    if kind not in (keras.layers.MaxPooling2D, keras.layers.AveragePooling2D):
        return None
    if layer.pool_size[0] * layer.pool_size[1] > MAX_POSITIONS:
        return None
    return Maximum(layer) if kind is keras.layers.MaxPooling2D else Average(layer)


class Maximum(WindowReplacement):
    """Maximum pooling."""

    def compute(self, images: tf.Tensor, windows: Windows) -> tf.Tensor:
        """Returns the largest value of each window."""
        return reduce(tf.maximum, (shifted for _, _, shifted in windows.shifted(images, fill=images.dtype.min)))


class Average(WindowReplacement):
    """Average pooling over the pixels that are there."""

    def compute(self, images: tf.Tensor, windows: Windows) -> tf.Tensor:
        """Returns the mean of the pixels that lie in each window."""
        sums = total(shifted for _, _, shifted in windows.shifted(images))
        with tf.init_scope():  # now, and not in the program
            ones = tf.ones((1, *windows.size, 1))
            counts = total(shifted for _, _, shifted in windows.shifted(ones)).numpy()
        return sums * tf.constant(1 / counts, images.dtype)


class GlobalAverage(Replacement):
    """Average pooling over all pixels, as sums of slices: in XLA's own reductions, no activation is vectorized."""

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        """Returns the mean of each channel of `inputs` `[n, height, width, channels]`."""
        _, height, width, channels = inputs.shape
        if height is None or width is None:
            return self.original(inputs)
        # In float32, as Keras does: thousands of pixels are more than half precision can add.
        totals = tf.reshape(tf.cast(inputs, tf.float32), [-1, height * width, channels])
        while (left := totals.shape[1]) > 1:
            totals = materialized(totals)
            parts = next((parts for parts in range(MAX_SLICES, 1, -1) if left % parts == 0), None)
            if parts is None:
                totals = tf.reduce_sum(totals, axis=1, keepdims=True)
            else:
                totals = total(tf.split(totals, parts, axis=1))
        average = tf.cast(totals / (height * width), self.compute_dtype)
        return tf.reshape(average, [-1, 1, 1, channels]) if self.original.keepdims else average[:, 0]
