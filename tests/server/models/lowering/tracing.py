"""Traced functions, and how far they are from their lowered twins."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import tensorflow as tf
from hypothesis import strategies as st

from xlaserve.config import Lowering
from xlaserve.models import lowering
from xlaserve.programs.tf.lowered_function import Lowered

PADDINGS = st.sampled_from(["same", "valid"])
FORMATS = st.sampled_from(["channels_last", "channels_first"])
SIDES = st.integers(0, 6)

TOLERANCE = 1e-5
"""The largest difference that is allowed, as a share of the largest output."""


def noise(*shape: int) -> Any:
    """Returns float32 numbers of mean 0 and deviation 1."""
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


def trace(call: Callable[[tf.Tensor], Any], shape: Iterable[int | None]) -> Any:
    """Returns a concrete function of float32 images of `shape`."""
    return tf.function(call, autograph=False).get_concrete_function(tf.TensorSpec(tuple(shape)))


def lowered(call: Callable[[tf.Tensor], Any], images: Any, names: Iterable[Lowering] = Lowering) -> Lowered:
    """Returns what `call` is lowered to, for any number of `images`."""
    return lowering.lower(trace(call, (None, *images.shape[1:])), list(names))


def compiled(made: Lowered, images: Any) -> Any:
    """Returns the first output that XLA computes from `images`."""
    first, *_ = tf.function(made.forward, autograph=False, jit_compile=True)(tf.constant(images))
    return first


def program(made: Lowered, images: Any) -> str:
    """Returns the HLO that XLA makes of it."""
    function = tf.function(made.forward, autograph=False, jit_compile=True)
    return str(function.experimental_get_compiler_ir(tf.constant(images))(stage="optimized_hlo"))


def difference(got: Any, expected: Any) -> float:
    """Returns the largest difference as a share of the largest output."""
    got, expected = (tf.cast(each, tf.float32).numpy() for each in (got, expected))
    assert got.shape == expected.shape
    return float(np.abs(got - expected).max() / max(np.abs(expected).max(), 1e-30))


def check(name: Lowering, call: Any, images: Any, tolerance: float = TOLERANCE) -> None:
    """Compares `call`, which has one operation to replace, with what replaces it."""
    made = lowered(call, images, [name])
    assert made.text == f"{name} 1"
    expected = call(images)
    (got,) = made.forward(tf.constant(images))
    assert got.dtype == expected.dtype
    assert difference(got, expected) <= tolerance
