"""3 x 3 convolutions by Winograd's minimal filtering, 16 products in the place of 36.

F(2 x 2, 3 x 3) of Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks" (CVPR 2016): tiles of 4 x 4
pixels and the kernel are transformed, multiplied as 16 matrix products, and transformed back to 2 x 2 outputs. Its
rounding errors are about those of the direct sum; those of larger tiles are not.
"""

from __future__ import annotations

from functools import cached_property
from itertools import product
from typing import Any, Final

import numpy as np
import tensorflow as tf

from xlaserve.model.keras_runtime import keras
from xlaserve.model.lowering.replacement import Replacement, WindowReplacement
from xlaserve.model.lowering.windows import Windows

LEAST_CHANNELS: Final = 32
"""With fewer, in or out, the transforms cost more than is saved."""
LEAST_PIXELS: Final = 14 * 14
"""With fewer outputs, reading the transformed weights, 16 for 9, costs more than is saved."""

INPUT: Final = ((1, 0, -1, 0), (0, 1, 1, 0), (0, -1, 1, 0), (0, 1, 0, -1))
KERNEL: Final = ((1, 0, 0), (0.5, 0.5, 0.5), (0.5, -0.5, 0.5), (0, 0, 1))
OUTPUT: Final = ((1, 1, 1, 0), (0, 1, -1, -1))
"""The transforms along one side, called B transposed, G and A transposed in the paper."""


def replace(layer: Any) -> Replacement | None:
    """Replaces 3 x 3 convolutions of many channels at stride 1 in float32."""
    if type(layer) is not keras.layers.Conv2D or layer.compute_dtype != "float32":
        return None
    if (layer.kernel_size, layer.strides, layer.dilation_rate, layer.groups) != ((3, 3), (1, 1), (1, 1), 1):
        return None
    return Winograd(layer) if min(layer.kernel.shape[2:]) >= LEAST_CHANNELS else None


class Winograd(WindowReplacement):
    """A 3 x 3 convolution, with the kernel that it had when it was first traced."""

    @cached_property
    def kernels(self) -> dict[tuple[int, int], tf.Tensor]:
        """The transformed kernel, of which each position of a tile has a `[channels, filters]`."""
        with tf.init_scope():  # tensors of no graph: arrays would be part of each bucket's program
            kernel = np.asarray(tf.convert_to_tensor(self.original.kernel), np.float64)
            transformed = np.einsum("ik,jl,klcf->ijcf", KERNEL, KERNEL, kernel).astype(np.float32)
            return {(i, j): tf.constant(transformed[i, j]) for i, j in product(range(4), range(4))}

    def compute(self, images: tf.Tensor, windows: Windows) -> tf.Tensor:
        """Convolves."""
        height, width = windows.output
        if height * width < LEAST_PIXELS:
            return tf.nn.conv2d(images, tf.convert_to_tensor(self.original.kernel), 1, windows.padding.upper())
        channels, filters = self.original.kernel.shape[2:]
        before = 1 if windows.padding == "same" else 0
        high, wide = -(-height // 2), -(-width // 2)
        rows, columns = (2 * tiles + 2 - before - size for tiles, size in zip((high, wide), windows.size, strict=True))
        images = tf.pad(images, [[0, 0], [before, rows], [before, columns], [0, 0]])
        tiles = Windows((2 * high + 2, 2 * wide + 2), (4, 4), (2, 2))
        pixels = {(row, column): shifted for row, column, shifted in tiles.shifted(images)}
        products = {
            at: tf.reshape(tf.matmul(tf.reshape(values, [-1, channels]), self.kernels[at]), [-1, high, wide, filters])
            for at, values in _transform(INPUT, pixels).items()
        }
        outputs = _transform(OUTPUT, products)
        lines = (tf.concat([outputs[row, 0], outputs[row, 1]], axis=-1) for row in range(2))
        merged = tf.concat([tf.reshape(line, [-1, high, 1, 2 * wide, filters]) for line in lines], axis=2)
        return tf.reshape(merged, [-1, 2 * high, 2 * wide, filters])[:, :height, :width]


Matrix = tuple[tuple[float, ...], ...]
Tile = dict[tuple[int, int], tf.Tensor]


def _transform(matrix: Matrix, tile: Tile) -> Tile:
    """Returns `matrix` times `tile` times `matrix` transposed, without the products with 0 and 1."""
    size = range(len(matrix[0]))
    left = {(i, j): _combine(line, [tile[k, j] for k in size]) for i, line in enumerate(matrix) for j in size}
    rows = range(len(matrix))
    return {(i, j): _combine(line, [left[i, k] for k in size]) for i in rows for j, line in enumerate(matrix)}


def _combine(signs: tuple[float, ...], values: list[tf.Tensor]) -> tf.Tensor:
    total = None
    for sign, value in zip(signs, values, strict=True):
        if sign:
            signed = value if total is None and sign > 0 else -value if total is None else value
            total = signed if total is None else total + signed if sign > 0 else total - signed
    return total
