"""Depthwise convolutions as sums of shifted products.

XLA's CPU backend has no fast kernel for them. Written as one slice of the padded images for each position of the
kernel, times that position's weight of each channel, it fuses the sum, the bias and the activation into one loop over
the output, vectorized over the channels.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import tensorflow as tf

from xlaserve.model.keras_runtime import keras
from xlaserve.model.lowering.replacement import Replacement, channels_last


def replace(layer: Any) -> Replacement | None:
    """Replaces depthwise and separable convolutions, and those with a group for each channel."""
    kind = type(layer)  # a subclass may compute anything
    if kind is keras.layers.DepthwiseConv2D or (kind is keras.layers.Conv2D and _is_depthwise(layer)):
        return Depthwise(layer)
    if kind is keras.layers.SeparableConv2D:
        return Separable(layer)
    return None


class Depthwise(Replacement):
    """A depthwise convolution."""

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        """Convolves `inputs` in the layer's own data format."""
        layer = self.original
        kernel = tf.convert_to_tensor(layer.kernel)
        *sides, a, b = kernel.shape
        outputs = shifted_products(
            channels_last(inputs, layer),
            tf.reshape(kernel, [*sides, a * b]),
            layer.strides,
            layer.dilation_rate,
            layer.padding,
        )
        return self.add_bias_and_activate(outputs)


class Separable(Replacement):
    """A depthwise convolution and a pointwise one after it."""

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        """Convolves `inputs` in the layer's own data format."""
        layer = self.original
        kernel = tf.convert_to_tensor(layer.depthwise_kernel)
        *sides, channels, multiplier = kernel.shape
        outputs = shifted_products(
            channels_last(inputs, layer),
            tf.reshape(kernel, [*sides, channels * multiplier]),
            layer.strides,
            layer.dilation_rate,
            layer.padding,
        )
        return self.add_bias_and_activate(
            tf.nn.conv2d(outputs, tf.convert_to_tensor(layer.pointwise_kernel), 1, "VALID")
        )


def shifted_products(
    images: tf.Tensor,
    kernel: tf.Tensor,
    strides: tuple[int, int],
    dilations: tuple[int, int],
    padding: str,
) -> tf.Tensor:
    """Returns the depthwise convolution of `images` `[n, height, width, channels]`, `same` or `valid` as Keras pads.

    `kernel` is `[rows, columns, channels * multiplier]`: each channel gives `multiplier` outputs, side by side.
    """
    rows, columns, outputs = kernel.shape
    height, width, channels = images.shape[1:]
    (above, below, high), (left, right, wide) = (
        _pad(size, 1 + (positions - 1) * dilation, stride, padding)
        for size, positions, dilation, stride in zip((height, width), (rows, columns), dilations, strides, strict=True)
    )
    padded = tf.pad(images, [[0, 0], [above, below], [left, right], [0, 0]])
    if outputs != channels:
        padded = tf.repeat(padded, outputs // channels, axis=-1)
    total = None
    for row, column in product(range(rows), range(columns)):
        top, start = row * dilations[0], column * dilations[1]
        bottom, end = top + (high - 1) * strides[0] + 1, start + (wide - 1) * strides[1] + 1
        shifted = padded[:, top : bottom : strides[0], start : end : strides[1]] * kernel[row, column]
        total = shifted if total is None else total + shifted
    return total


def _pad(size: int, extent: int, stride: int, padding: str) -> tuple[int, int, int]:
    """Returns the pixels to add before and after, and the size of the output, along a side."""
    if padding == "valid":
        return 0, 0, (size - extent) // stride + 1
    output = -(-size // stride)
    total = max(0, (output - 1) * stride + extent - size)
    return total // 2, total - total // 2, output


def _is_depthwise(layer: Any) -> bool:
    return bool(layer.groups > 1 and layer.kernel.shape[2] == 1)
