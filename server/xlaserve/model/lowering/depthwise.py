"""Depthwise convolutions as sums of shifted products.

XLA's CPU backend has no fast kernel for them. Written as one slice of the padded images for each position of the
kernel, times that position's weight of each channel, it fuses the sum, the bias and the activation into one loop over
the output, vectorized over the channels.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, Final

import tensorflow as tf

from xlaserve.model.lowering import slices
from xlaserve.model.lowering.grouped import has_groups
from xlaserve.model.lowering.replacement import Replacement, WindowReplacement
from xlaserve.model.lowering.windows import Windows, total
from xlaserve.model.networks.keras_runtime import keras

VECTOR: Final = 16
"""Channels that a processor's widest vectors hold, of 512 bits."""
MAX_FILLED: Final = 128
"""Channels that are filled up. With more, the remainder costs less than the zeros in the matrix product."""
FLOAT_BYTES: Final = 4
MAX_KERNEL_BYTES: Final = 24 * 1024
"""Bytes of the weights that are read for every pixel: they and those pixels have to stay in a first-level cache."""
MIN_SLICED: Final = 49
"""Positions of the kernel from which a loop over slices of the channels is faster."""


def replace(layer: Any) -> Replacement | None:
    """Replaces depthwise and separable convolutions, and those with a group for each channel."""
    kind = type(layer)  # a subclass may compute anything
    if kind is keras.layers.DepthwiseConv2D or (has_groups(layer) and layer.kernel.shape[2] == 1):
        return Depthwise(layer)
    if kind is keras.layers.SeparableConv2D:
        return Separable(layer)
    return None


class Depthwise(WindowReplacement):
    """A depthwise convolution."""

    def compute(self, images: tf.Tensor, windows: Windows) -> tf.Tensor:
        """Convolves."""
        return shifted_products(images, tf.convert_to_tensor(self.original.kernel), windows)


class Separable(WindowReplacement):
    """A depthwise convolution and a pointwise one after it, with the kernels that they had when first traced.

    Few channels are filled up with zeros to a whole number of vectors: a remainder would be computed one by one.
    """

    @cached_property
    def kernels(self) -> tuple[tf.Tensor, tf.Tensor]:
        """The depthwise kernel `[rows, columns, channels, a]` and the pointwise `[1, 1, channels * a, filters]`."""
        with tf.init_scope():  # tensors of no graph: arrays would be part of each bucket's program
            depthwise = tf.convert_to_tensor(self.original.depthwise_kernel)
            pointwise = tf.convert_to_tensor(self.original.pointwise_kernel)
            channels, multiplier = depthwise.shape[2:]
            more = -channels % VECTOR if channels <= MAX_FILLED else 0
            return (
                tf.pad(depthwise, [[0, 0], [0, 0], [0, more], [0, 0]]),
                tf.pad(pointwise, [[0, 0], [0, 0], [0, more * multiplier], [0, 0]]),
            )

    def compute(self, images: tf.Tensor, windows: Windows) -> tf.Tensor:
        """Convolves."""
        depthwise, pointwise = self.kernels
        images = tf.pad(images, [[0, 0], [0, 0], [0, 0], [0, depthwise.shape[2] - images.shape[3]]])
        return tf.nn.conv2d(shifted_products(images, depthwise, windows), pointwise, 1, "VALID")


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
