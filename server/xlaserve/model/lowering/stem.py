"""Convolutions of a few channels, such as a network's first, as sums of shifted outer products.

XLA's CPU backend runs a convolution as a matrix product. Here that computes little for the copying that it needs
before, and its outputs are written to memory before they are used.
"""

from __future__ import annotations

from typing import Any, Final

import tensorflow as tf

from xlaserve.model.lowering.replacement import Replacement, WindowReplacement
from xlaserve.model.lowering.windows import Windows, total
from xlaserve.model.networks.keras_runtime import keras

MAX_TERMS: Final = 32
"""Terms of an output's sum; 3 x 3 x 3 are 27. At 7 x 7 x 3 the matrix product is faster."""
MAX_POINTWISE: Final = 16
"""The same for pointwise convolutions, for which nothing has to be copied."""


def replace(layer: Any) -> Replacement | None:
    """Replaces convolutions whose outputs are sums of few terms."""
    if type(layer) is not keras.layers.Conv2D or layer.groups > 1:
        return None
    positions = layer.kernel_size[0] * layer.kernel_size[1]
    most = MAX_TERMS if positions > 1 else MAX_POINTWISE
    return Stem(layer) if positions * layer.kernel.shape[2] <= most else None


class Stem(WindowReplacement):
    """A convolution of a few channels."""

    def compute(self, images: tf.Tensor, windows: Windows) -> tf.Tensor:
        """Convolves."""
        kernel = tf.convert_to_tensor(self.original.kernel)
        return total(
            shifted[..., channel : channel + 1] * kernel[row, column, channel]
            for row, column, shifted in windows.shifted(images)
            for channel in range(kernel.shape[2])
        )
