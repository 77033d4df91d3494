"""A layer in another layer's place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from xlaserve.model.keras_runtime import keras

Replace = Callable[[Any], "Replacement | None"]
"""From a Keras layer to what computes the same, or None where it has to stay."""


class Replacement(keras.layers.Layer):  # type: ignore[misc]
    """Computes what `original` computes, in another way, from the same variables."""

    def __init__(self, original: Any) -> None:
        super().__init__(name=original.name, dtype=original.dtype_policy)
        self.original = original
        self.built = True

    def compute_output_shape(self, input_shape: Any) -> Any:
        """Returns the shape of the original's output."""
        return self.original.compute_output_shape(input_shape)

    def add_bias_and_activate(self, outputs: tf.Tensor) -> tf.Tensor:
        """Ends a convolution in channels-last order as its layer wants it."""
        layer = self.original
        if layer.use_bias:
            outputs += tf.convert_to_tensor(layer.bias)
        if layer.data_format == "channels_first":
            outputs = tf.transpose(outputs, [0, 3, 1, 2])
        return outputs if layer.activation is None else layer.activation(outputs)


def channels_last(inputs: tf.Tensor, layer: Any) -> tf.Tensor:
    """Returns the images that `layer` takes as `[n, height, width, channels]`."""
    return tf.transpose(inputs, [0, 2, 3, 1]) if layer.data_format == "channels_first" else inputs
