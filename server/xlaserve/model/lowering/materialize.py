"""Values that XLA is to compute once, and to write down."""

from __future__ import annotations

import tensorflow as tf
from tensorflow.compiler.tf2xla.ops.gen_xla_ops import xla_optimization_barrier


def materialized(values: tf.Tensor) -> tf.Tensor:
    """Returns `values`, across which XLA simplifies nothing; fusion comes later, and may (see `Once`).

    Where several slices of them are read, XLA would compute them anew for some: a slice of padded images that leaves
    out the padding is the images themselves, and all that these come of. The operation is XLA's own (StableHLO's
    `optimization_barrier`), which TensorFlow's public names leave out; outside XLA it does not exist.
    """
    if tf.executing_eagerly():
        return values
    (barred,) = xla_optimization_barrier([values])
    return barred


class Once:
    """Values that XLA computes once, however many operations read them.

    XLA's fusion computes anew for each reader what it takes for cheap, as additions and products are
    (`InstructionFusion::IsExpensive` in hlo/transforms), and a barrier is gone by then. A division it takes for
    expensive, and that it is one by 1 it can't know.
    """

    def __init__(self) -> None:
        self._one = tf.Variable(1.0, trainable=False)

    def __call__(self, values: tf.Tensor) -> tf.Tensor:
        """Returns `values`."""
        return values / tf.cast(self._one, values.dtype)
