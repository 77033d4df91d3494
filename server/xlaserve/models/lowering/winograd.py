"""3 x 3 convolutions by Winograd's minimal filtering along the rows of images, 18 products in the place of 36.

F(4, 3) of Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks" (CVPR 2016), in one dimension: six pixels
of a row and the kernel's rows are transformed, convolved down the columns as they are, and transformed back to four
outputs. In two dimensions the transforms read and write more than the products saved are worth, and its sixteen parts
are more than XLA runs in one thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import tensorflow as tf

from xlaserve.models.lowering.operations import convolution
from xlaserve.models.lowering.replay import Node
from xlaserve.models.lowering.windows import Windows

MIN_CHANNELS: Final = 32
"""With fewer channels in, the transforms cost more than is saved."""
MIN_FILTERS: Final = 32
"""With fewer channels out, too, where images are large: transforms that no cache holds wait for memory."""
MIN_WIDTH: Final = 7
"""Narrower outputs fill too few of their last four columns."""

INPUT: Final = (
    (4, 0, -5, 0, 1, 0),
    (0, -4, -4, 1, 1, 0),
    (0, 4, -4, -1, 1, 0),
    (0, -2, -1, 2, 1, 0),
    (0, 2, -1, -2, 1, 0),
    (0, 4, 0, -5, 0, 1),
)
KERNEL: Final = (
    (1 / 4, 0, 0),
    (-1 / 6, -1 / 6, -1 / 6),
    (-1 / 6, 1 / 6, -1 / 6),
    (1 / 24, 1 / 12, 1 / 6),
    (1 / 24, -1 / 12, 1 / 6),
    (0, 0, 1),
)
OUTPUT: Final = ((1, 1, 1, 1, 1, 0), (0, 1, -1, 2, -2, 0), (0, 1, 1, 4, 4, 0), (0, 1, -1, 8, -8, 1))
"""The transforms, called B transposed, G and A transposed in the paper."""
PIXELS, OUTPUTS = len(INPUT), len(OUTPUT)


def substitute(node: Node) -> tf.Tensor | None:
    """Replaces 3 x 3 convolutions of many channels at stride 1 in float32, whose kernels are known."""
    found = convolution(node)
    if found is None or found.is_depthwise or found.groups > 1:
        return None
    windows, (*_, channels, filters) = found.windows, found.shape
    if (windows.shape, windows.strides, windows.dilations) != ((3, 3), (1, 1), (1, 1)):
        return None
    if channels < MIN_CHANNELS or filters < MIN_FILTERS or windows.output[1] < MIN_WIDTH:
        return None
    if found.images.tensor.dtype != tf.float32 or found.kernel.known is None:
        return None
    with tf.init_scope():  # now, and not in the program; as arrays they would be part of each bucket's
        kernel = found.kernel.known.numpy().astype(np.float64)
        transformed = np.einsum("ij,kjcf->ikcf", KERNEL, kernel).astype(np.float32)
        kernels = [tf.constant(part[:, None]) for part in transformed]
    return found.computed(lambda images: _convolve(images, kernels, windows))


def _convolve(images: tf.Tensor, kernels: Sequence[tf.Tensor], windows: Windows) -> tf.Tensor:
    """Convolves with the six parts `[3, 1, channels, filters]` of a transformed kernel."""
    height, width = windows.output
    rows, (left, _) = windows.pads
    tiles = -(-width // OUTPUTS)
    after = OUTPUTS * tiles + 2 - left - windows.size[1]
    images = tf.pad(images, [[0, 0], rows, [left, after], [0, 0]])
    overlapping = Windows((height + 2, OUTPUTS * tiles + 2), (1, PIXELS), (1, OUTPUTS))
    pixels = [shifted for _, _, shifted in overlapping.shifted(images)]
    products = [
        tf.nn.conv2d(_combine(line, pixels), kernel, 1, "VALID") for line, kernel in zip(INPUT, kernels, strict=True)
    ]
    outputs = tf.concat([_combine(line, products) for line in OUTPUT], axis=-1)
    return tf.reshape(outputs, [-1, height, OUTPUTS * tiles, kernels[0].shape[-1]])[:, :, :width]


def _combine(factors: Sequence[float], values: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns the sum of `values` times `factors`, without the products with 0 and 1."""
    terms = [value if factor == 1 else value * factor for factor, value in zip(factors, values, strict=True) if factor]
    return sum(terms[1:], start=terms[0])
