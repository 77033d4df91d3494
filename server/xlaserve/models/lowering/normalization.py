"""Batch normalization with its scale and offset computed ahead, and layer normalization of an input computed once.

At inference batch normalization multiplies and adds, by factors that come from its statistics. XLA would compute these
again in the loop over the pixels, with a square root for each. Layer normalization reads its input three times, for the
mean, the variance and the result, and XLA would compute that input, such as a depthwise convolution, three times.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import tensorflow as tf

from xlaserve.models.lowering.materialize import once
from xlaserve.models.lowering.replay import GraphTensor, Node

FUSED: Final = frozenset({"FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3"})
SUMS: Final = frozenset({"Add", "AddV2"})
COMPUTED: Final = frozenset({"Mul", "Rsqrt"})
"""Operations that compute batch normalization's scale: the root of a variance, perhaps times a weight."""


def substitute(node: Node) -> tf.Tensor | None:
    """Replaces batch normalization, fused or not, and the input of layer normalization."""
    if node.kind in FUSED:
        return _fused(node)
    if node.kind in SUMS:
        return _sum(node)
    return _moments(node) if node.kind == "Mean" else None


def _fused(node: Node) -> tf.Tensor | None:
    """Replaces batch normalization as one operation."""
    if node.attribute("is_training") or any(output.consumers() for output in node.operation.outputs[1:]):
        return None
    weights = [_numbers(value) for value in node.inputs[1:]]
    if any(each is None for each in weights):
        return None
    gamma, beta, mean, variance = weights
    scale = gamma / np.sqrt(variance + node.attribute("epsilon"))
    offset = beta - mean * scale
    if node.attribute("data_format") == b"NCHW":
        scale, offset = scale[:, None, None], offset[:, None, None]
    return _scaled(node.inputs[0].tensor, scale, offset)


def _sum(node: Node) -> tf.Tensor | None:
    """Replaces batch normalization as a product and a sum, whose factor and addend come from weights."""
    product = node.inputs[0].node
    if product is None or product.kind != "Mul":
        return None
    images, factor = product.inputs
    if factor.node is None or factor.node.kind not in COMPUTED:
        return None
    scale, offset = _numbers(factor), _numbers(node.inputs[1])
    return None if scale is None or offset is None else _scaled(images.tensor, scale, offset)


def _scaled(images: tf.Tensor, scale: np.ndarray, offset: np.ndarray) -> tf.Tensor:
    """Scales in float32, as Keras does."""
    wide = tf.cast(images, tf.float32)
    return tf.cast(wide * scale.astype(np.float32) + offset.astype(np.float32), images.dtype)


def _moments(node: Node) -> tf.Tensor | None:
    """Has the input of a mean, and of a variance from that mean, computed once."""
    if not any(reader.type == "SquaredDifference" for reader in node.operation.inputs[0].consumers()):
        return None
    node.inputs[0].tensor = once(node.inputs[0].tensor)
    return node.copied[0]


def _numbers(value: GraphTensor) -> np.ndarray | None:
    return None if value.known is None else value.known.numpy().astype(np.float64)
