"""Strided pointwise convolutions as matrix products of the pixels that they read.

XLA makes a matrix product of a pointwise convolution, but calls its slower convolution where there are strides.
"""

from __future__ import annotations

import tensorflow as tf

from xlaserve.models.lowering.operations import convolution
from xlaserve.models.lowering.replay import Node


def substitute(node: Node) -> tf.Tensor | None:
    """Replaces 1 x 1 convolutions with strides."""
    found = convolution(node)
    if found is None or found.is_depthwise or found.groups > 1:
        return None
    windows = found.windows
    if windows.shape != (1, 1) or windows.strides == (1, 1) or windows.pads != ((0, 0), (0, 0)):
        return None
    rows, columns = windows.strides
    kernel = found.kernel.tensor
    return found.computed(lambda images: tf.nn.conv2d(images[:, ::rows, ::columns], kernel, 1, "VALID"))
