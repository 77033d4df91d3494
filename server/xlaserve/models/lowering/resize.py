"""Bilinear resizing as means of gathered rows and columns.

TensorFlow's XLA resizes by matrix products with nine factors for each output, seven of them zero. Gathered by constant
indices, rows and columns come out of one vectorized loop.
"""

from __future__ import annotations

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import tensor_util

from xlaserve.models.lowering.materialize import materialized
from xlaserve.models.lowering.replay import Node


def substitute(node: Node) -> tf.Tensor | None:
    """Replaces bilinear resizing in float32, pixels being areas with a centre: sides are scaled from edge to edge."""
    if node.kind != "ResizeBilinear" or not node.attribute("half_pixel_centers"):
        return None
    images = node.inputs[0].tensor
    height, width = tensor_util.constant_value_as_shape(node.inputs[1].tensor)  # it may be that of another tensor
    if None in (height, width, *images.shape[1:]) or images.dtype != tf.float32:
        return None
    return _along(1, _along(2, materialized(images), width), height)


def _along(axis: int, images: tf.Tensor, size: int) -> tf.Tensor:
    """Resizes one side of `images` to `size`."""
    before = images.shape[axis]
    if size == before:
        return images
    at = (np.arange(size) + 0.5) * (before / size) - 0.5
    first = np.floor(at)
    share = (at - first).astype(np.float32).reshape([-1 if side == axis else 1 for side in range(4)])
    low, high = (
        tf.gather(images, np.clip(index, 0, before - 1).astype(np.int32), axis=axis) for index in (first, first + 1)
    )
    return low + (high - low) * share
