"""Convolutions with groups of channels, which XLA computes group after group.

For narrow groups a sum over their channels is faster, which XLA vectorizes over all outputs. For wider ones it is
faster to compute several groups as one, with zeros for the weights between them.
"""

from __future__ import annotations

from typing import Any, Final

import tensorflow as tf

from xlaserve.models.lowering import slices, small
from xlaserve.models.lowering.operations import convolution, with_padding
from xlaserve.models.lowering.replay import Node
from xlaserve.models.lowering.windows import Windows, total

MAX_TERMS: Final = 36
"""Terms of a sum: four channels of a 3 x 3 kernel."""
BLOCK: Final = 32
"""Channels that make a convolution worth a call."""


def substitute(node: Node) -> tf.Tensor | None:
    """Replaces convolutions with groups of several channels, of at most half a block."""
    found = convolution(node)
    if found is None or found.is_depthwise or found.groups == 1:
        return None
    if small.is_turned((padded := with_padding(found)).windows):
        found = padded
    kernel, windows, groups = found.kernel.tensor, found.windows, found.groups
    rows, columns, width, _ = found.shape
    if rows * columns * width <= MAX_TERMS:
        return found.computed(lambda images: _sums(images, kernel, windows, groups))
    together = _groups_a_block(groups, width)
    if 2 * width > BLOCK or together == 1:
        return None
    return found.computed(lambda images: _blocks(images, kernel, windows, groups // together, together))


def _sums(images: tf.Tensor, kernel: tf.Tensor, windows: Windows, groups: int) -> tf.Tensor:
    """Sums over the kernel's positions and a group's channels, of one of each group's channels at a time."""
    width, filters = kernel.shape[2:]
    inputs = (tf.repeat(images[..., channel::width], filters // groups, axis=-1) for channel in range(width))
    return total(
        shifted * kernel[row, column, channel]
        for channel, values in enumerate(inputs)
        for row, column, shifted in windows.shifted(values)
    )


def _blocks(images: tf.Tensor, kernel: tf.Tensor, windows: Windows, blocks: int, together: int) -> tf.Tensor:
    """Convolves several groups as one, block after block."""
    rows, columns, width, filters = kernel.shape
    apart = tf.reshape(kernel, [rows, columns, 1, width, blocks, together, filters // (blocks * together)])
    own = tf.reshape(tf.eye(together, dtype=kernel.dtype), [together, 1, 1, together, 1])
    kernels = tf.reshape(apart * own, [rows, columns, together * width, filters])
    inputs, outputs = images.shape[-1] // blocks, filters // blocks
    padding: Any = windows.padding
    if small.is_turned(windows):
        images, padding = windows.padded(images), "VALID"

    def compute(start: tf.Tensor) -> tf.Tensor:
        block = slices.channels(images, start // outputs * inputs, inputs)
        weights = slices.channels(kernels, start, outputs)
        return tf.nn.conv2d(block, weights, windows.strides, padding, dilations=windows.dilations)

    return slices.in_turn(compute, images, (*windows.output, filters), outputs)


def _groups_a_block(groups: int, width: int) -> int:
    return max(
        count for count in range(1, groups + 1) if groups % count == 0 and (count == 1 or count * width <= BLOCK)
    )
