"""3 x 3 convolutions by Winograd's minimal filtering along the rows of images, 18 products in the place of 36.

F(4, 3) of Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks" (CVPR 2016), in one dimension: six pixels
of a row and the kernel's rows are transformed, convolved down the columns as they are, and transformed back to four
outputs. In two dimensions the transforms read and write more than the products saved are worth, and its sixteen parts
are more than XLA runs in one thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, Final

import numpy as np
import tensorflow as tf

from xlaserve.model.lowering.replacement import Replacement, WindowReplacement
from xlaserve.model.lowering.windows import Windows
from xlaserve.model.networks.keras_runtime import keras

MIN_CHANNELS: Final = 32
"""With fewer channels in, the transforms cost more than is saved."""
MIN_FILTERS: Final = 16
"""With fewer channels out, too."""
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


def replace(layer: Any) -> Replacement | None:
    """Replaces 3 x 3 convolutions of many channels at stride 1 in float32."""
    if type(layer) is not keras.layers.Conv2D or layer.compute_dtype != "float32":
        return None
    if (layer.kernel_size, layer.strides, layer.dilation_rate, layer.groups) != ((3, 3), (1, 1), (1, 1), 1):
        return None
    channels, filters = layer.kernel.shape[2:]
    return Winograd(layer) if channels >= MIN_CHANNELS and filters >= MIN_FILTERS else None


class Winograd(WindowReplacement):
    """A 3 x 3 convolution, with the kernel that it had when it was first traced."""

    @cached_property
    def kernels(self) -> list[tf.Tensor]:
        """The transformed kernel, of which each of the six has a `[3, 1, channels, filters]`."""
        with tf.init_scope():  # tensors of no graph: arrays would be part of each bucket's program
            kernel = np.asarray(tf.convert_to_tensor(self.original.kernel), np.float64)
            transformed = np.einsum("ij,kjcf->ikcf", KERNEL, kernel).astype(np.float32)
            return [tf.constant(part[:, None]) for part in transformed]

    def compute(self, images: tf.Tensor, windows: Windows) -> tf.Tensor:
        """Convolves."""
        height, width = windows.output
        if width < MIN_WIDTH:
            return tf.nn.conv2d(images, tf.convert_to_tensor(self.original.kernel), 1, windows.padding.upper())
        before = 1 if windows.padding == "same" else 0
        tiles = -(-width // OUTPUTS)
        after = OUTPUTS * tiles + 2 - before - windows.size[1]
        images = tf.pad(images, [[0, 0], [before, before], [before, after], [0, 0]])
        overlapping = Windows((height + 2, OUTPUTS * tiles + 2), (1, PIXELS), (1, OUTPUTS))
        pixels = [shifted for _, _, shifted in overlapping.shifted(images)]
        products = [
            tf.nn.conv2d(_combine(line, pixels), kernel, 1, "VALID")
            for line, kernel in zip(INPUT, self.kernels, strict=True)
        ]
        outputs = tf.concat([_combine(line, products) for line in OUTPUT], axis=-1)
        return tf.reshape(outputs, [-1, height, OUTPUTS * tiles, self.original.filters])[:, :, :width]


def _combine(factors: Sequence[float], values: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns the sum of `values` times `factors`, without the products with 0 and 1."""
    terms = [value if factor == 1 else value * factor for factor, value in zip(factors, values, strict=True) if factor]
    return sum(terms[1:], start=terms[0])
