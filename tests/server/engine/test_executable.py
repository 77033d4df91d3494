from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tensorflow as tf
from numpy.typing import NDArray

from xlaserve.config import Bucket, Mode
from xlaserve.engine.executable import TensorFlowProgram

BUCKET = Bucket(2, 4, 5)
ALL_MODES = pytest.mark.parametrize("mode", list(Mode))


def sums(pixels: tf.Tensor) -> tuple[tf.Tensor, ...]:
    values = tf.cast(pixels, tf.float32)
    return tf.reduce_sum(values, axis=(1, 2)), tf.reduce_max(values, axis=(1, 2, 3))


def images(seed: int, bucket: Bucket = BUCKET) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (*bucket, 3), np.uint8)


@ALL_MODES
def test_every_output_comes_back_as_float32(mode: Mode) -> None:
    pixels = images(0)
    totals, brightest = TensorFlowProgram(sums).compile(mode, BUCKET).executable(pixels)
    assert totals.dtype == brightest.dtype == np.float32
    np.testing.assert_allclose(totals, pixels.sum(axis=(1, 2)))
    np.testing.assert_allclose(brightest, pixels.max(axis=(1, 2, 3)))


@ALL_MODES
def test_outputs_own_their_memory(mode: Mode) -> None:
    def identity(pixels: tf.Tensor) -> tuple[tf.Tensor, ...]:
        return (tf.cast(pixels, tf.float32),)

    executable = TensorFlowProgram(identity).compile(mode, BUCKET).executable
    pixels = images(0)
    (first,) = executable(pixels)
    assert first.flags.owndata
    expected = first.copy()
    pixels[:] = 0
    (second,) = executable(pixels)
    np.testing.assert_array_equal(first, expected)
    assert not second.any()


@ALL_MODES
@pytest.mark.parametrize(
    "wrong", [np.zeros((3, 4, 5, 3), np.uint8), np.zeros((2, 5, 4, 3), np.uint8), np.zeros((2, 4, 5, 3), np.float32)]
)
def test_another_shape_or_dtype_raises_and_never_retraces(mode: Mode, wrong: NDArray[np.uint8]) -> None:
    traced = []

    def counted(pixels: tf.Tensor) -> tuple[tf.Tensor, ...]:
        traced.append(pixels.shape)
        return sums(pixels)

    executable = TensorFlowProgram(counted).compile(mode, BUCKET).executable
    before = len(traced)
    with pytest.raises(ValueError, match=r"expected uint8 \(2, 4, 5, 3\), got"):
        executable(wrong)
    assert len(traced) == before


@pytest.mark.parametrize("mode", [Mode.XLA, Mode.GRAPH])
def test_a_compiled_mode_traces_ahead_of_calls_and_says_how_long_it_took(mode: Mode) -> None:
    traced = []

    def counted(pixels: tf.Tensor) -> tuple[tf.Tensor, ...]:
        traced.append(pixels.shape)
        return sums(pixels)

    compilation = TensorFlowProgram(counted).compile(mode, BUCKET)
    for seed in range(3):
        compilation.executable(images(seed))
    assert len(traced) == 1
    assert compilation.trace_s > 0
    assert compilation.compile_s > 0


def test_python_walks_the_model_once_for_all_batch_sizes() -> None:
    traced = []

    def counted(pixels: tf.Tensor) -> tuple[tf.Tensor, ...]:
        traced.append(pixels.shape.as_list())
        return sums(pixels)

    program = TensorFlowProgram(counted)
    for bucket in (Bucket(1, 4, 5), Bucket(2, 4, 5), Bucket(2, 6, 6)):
        for mode in (Mode.XLA, Mode.GRAPH):
            pixels = images(0, bucket)
            (totals, _) = program.compile(mode, bucket).executable(pixels)
            np.testing.assert_allclose(totals, pixels.sum(axis=(1, 2)))
    assert traced == [[None, 4, 5, 3], [None, 6, 6, 3]]


def test_eager_mode_traces_and_compiles_nothing() -> None:
    symbolic = []

    def counted(pixels: tf.Tensor) -> tuple[tf.Tensor, ...]:
        symbolic.append(tf.is_symbolic_tensor(pixels))
        return sums(pixels)

    compilation = TensorFlowProgram(counted).compile(Mode.EAGER, BUCKET)
    assert (compilation.trace_s, compilation.compile_s) == (0, 0)
    assert symbolic == [False]


def test_only_xla_mode_goes_through_xla() -> None:
    def has_no_xla_kernel(pixels: tf.Tensor) -> tuple[tf.Tensor, ...]:
        return (tf.image.resize(tf.cast(pixels, tf.float32), (8, 8), "bicubic"),)

    program = TensorFlowProgram(has_no_xla_kernel)
    program.compile(Mode.EAGER, BUCKET)
    program.compile(Mode.GRAPH, BUCKET)
    with pytest.raises(tf.errors.InvalidArgumentError, match="ResizeBicubic"):
        program.compile(Mode.XLA, BUCKET)


@ALL_MODES
def test_several_threads_get_the_answers_that_one_gets(mode: Mode) -> None:
    executable = TensorFlowProgram(sums).compile(mode, BUCKET).executable
    inputs = [images(seed) for seed in range(40)]
    alone = [executable(pixels) for pixels in inputs]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(executable, inputs))
    for one, other in zip(alone, together, strict=True):
        for expected, got in zip(one, other, strict=True):
            np.testing.assert_array_equal(expected, got)
