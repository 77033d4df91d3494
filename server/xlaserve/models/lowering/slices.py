"""Slices of an image's channels, one after the other in a loop.

XLA compiles what is in a loop once, computes it once however many operations read it, and keeps to the thread that it
was called on, which more than a few independent operations side by side would leave.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import tensorflow as tf

from xlaserve.models.networks.keras_runtime import keras


def channels(values: tf.Tensor, start: tf.Tensor, size: int) -> tf.Tensor:
    """Returns `size` channels of `values` `[..., channels]` from `start`."""
    # The other sides are read here: inside a loop, a number that comes from outside might be anything.
    *sides, _ = values.shape
    sizes = [tf.shape(values)[axis] if side is None else side for axis, side in enumerate(sides)]
    return tf.slice(values, [*(0 for _ in sides), start], [*sizes, size])


def in_turn(
    compute: Callable[[tf.Tensor], tf.Tensor], images: tf.Tensor, shape: tuple[int, int, int], size: int
) -> tf.Tensor:
    """Returns `[n, *shape]`, one for each of `images`: `compute(start)` returns its `size` channels from `start` on.

    The last ones may overlap, so that all slices have the same size.
    """
    last = shape[-1] - size

    def add(index: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
        start = tf.minimum(index * size, last)
        updated = keras.ops.slice_update(outputs, [0, 0, 0, start], compute(start))
        return tf.ensure_shape(updated, outputs.shape)

    # The initial value, all of which is overwritten, is made from the images rather than zeros: zeros wait for nothing,
    # and a program of many loops would have more of such at its start than XLA keeps on one thread.
    pixel = images[:, :1, :1, :1]
    first = tf.cast(tf.reshape(pixel, [-1])[0] > math.inf, tf.int32)  # 0, which XLA can't know
    outputs = tf.broadcast_to(pixel, [tf.shape(images)[0], *shape])
    return keras.ops.fori_loop(first, -(-shape[-1] // size), add, outputs)
