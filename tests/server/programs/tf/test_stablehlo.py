from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import tensorflow as tf

from xlaserve.programs.tf import stablehlo

SHAPE = (2, 4, 5, 3)
SPEC = tf.TensorSpec(SHAPE, tf.uint8)


def images() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, SHAPE, np.uint8)


def outputs_of(traced: stablehlo.TracedFunction) -> list[np.ndarray]:
    return [output.numpy() for output in stablehlo.load(traced, "cpu")(tf.constant(images()))]


def test_a_function_is_the_same_from_stablehlo_with_weights_as_arguments() -> None:
    weight, offset = tf.Variable(tf.random.normal((3, 7))), tf.constant(np.arange(7, dtype=np.float32))

    def forward(pixels: tf.Tensor) -> tuple[tf.Tensor, ...]:
        scores = tf.reduce_mean(tf.cast(pixels, tf.float32), axis=(1, 2)) @ weight + offset
        return scores, tf.argmax(scores, axis=1, output_type=tf.int32)

    traced = stablehlo.export(forward, [SPEC])
    assert traced.outputs == (tf.TensorSpec((2, 7), tf.float32), tf.TensorSpec((2,), tf.int32))
    expected = tf.function(forward, jit_compile=True, autograph=False)(tf.constant(images()))
    for got, wanted in zip(outputs_of(traced), expected, strict=True):
        np.testing.assert_array_equal(got, wanted.numpy())
    doubled = replace(traced, arguments=tuple(2 * argument for argument in traced.arguments))
    np.testing.assert_allclose(outputs_of(doubled)[0], 2 * expected[0].numpy(), rtol=1e-5)


def test_the_weights_share_the_variables_memory() -> None:
    variable = tf.Variable(tf.zeros((4096, 3)))
    traced = stablehlo.export(lambda pixels: (tf.cast(pixels, tf.float32) @ tf.transpose(variable),), [SPEC])
    (argument,) = traced.arguments
    assert np.shares_memory(memoryview(argument), memoryview(variable.read_value()))


def test_the_name_is_the_content() -> None:
    one = stablehlo.export(lambda pixels: (tf.cast(pixels, tf.float32) + 1.0,), [SPEC])
    two = stablehlo.export(lambda pixels: (tf.cast(pixels, tf.float32) + 2.0,), [SPEC])
    assert one.name == replace(one, arguments=()).name
    assert one.name != two.name


def test_what_xla_can_not_compile_names_the_operation() -> None:
    def bicubic(pixels: tf.Tensor) -> tuple[tf.Tensor, ...]:
        return (tf.image.resize(tf.cast(pixels, tf.float32), (8, 8), "bicubic"),)

    with pytest.raises(ValueError, match="ResizeBicubic"):
        stablehlo.export(bicubic, [SPEC])
