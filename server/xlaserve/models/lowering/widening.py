"""Less than float32 as float32, to which XLA's CPU backend converts it anyway.

It computes in float32 and rounds after each operation, also within the sums that convolutions are lowered to, which
keeps it from vectorizing them. With the rounding left out, what is left is the same program in float32.
"""

from __future__ import annotations

import tensorflow as tf

from xlaserve.models.lowering.replay import Node
from xlaserve.programs.tf.definitions import NARROW


def substitute(node: Node) -> tf.Tensor | None:
    """Replaces casts from float32 to a narrow type by their input; `replay` makes all other operations wide."""
    if node.kind != "Cast" or node.operation.outputs[0].dtype not in NARROW:
        return None
    images = node.inputs[0].tensor
    return images if images.dtype == tf.float32 else None
