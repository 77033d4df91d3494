"""A compilation whose event is known, to check that the watch sees what XLA compiles."""

from __future__ import annotations

import tensorflow as tf

from xlaserve.programs.watch.compile_watch import KNOWN


def compile_known() -> None:
    """Has XLA compile KNOWN, which takes some tens of milliseconds."""

    def double(values: tf.Tensor) -> tf.Tensor:
        return 2.0 * values

    double.__name__ = KNOWN.function
    tf.function(double, autograph=False, jit_compile=True)(tf.zeros(3))
