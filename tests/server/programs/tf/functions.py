"""Functions of pixels, and images, for tests of TensorFlow's programs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from numpy.typing import NDArray

from xlaserve.config import Bucket, Mode
from xlaserve.programs.tf.lowered_function import Forward, Lowered

BUCKET = Bucket(2, 4, 5)
ALL_MODES = pytest.mark.parametrize("mode", [mode for mode in Mode if mode is not Mode.AUTO])


def sums(pixels: tf.Tensor) -> tuple[tf.Tensor, ...]:
    values = tf.cast(pixels, tf.float32)
    return tf.reduce_sum(values, axis=(1, 2)), tf.reduce_max(values, axis=(1, 2, 3))


def has_no_xla_kernel(pixels: tf.Tensor) -> tuple[tf.Tensor, ...]:
    return (tf.image.resize(tf.cast(pixels, tf.float32), (8, 8), "bicubic"),)


def noise(bucket: Bucket = BUCKET, seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (*bucket, 3), np.uint8)


def unchanged(function: Forward) -> Lowered:
    return Lowered(function, "")


def doubled(function: Any) -> Lowered:
    def run(pixels: tf.Tensor) -> tuple[tf.Tensor, ...]:
        return tuple(2 * output for output in function(pixels))

    spec = tf.TensorSpec(function.inputs[0].shape, tf.uint8)
    return Lowered(tf.function(run, autograph=False).get_concrete_function(spec), "doubling 1")
