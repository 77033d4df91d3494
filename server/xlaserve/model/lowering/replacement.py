"""A layer in another layer's place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from xlaserve.model.lowering.windows import Windows
from xlaserve.model.networks.keras_runtime import keras

Replace = Callable[[Any], "Replacement | None"]
"""From a Keras layer to what computes the same, or None where it has to stay."""


class Replacement(keras.layers.Layer):  # type: ignore[misc]
    """Computes what `original` computes in another way. Shares its variables; may hold what is derived from them."""

    def __init__(self, original: Any) -> None:
        super().__init__(name=original.name, dtype=original.dtype_policy)
        self.original = original
        self.built = True

    def compute_output_shape(self, input_shape: Any) -> Any:
        """Returns the shape of the original's output."""
        return self.original.compute_output_shape(input_shape)


class WindowReplacement(Replacement):
    """Computes a convolution or pooling in channels-last order."""

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        """Computes `inputs` in the layer's own data format."""
        layer = self.original
        is_channels_first = layer.data_format == "channels_first"
        images = tf.transpose(inputs, [0, 2, 3, 1]) if is_channels_first else inputs
        height, width = images.shape[1:3]
        if height is None or width is None:
            return layer(inputs)
        shape = getattr(layer, "kernel_size", None) or layer.pool_size
        dilations = getattr(layer, "dilation_rate", (1, 1))
        outputs = self.compute(images, Windows((height, width), shape, layer.strides, dilations, layer.padding))
        if getattr(layer, "use_bias", False):
            outputs += tf.convert_to_tensor(layer.bias)
        if is_channels_first:
            outputs = tf.transpose(outputs, [0, 3, 1, 2])
        activation = getattr(layer, "activation", None)
        return outputs if activation is None else activation(outputs)

    def compute(self, images: tf.Tensor, windows: Windows) -> tf.Tensor:
        """Returns what comes of `images`, all of it channels last, before bias and activation."""
        raise NotImplementedError
