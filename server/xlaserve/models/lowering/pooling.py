"""Pooling as the largest, or the sum, of shifted images, which XLA fuses into one vectorized loop."""

from __future__ import annotations

from functools import reduce
from math import prod
from typing import Final

import tensorflow as tf

from xlaserve.models.lowering.materialize import materialized
from xlaserve.models.lowering.operations import pooling
from xlaserve.models.lowering.replay import Node
from xlaserve.models.lowering.windows import Windows, total

MAX_POSITIONS: Final = 25
"""Positions in a window; larger windows are not replaced."""
MAX_SLICES: Final = 16
"""Slices of the pixels in one of global pooling's sums: more are slower to compile, and no faster."""


def substitute(node: Node) -> tf.Tensor | None:
    """Replaces maximum and average pooling over small windows, and means and sums over all pixels."""
    if node.kind in {"Mean", "Sum"}:
        return _of_pixels(node)
    found = pooling(node)
    if found is None or prod(found.windows.shape) > MAX_POSITIONS:
        return None
    pool = _largest if node.kind == "MaxPool" else _average
    return found.computed(lambda images: pool(images, found.windows))


def _largest(images: tf.Tensor, windows: Windows) -> tf.Tensor:
    """Returns the largest value of each window."""
    return reduce(tf.maximum, (shifted for _, _, shifted in windows.shifted(images, fill=images.dtype.min)))


def _average(images: tf.Tensor, windows: Windows) -> tf.Tensor:
    """Returns the mean of the pixels that lie in each window."""
    sums = total(shifted for _, _, shifted in windows.shifted(images))
    with tf.init_scope():  # now, and not in the program
        ones = tf.ones((1, *windows.size, 1))
        counts = total(shifted for _, _, shifted in windows.shifted(ones)).numpy()
    return sums * tf.constant(1 / counts, images.dtype)


def _of_pixels(node: Node) -> tf.Tensor | None:
    """Returns each channel's mean or sum, as sums of slices: in XLA's own reductions, no activation is vectorized."""
    images, axes = node.inputs[0].tensor, node.inputs[1].known
    if axes is None or images.shape.rank != 4 or sorted(axes.numpy().ravel() % 4) != [1, 2]:
        return None
    _, height, width, channels = images.shape
    if None in (height, width, channels):
        return None
    # In float32, as Keras does: thousands of pixels are more than half precision can add.
    totals = tf.reshape(tf.cast(images, tf.float32), [-1, height * width, channels])
    while (left := totals.shape[1]) > 1:
        totals = materialized(totals)
        parts = next((parts for parts in range(MAX_SLICES, 1, -1) if left % parts == 0), None)
        if parts is None:
            totals = tf.reduce_sum(totals, axis=1, keepdims=True)
        else:
            totals = total(tf.split(totals, parts, axis=1))
    if node.kind == "Mean":
        totals /= height * width
    totals = tf.cast(totals, images.dtype)
    return tf.reshape(totals, [-1, 1, 1, channels]) if node.attribute("keep_dims") else totals[:, 0]
