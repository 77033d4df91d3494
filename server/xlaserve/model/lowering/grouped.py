"""Convolutions with groups of channels, which XLA computes group after group.

For narrow groups a sum over their channels is faster, which XLA vectorizes over all outputs. For wider ones it is
faster to compute several groups as one, with zeros for the weights between them.
"""

from __future__ import annotations

from typing import Any, Final

import tensorflow as tf

from xlaserve.model.lowering import slices
from xlaserve.model.lowering.replacement import Replacement, WindowReplacement
from xlaserve.model.lowering.windows import Windows, total
from xlaserve.model.networks.keras_runtime import keras

MAX_TERMS: Final = 36
"""Terms of a sum: four channels of a 3 x 3 kernel."""
BLOCK: Final = 32
"""Channels that make a convolution worth a call."""


def replace(layer: Any) -> Replacement | None:
    """Replaces convolutions with groups of several channels, of at most half a block."""
    if not has_groups(layer) or (width := layer.kernel.shape[2]) == 1:
        return None
    rows, columns = layer.kernel_size
    if rows * columns * width <= MAX_TERMS:
        return Sums(layer)
    return Blocks(layer) if 2 * width <= BLOCK and _groups_a_block(layer.groups, width) > 1 else None


def has_groups(layer: Any) -> bool:
    """Returns whether `layer` is a convolution whose outputs each read only some of the channels."""
    return type(layer) is keras.layers.Conv2D and layer.groups > 1


class Sums(WindowReplacement):
    """A sum over the kernel's positions and a group's channels, of one of each group's channels at a time."""

    def compute(self, images: tf.Tensor, windows: Windows) -> tf.Tensor:
        """Convolves."""
        kernel = tf.convert_to_tensor(self.original.kernel)
        width, filters = kernel.shape[2:]
        inputs = (
            tf.repeat(images[..., channel::width], filters // self.original.groups, axis=-1) for channel in range(width)
        )
        return total(
            shifted * kernel[row, column, channel]
            for channel, values in enumerate(inputs)
            for row, column, shifted in windows.shifted(values)
        )


class Blocks(WindowReplacement):
    """A convolution of several groups as one, block after block."""

    def compute(self, images: tf.Tensor, windows: Windows) -> tf.Tensor:
        """Convolves."""
        layer = self.original
        kernel = tf.convert_to_tensor(layer.kernel)
        rows, columns, width, filters = kernel.shape
        together = _groups_a_block(layer.groups, width)
        blocks = layer.groups // together
        apart = tf.reshape(kernel, [rows, columns, 1, width, blocks, together, filters // layer.groups])
        own = tf.reshape(tf.eye(together, dtype=kernel.dtype), [together, 1, 1, together, 1])
        kernels = tf.reshape(apart * own, [rows, columns, together * width, filters])
        inputs, outputs = images.shape[-1] // blocks, filters // blocks

        def compute(start: tf.Tensor) -> tf.Tensor:
            block = slices.channels(images, start // outputs * inputs, inputs)
            weights = slices.channels(kernels, start, outputs)
            return tf.nn.conv2d(block, weights, layer.strides, layer.padding.upper(), dilations=layer.dilation_rate)

        return slices.in_turn(compute, images, (*windows.output, filters), outputs)


def _groups_a_block(groups: int, width: int) -> int:
    return max(
        count for count in range(1, groups + 1) if groups % count == 0 and (count == 1 or count * width <= BLOCK)
    )
