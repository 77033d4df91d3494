"""Strided pointwise convolutions as matrix products of the pixels that they read.

XLA makes a matrix product of a pointwise convolution, but calls its slower convolution where there are strides.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from xlaserve.model.lowering.replacement import Replacement, WindowReplacement
from xlaserve.model.lowering.windows import Windows
from xlaserve.model.networks.keras_runtime import keras


def replace(layer: Any) -> Replacement | None:
    """Replaces 1 x 1 convolutions with strides."""
    if type(layer) is not keras.layers.Conv2D or layer.groups > 1:
        return None
    return Pointwise(layer) if layer.kernel_size == (1, 1) and layer.strides != (1, 1) else None


class Pointwise(WindowReplacement):
    """A 1 x 1 convolution."""

    def compute(self, images: tf.Tensor, windows: Windows) -> tf.Tensor:
        """Convolves."""
        rows, columns = windows.strides
        return tf.nn.conv2d(images[:, ::rows, ::columns], tf.convert_to_tensor(self.original.kernel), 1, "VALID")
