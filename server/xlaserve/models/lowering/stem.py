"""Convolutions of a few channels, such as a network's first, as sums of shifted outer products.

XLA's CPU backend runs a convolution as a matrix product. Here that computes little for the copying that it needs
before, and its outputs are written to memory before they are used.
"""

from __future__ import annotations

from typing import Any, Final

import tensorflow as tf

from xlaserve.models.lowering.operations import convolution, readers
from xlaserve.models.lowering.replay import Node
from xlaserve.models.lowering.windows import total

MAX_TERMS: Final = 32
"""Terms of an output's sum; 3 x 3 x 3 are 27. At 7 x 7 x 3 the matrix product is faster."""
MAX_POINTWISE: Final = 16
"""Terms of an output's sum in pointwise convolutions, for which nothing has to be copied."""
RESIZINGS: Final = frozenset({"ResizeBilinear", "ResizeNearestNeighbor"})
ELEMENTWISE: Final = frozenset({"Identity", "BiasAdd", "Add", "AddV2", "Mul", "Relu", "Relu6", "FusedBatchNormV3"})
"""Operations that may lie between a convolution and a resizing, and are fused with the resizing."""


def substitute(node: Node) -> tf.Tensor | None:
    """Replaces convolutions whose outputs are sums of few terms."""
    found = convolution(node)
    if found is None or found.is_depthwise or found.groups > 1:
        return None
    rows, columns, channels, _ = found.shape
    if rows * columns * channels > (MAX_TERMS if rows * columns > 1 else MAX_POINTWISE):
        return None
    if _is_enlarged(node.operation):
        return None
    kernel, windows = found.kernel.tensor, found.windows
    return found.computed(
        lambda images: total(
            shifted[..., channel : channel + 1] * kernel[row, column, channel]
            for row, column, shifted in windows.shifted(images)
            for channel in range(channels)
        )
    )


def _is_enlarged(operation: Any) -> bool:
    """Returns whether the result is resized to more pixels, for each of which XLA would compute its sums again."""
    left, seen = readers(operation), set()
    while left:  # each once, as both sides of a gate lead to what follows; and not by calls within calls
        each = left.pop()
        if each.type in RESIZINGS and _enlarges(each):
            return True
        if each.type in ELEMENTWISE and each not in seen:
            seen.add(each)
            left += readers(each)
    return False


def _enlarges(resizing: Any) -> bool:
    before, after = (each.shape[1:3].num_elements() for each in (resizing.inputs[0], resizing.outputs[0]))
    return before is None or after is None or after > before
