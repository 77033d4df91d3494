"""The roofline model: a machine's peak arithmetic and memory bandwidth, and the time that they allow at best.

S. Williams, A. Waterman, D. Patterson: Roofline, an insightful visual performance model (2009).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from xlaserve.engine.warmup.compiler import time_runs
from xlaserve.inspection.cost import Cost

MATRIX_SIDE: Final = 1024
COPIED_BYTES: Final = 128 * 1024 * 1024
"""Larger than the caches of most processors, so that the bandwidth of memory is measured and not that of a cache."""
MAX_RUNS: Final = 1000


@dataclass(frozen=True, slots=True)
class Machine:
    """The peak arithmetic and memory bandwidth of a machine."""

    flops_per_s: float
    bytes_per_s: float

    @property
    def balance(self) -> float:
        """FLOPs a byte of an instruction below which memory is its bound, and above which arithmetic is."""
        return self.flops_per_s / self.bytes_per_s

    def bound_s(self, cost: Cost) -> float:
        """Returns the least seconds in which `cost` can be computed."""
        return max(cost.flops / self.flops_per_s, cost.bytes / self.bytes_per_s)


def measure(flops_per_s: float | None = None, bytes_per_s: float | None = None) -> Machine:
    """Returns the peaks of this machine; each that is None is measured on TensorFlow's device and threads, in float32.

    Arithmetic is measured by a product of two matrices, memory by a copy of an array with 1 added, both compiled by
    XLA. Each is the fastest of several runs, since disturbances only slow a run down.
    """
    if flops_per_s is None:
        flops_per_s = 2 * MATRIX_SIDE**3 / _best_s(_matrix_product())
    if bytes_per_s is None:
        bytes_per_s = 2 * COPIED_BYTES / _best_s(_copy())
    return Machine(flops_per_s, bytes_per_s)


def _matrix_product() -> Callable[[], object]:
    import tensorflow as tf  # noqa: PLC0415 - only measuring needs TensorFlow

    matrix = tf.random.stateless_uniform((MATRIX_SIDE, MATRIX_SIDE), (1, 2))
    product = tf.function(lambda a: tf.reduce_max(a @ a), jit_compile=True, autograph=False)
    return lambda: product(matrix).numpy()


def _copy() -> Callable[[], object]:
    import tensorflow as tf  # noqa: PLC0415

    array = tf.zeros((COPIED_BYTES // 4,))
    copy = tf.function(lambda a: (a + 1.0, a[0]), jit_compile=True, autograph=False)

    def run() -> object:
        _, first = copy(array)
        return first.numpy()  # waits for both

    return run


def _best_s(run: Callable[[], object]) -> float:
    run()
    return min(time_runs(run, MAX_RUNS))
