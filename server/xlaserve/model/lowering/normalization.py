"""Batch normalization with its scale and offset computed ahead, and layer normalization of what was computed once.

At inference batch normalization multiplies and adds, by factors that come from its statistics. XLA would compute these
again in the loop over the pixels, with a square root for each. Layer normalization reads its input three times, for the
mean, the variance and the result, and XLA would compute that input, such as a depthwise convolution, three times.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from xlaserve.model.lowering.materialize import Once
from xlaserve.model.lowering.replacement import Replacement
from xlaserve.model.networks.keras_runtime import keras


def replace(layer: Any) -> Replacement | None:
    """Replaces batch and layer normalization."""
    kind = type(layer)
    if kind is keras.layers.BatchNormalization:
        return BatchNormalization(layer)
    return LayerNormalization(layer) if kind is keras.layers.LayerNormalization else None


class BatchNormalization(Replacement):
    """Batch normalization as it is at inference, with the statistics it had when it was replaced."""

    def __init__(self, original: Any) -> None:
        super().__init__(original)
        deviation = np.sqrt(_values(original.moving_variance) + original.epsilon)
        scale = (_values(original.gamma) if original.scale else 1.0) / deviation
        offset = (_values(original.beta) if original.center else 0.0) - _values(original.moving_mean) * scale
        self.scale = scale.astype(np.float32)
        self.offset = offset.astype(np.float32)

    def call(self, inputs: tf.Tensor, training: bool = False, mask: Any = None) -> tf.Tensor:
        """Normalizes `inputs` in float32, as Keras does, in any precision. The other arguments matter in training."""
        axis = self.original.axis
        shape = [-1 if side == axis % len(inputs.shape) else 1 for side in range(len(inputs.shape))]
        scale, offset = np.reshape(self.scale, shape), np.reshape(self.offset, shape)
        return tf.cast(tf.cast(inputs, tf.float32) * scale + offset, self.compute_dtype)


class LayerNormalization(Replacement):
    """Layer normalization."""

    def __init__(self, original: Any) -> None:
        super().__init__(original)
        self.once = Once()

    def call(self, inputs: tf.Tensor, mask: Any = None) -> tf.Tensor:
        """Normalizes `inputs`; the mask matters to other layers alone."""
        return self.original(self.once(inputs))


def _values(variable: Any) -> np.ndarray:
    return np.asarray(tf.convert_to_tensor(variable), np.float64)
