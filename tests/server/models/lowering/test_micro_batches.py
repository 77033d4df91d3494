from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tests.server.models.lowering.tracing import noise

from xlaserve.config import Bucket, Lowering, ModelSettings
from xlaserve.inspection import cost, hlo
from xlaserve.models import lowering
from xlaserve.models.lowering import micro_batches
from xlaserve.programs.tf import stablehlo

SIDE = 224
BUCKET = Bucket(8, SIDE, SIDE)


def traced(run: Any, batch: int | None = None, side: int | None = SIDE) -> Any:
    spec = tf.TensorSpec((batch, side, side, 3), tf.uint8)
    return tf.function(run, autograph=False).get_concrete_function(spec)


def scores(weights: tf.Variable) -> Any:
    """Returns a model of two outputs, traced."""

    def run(pixels: tf.Tensor) -> tuple[tf.Tensor, ...]:
        means = tf.reduce_mean(tf.cast(pixels, tf.float32), axis=(1, 2))
        return means @ weights, tf.argmax(means, axis=1, output_type=tf.int32)

    return traced(run)


def old_branches(pixels: tf.Tensor) -> tuple[tf.Tensor, ...]:
    images = tf.cast(pixels, tf.float32)
    dark, bright = tf.raw_ops.Switch(data=images, pred=tf.reduce_mean(images) > 1.0)
    merged, _ = tf.raw_ops.Merge(inputs=[dark, bright])
    return (tf.reshape(merged, tf.shape(images))[:, 0, 0],)


def eight(pixels: tf.Tensor) -> tuple[tf.Tensor, ...]:
    colours = tf.ensure_shape(tf.cast(pixels, tf.float32)[:, 0, 0], (8, 3))
    return (tf.reshape(colours, tf.stack([tf.shape(pixels)[0], 3])),)


FACTOR = tf.Variable(2.0)


def variable_in_a_loop(pixels: tf.Tensor) -> tuple[tf.Tensor, ...]:
    colours = tf.cast(pixels, tf.float32)[:, 0, 0]
    _, colours = tf.while_loop(lambda index, _: index < 3, lambda index, each: (index + 1, each * FACTOR), (0, colours))
    return (colours,)


@pytest.mark.parametrize(
    ("bucket", "images"),
    [
        (Bucket(1, SIDE, SIDE), 1),
        (Bucket(2, SIDE, SIDE), 2),
        (Bucket(3, SIDE, SIDE), 3),
        (Bucket(4, SIDE, SIDE), 2),
        (Bucket(32, SIDE, SIDE), 2),
        (Bucket(7, SIDE, SIDE), 7),
        (Bucket(8, 512, 512), 2),
        (Bucket(8, 112, 112), 8),
        (Bucket(24, 112, 112), 8),
        (Bucket(20, 112, 112), 5),
        (Bucket(32, 32, 32), 32),
    ],
)
def test_two_images_or_as_many_pixels_are_computed_at_a_time(bucket: Bucket, images: int) -> None:
    assert micro_batches.size(bucket) == images


def test_a_divided_batch_has_the_same_answers_and_its_weights_as_arguments() -> None:
    weights = tf.Variable(noise(3, 25))
    function = scores(weights)
    made = lowering.lower(function, [Lowering.MICRO_BATCHES])
    divided = made.divided(made.forward, BUCKET)
    pixels = np.random.default_rng(0).integers(0, 256, (*BUCKET, 3), np.uint8)
    exported = stablehlo.export(divided, [tf.TensorSpec(pixels.shape, pixels.dtype)])
    assert b"while" in exported.module
    (weight,) = exported.arguments
    assert np.shares_memory(memoryview(weight), memoryview(weights.read_value()))
    wanted = [output.numpy() for output in function(tf.constant(pixels))]
    for got, expected in zip(stablehlo.load(exported, "cpu")(tf.constant(pixels)), wanted, strict=True):
        np.testing.assert_allclose(got.numpy(), expected, rtol=1e-5)


def test_a_variable_that_is_read_twice_is_one_argument() -> None:
    weights = tf.Variable(noise(9, 9))

    def twice(pixels: tf.Tensor) -> tuple[tf.Tensor]:
        return (tf.reshape(tf.cast(pixels[:, 0, :3], tf.float32), (-1, 9)) @ weights @ weights,)

    function = traced(twice)
    made: Any = lowering.lower(function, [Lowering.MICRO_BATCHES]).forward
    assert len(made.captured_inputs) == 1


def test_a_divided_batch_is_explained_as_all_its_rounds() -> None:
    weights = tf.Variable(noise(3, 5))
    made = lowering.lower(scores(weights), [Lowering.MICRO_BATCHES])

    def flops(forward: Any) -> int:
        function = tf.function(forward, autograph=False, jit_compile=True)
        pixels = tf.TensorSpec((*BUCKET, 3), tf.uint8)
        text = str(function.experimental_get_compiler_ir(pixels)(stage="optimized_hlo"))
        return sum(price.flops for each, price in cost.instructions(hlo.parse(text)) if each.opcode != "compare")

    whole = flops(made.forward)
    assert whole > 8 * SIDE * SIDE * 3
    assert flops(made.divided(made.forward, BUCKET)) == pytest.approx(whole, rel=0.01)


def test_a_batch_that_is_small_is_left_as_it_is() -> None:
    weights = tf.Variable(noise(3, 5))
    function = scores(weights)
    assert micro_batches.divided(function, Bucket(2, SIDE, SIDE)) is function


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(lambda: traced(lambda pixels: (tf.cast(pixels[:, 0, 0], tf.float32),), batch=8), id="one size"),
        pytest.param(lambda: traced(lambda pixels: (tf.cast(pixels[:, 0], tf.float32),), side=None), id="any shape"),
        pytest.param(lambda: traced(lambda pixels: (tf.reduce_max(pixels),)), id="one number"),
        pytest.param(lambda: traced(old_branches), id="TensorFlow 1"),
        pytest.param(lambda: traced(eight), id="one size within"),
        pytest.param(lambda: traced(variable_in_a_loop), id="a variable in a loop"),
        pytest.param(
            lambda: traced(tf.function(lambda pixels: (tf.cast(pixels, tf.float32),), jit_compile=True)), id="XLA's own"
        ),
    ],
)
def test_what_may_not_be_called_for_a_part_of_a_batch_is_not_divided(function: Any) -> None:
    made = lowering.lower(function(), [Lowering.MICRO_BATCHES])
    assert made.divided(made.forward, BUCKET) is made.forward


@pytest.mark.parametrize(
    ("threads", "changes", "is_divided"),
    [
        (1, {}, True),
        (2, {}, False),
        (1, {"batch_dependence": "allow"}, False),
        (1, {"disable_lowerings": ["micro_batches"]}, False),
    ],
)
def test_only_independent_images_on_lanes_of_one_thread_are_divided(
    threads: int, changes: dict[str, Any], is_divided: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tf.config.threading, "get_intra_op_parallelism_threads", lambda: threads)
    settings = ModelSettings.model_validate({"name": "m", "source": "m.keras", **changes})
    lower = lowering.for_settings(settings)
    assert lower is not None
    weights = tf.Variable(noise(3, 5))
    made = lower(scores(weights))
    assert (made.divided(made.forward, BUCKET) is made.forward) is not is_divided
