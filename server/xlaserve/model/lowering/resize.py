"""Bilinear resizing as means of gathered rows and columns.

TensorFlow's XLA resizes by matrix products with nine factors for each output, seven of them zero. Gathered by constant
indices, rows and columns come out of one vectorized loop.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from xlaserve.model.lowering.materialize import materialized
from xlaserve.model.lowering.replacement import Replacement
from xlaserve.model.networks.keras_runtime import keras


def replace(layer: Any) -> Replacement | None:
    """Replaces bilinear resizing, channels last and without antialiasing, in float32."""
    kind = type(layer)
    if kind not in (keras.layers.UpSampling2D, keras.layers.Resizing) or layer.interpolation != "bilinear":
        return None
    if layer.data_format != "channels_last" or layer.compute_dtype != "float32":
        return None
    if kind is keras.layers.Resizing and (
        layer.antialias or layer.crop_to_aspect_ratio or getattr(layer, "pad_to_aspect_ratio", False)
    ):
        return None
    return Resize(layer)


class Resize(Replacement):
    """Bilinear resizing, pixels being areas with a centre: sides are scaled from edge to edge."""

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        """Resizes `inputs` of `[n, height, width, channels]`."""
        if len(inputs.shape) != 4 or None in inputs.shape[1:3]:
            return self.original(inputs)
        height, width = self.compute_output_shape(inputs.shape)[1:3]
        images = materialized(tf.cast(inputs, self.compute_dtype))
        return _along(1, _along(2, images, width), height)


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
