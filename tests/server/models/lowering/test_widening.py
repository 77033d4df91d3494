"""Models that compute in less than float32 compute in float32 in XLA on a CPU."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
import tensorflow as tf
from jax import export
from jax import numpy as jnp
from tensorflow.compiler.tf2xla.python import xla
from tests.server.models.lowering.tracing import TOLERANCE, compiled, difference, lowered, noise, program

from xlaserve.config import Lowering, Precision
from xlaserve.models import lowering
from xlaserve.models.networks import precision
from xlaserve.models.networks.keras_runtime import keras

IMAGES = noise(2, 12, 12, 3)
OTHERS = [name for name in Lowering if name is not Lowering.FLOAT32]
NARROW = pytest.mark.parametrize("narrow", [tf.bfloat16, tf.float16])


def network() -> Any:
    pixels = keras.Input(IMAGES.shape[1:])
    values = pixels
    for layer in (
        keras.layers.Conv2D(8, 3, strides=2, padding="same"),
        keras.layers.BatchNormalization(),
        keras.layers.DepthwiseConv2D(3, padding="same"),
        keras.layers.ReLU(6.0),
        keras.layers.GlobalAveragePooling2D(),
        keras.layers.Dense(4, activation="softmax"),
    ):
        values = layer(values)
    return keras.Model(pixels, values)


@pytest.mark.parametrize("half", [Precision.BFLOAT16, Precision.FLOAT16])
def test_a_model_that_is_narrow_answers_as_in_float32(half: Precision) -> None:
    model = network()
    expected = model(IMAGES)
    precision.narrow(model, half)
    made, narrow = lowered(model, IMAGES), lowered(model, IMAGES, OTHERS)
    assert made.text == "float32 3, depthwise 1, stem 1, normalization 1, pooling 1"
    assert difference(compiled(made, IMAGES), expected) < TOLERANCE
    assert difference(compiled(narrow, IMAGES), expected) > TOLERANCE
    assert not {"bf16", "f16"} & set(program(made, IMAGES).replace("[", " ").split())


@NARROW
def test_weights_that_are_narrow_are_widened_ahead(narrow: tf.DType) -> None:
    kernel = tf.Variable(tf.cast(noise(3, 3, 3, 200), narrow))
    bias = tf.cast(noise(200), narrow)

    def run(images: tf.Tensor) -> tf.Tensor:
        return tf.nn.relu(tf.nn.conv2d(tf.cast(images, narrow), kernel * 2, 1, "SAME") + bias)

    made = lowered(run, IMAGES)
    got = compiled(made, IMAGES)
    assert got.dtype == narrow
    wide = tf.nn.conv2d(IMAGES, tf.cast(kernel * 2, tf.float32), 1, "SAME") + tf.cast(bias, tf.float32)
    assert difference(got, tf.cast(tf.nn.relu(wide), narrow)) < 0.01
    function: Any = made.forward
    assert {each.dtype for each in function.captured_inputs} == {tf.float32}


@NARROW
def test_narrow_pixels_and_functions_within_are_widened(narrow: tf.DType) -> None:
    inner = tf.function(lambda values: tf.nn.softmax(values * tf.cast(0.1, narrow)), autograph=False)
    images = tf.cast(IMAGES, narrow)
    function = tf.function(lambda values: (inner(values), values), autograph=False).get_concrete_function(
        tf.TensorSpec(images.shape, narrow)
    )
    made = lowering.lower(function, list(Lowering))
    scores, same = tf.function(made.forward, autograph=False, jit_compile=True)(images)
    assert (scores.dtype, same.dtype) == (narrow, narrow)
    assert difference(scores, tf.nn.softmax(0.1 * IMAGES)) < 0.02
    np.testing.assert_array_equal(tf.cast(same, tf.float32), tf.cast(images, tf.float32))


def test_a_narrow_loop_stays_narrow_and_all_else_is_lowered() -> None:
    def run(images: tf.Tensor) -> tf.Tensor:
        values = keras.ops.fori_loop(0, 3, lambda _, x: tf.tanh(x), tf.cast(images, tf.bfloat16))
        return tf.nn.avg_pool2d(tf.cast(values, tf.float32), 2, 1, "SAME")

    made = lowered(run, IMAGES)
    assert made.text == "pooling 1"
    assert difference(compiled(made, IMAGES), run(tf.constant(IMAGES))) < 0.02


@pytest.mark.parametrize("name", ["XlaCallModule", "Bitcast"])
def test_what_is_fixed_in_a_narrow_type_keeps_it_and_all_else_is_lowered(name: str) -> None:
    tanh = export.export(jax.jit(jnp.tanh))(jax.ShapeDtypeStruct(IMAGES.shape, jnp.bfloat16))

    def run(images: tf.Tensor) -> tf.Tensor:
        values = tf.cast(images, tf.bfloat16)
        if name == "Bitcast":
            values = tf.bitcast(tf.bitcast(tf.tanh(values), tf.uint16), tf.bfloat16)
        else:
            (values,) = xla.call_module(
                [values],
                module=tanh.mlir_module_serialized,
                version=tanh.calling_convention_version,
                platforms=["CPU"],
                Tout=[tf.bfloat16],
                Sout=[IMAGES.shape],
            )
        return tf.nn.avg_pool2d(tf.cast(values, tf.float32), 2, 1, "SAME")

    made = lowered(run, IMAGES)
    assert made.text == "pooling 1"
    assert difference(compiled(made, IMAGES), tf.nn.avg_pool2d(tf.tanh(IMAGES), 2, 1, "SAME")) < 0.02
