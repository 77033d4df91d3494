"""Depthwise convolutions as sums of shifted products.

XLA's CPU backend has no fast kernel for them. Written as one slice of the padded images for each position of the
kernel, times that position's weight of each channel, it fuses the sum, the bias and the activation into one loop over
the output, vectorized over the channels.
"""

from __future__ import annotations

from typing import Final

import tensorflow as tf

from xlaserve.models.lowering import slices
from xlaserve.models.lowering.operations import DEPTHWISE, convolution, readers
from xlaserve.models.lowering.replay import Node
from xlaserve.models.lowering.windows import Windows, total

VECTOR: Final = 16
"""Channels that a processor's widest vectors hold, of 512 bits."""
MAX_FILLED: Final = 128
"""Channels that are filled up. With more, the remainder costs less than the zeros in the matrix product."""
FLOAT_BYTES: Final = 4
MAX_KERNEL_BYTES: Final = 24 * 1024
"""Bytes of the weights that are read for every pixel: they and those pixels have to stay in a first-level cache."""
MIN_SLICED: Final = 49
"""Positions of the kernel from which a loop over slices of the channels is faster."""


def substitute(node: Node) -> tf.Tensor | None:
    """Replaces depthwise convolutions, and those with a group for each channel."""
    if (separable := _separable(node)) is not None:
        return separable
    found = convolution(node)
    if found is None or not found.is_depthwise or _is_filled(node):
        return None
    kernel, windows = found.kernel.tensor, found.windows
    return found.computed(lambda images: shifted_products(images, kernel, windows))


def _separable(node: Node) -> tf.Tensor | None:
    """Replaces a pointwise convolution and the depthwise one before it, few channels of which are filled up.

    Zeros make them a whole number of vectors: a remainder would be computed one by one.
    """
    before = node.inputs[0].node if node.kind == "Conv2D" else None
    found = convolution(before) if before is not None and _is_filled(before) else None
    if found is None:
        return None
    depthwise, pointwise = found.kernel.known, node.inputs[1].known
    if depthwise is None or pointwise is None:
        depthwise, pointwise, more = found.kernel.tensor, node.inputs[1].tensor, 0
    else:
        more = -found.channels % VECTOR
        with tf.init_scope():  # now, and not in the program
            depthwise = tf.pad(depthwise, [[0, 0], [0, 0], [0, more], [0, 0]])
            pointwise = tf.pad(pointwise, [[0, 0], [0, 0], [0, more * depthwise.shape[3]], [0, 0]])
    images = tf.pad(found.images.tensor, [[0, 0], [0, 0], [0, 0], [0, more]])
    return tf.nn.conv2d(shifted_products(images, depthwise, found.windows), pointwise, 1, "VALID")


def _is_filled(node: Node) -> bool:
    """Returns whether the convolution that ends in `node` is computed with the pointwise one after it, filled up."""
    found = convolution(node)
    after = readers(node.operation)
    if found is None or found.node.kind != DEPTHWISE or len(after) != 1 or after[0].type != "Conv2D":
        return False
    (reader,) = after
    outputs, kernel = node.operation.outputs[0], reader.inputs[1].shape
    return (
        found.channels <= MAX_FILLED
        and found.channels % VECTOR != 0
        and reader.inputs[0] is outputs
        and kernel[:3] == (1, 1, outputs.shape[-1])
        and set(reader.get_attr("strides")) == {1}
        and {reader.get_attr("data_format"), found.node.attribute("data_format")} == {b"NHWC"}
        and reader.get_attr("padding") != b"EXPLICIT"
    )


def shifted_products(images: tf.Tensor, kernel: tf.Tensor, windows: Windows) -> tf.Tensor:
    """Returns the depthwise convolution of `images` `[n, height, width, channels]`.

    `kernel` is `[rows, columns, a, b]`, where `a * b` is the number of outputs: each channel gives as many, side by
    side.
    """
    rows, columns, a, b = kernel.shape
    channels = images.shape[-1]
    kernel = tf.reshape(kernel, [rows, columns, a * b])
    if a * b != channels:
        images = tf.repeat(images, a * b // channels, axis=-1)
    padded = windows.padded(images)
    size = _slice_size(rows * columns, a * b)
    if size == a * b:
        return _sum(padded, kernel, windows)

    def compute(start: tf.Tensor) -> tf.Tensor:
        return _sum(slices.channels(padded, start, size), slices.channels(kernel, start, size), windows)

    return slices.in_turn(compute, padded, (*windows.output, a * b), size)


def _sum(padded: tf.Tensor, kernel: tf.Tensor, windows: Windows) -> tf.Tensor:
    return total(shifted * kernel[row, column] for row, column, shifted in windows.shifted_over(padded))


def _slice_size(positions: int, channels: int) -> int:
    """Returns how many channels to sum in one loop: all, or whole vectors, in slices as even as may be."""
    most = max(VECTOR, MAX_KERNEL_BYTES // (positions * FLOAT_BYTES * VECTOR) * VECTOR)
    if positions < MIN_SLICED or channels <= most:
        return channels
    count = -(-channels // most)
    return -(-channels // (count * VECTOR)) * VECTOR
