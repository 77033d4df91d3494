"""Values that XLA is to compute once, and write to memory."""

from __future__ import annotations

from typing import Final

import tensorflow as tf
from tensorflow.compiler.tf2xla.ops.gen_xla_ops import xla_optimization_barrier

ARGUMENT_NUMBERS: Final = 129
"""Numbers of a tensor that a traced function takes as an argument: it makes constants of smaller ones."""


def materialized(values: tf.Tensor) -> tf.Tensor:
    """Returns `values`, across which XLA simplifies nothing; fusion comes later, and may (see `once`).

    Where several slices of them are read, XLA would compute them again for some: a slice of padded images that leaves
    out the padding is the images themselves, and all that they are computed from. The operation is XLA's own
    (StableHLO's `optimization_barrier`), which TensorFlow's public names leave out; outside XLA it does not exist.
    """
    if tf.executing_eagerly():
        return values
    (barred,) = xla_optimization_barrier([values])
    return barred


def once(values: tf.Tensor) -> tf.Tensor:
    """Returns `values`, which XLA computes once, however many operations read them.

    XLA's fusion recomputes for each reader what it takes for cheap, such as additions and products
    (`InstructionFusion::IsExpensive` in hlo/transforms), and a barrier is gone by then. It takes a division for
    expensive, and can't know that this one is by 1.
    """
    with tf.init_scope():
        ones = tf.ones(ARGUMENT_NUMBERS)
    return values / tf.cast(ones[0], values.dtype)
