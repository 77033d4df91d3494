from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf
from tests.server.models.lowering.tracing import TOLERANCE, compiled, difference, lowered, noise, trace

from xlaserve.config import Lowering
from xlaserve.models import lowering
from xlaserve.models.lowering import materialize

IMAGES = noise(2, 6, 7, 4)


@pytest.fixture
def kernel() -> tf.Variable:
    return tf.Variable(noise(3, 3, 4, 1))


def convolve(images: tf.Tensor, kernel: Any) -> tf.Tensor:
    return tf.nn.depthwise_conv2d(images, kernel, [1] * 4, "SAME")


def check(call: Any, text: str) -> Any:
    """Checks what is replaced in `call` and that it computes the same; returns the new function."""
    made = lowered(call, IMAGES)
    assert made.text == text
    assert difference(compiled(made, IMAGES), call(tf.constant(IMAGES))) < TOLERANCE
    return made.forward


def operations(function: Any) -> set[str]:
    return {each.type for each in function.graph.get_operations()}


def test_nested_functions_are_inlined_at_each_of_their_calls(kernel: tf.Variable) -> None:
    inner = tf.function(lambda images, by: by * convolve(images, kernel), autograph=False)
    outer = tf.function(lambda images: inner(images, 2.0) + inner(inner(images, 3.0), 4.0), autograph=False)
    function = check(lambda images: outer(images) + outer(images + 1.0), "depthwise 6")
    assert not operations(function) & {"PartitionedCall", "StatefulPartitionedCall", "DepthwiseConv2dNative"}


def test_weights_stay_arguments_of_which_the_new_values_count(kernel: tf.Variable) -> None:
    made = lowered(lambda images: convolve(images, kernel), IMAGES, {*Lowering} - {Lowering.MICRO_BATCHES})
    before = compiled(made, IMAGES)
    kernel.assign(2 * kernel)
    assert difference(compiled(made, IMAGES), 2 * before) < TOLERANCE
    function: Any = made.forward
    assert [id(each) for each in function.captured_inputs] == [id(kernel.handle)]
    assert list(function.graph.variables) == [kernel]


@pytest.mark.parametrize("kind", ["if", "while"])
def test_branches_and_loops_stay(kind: str, kernel: tf.Variable) -> None:
    def run(images: tf.Tensor) -> tf.Tensor:
        images = convolve(images, kernel)
        if kind == "if":
            return tf.cond(images[0, 0, 0, 0] > 0, lambda: convolve(images, kernel), lambda: images)
        return tf.while_loop(
            lambda index, _: index < 2, lambda index, of: (index + 1, convolve(of, kernel)), (0, images)
        )[1]

    assert "DepthwiseConv2dNative" not in operations(check(run, "depthwise 1"))


def test_a_function_with_branches_of_tensorflow_1_stays_whole(
    kernel: tf.Variable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(materialize, "xla_optimization_barrier", lambda values: values)  # XLA compiles no such function

    def branch(images: tf.Tensor) -> tf.Tensor:
        if_not, if_so = tf.raw_ops.Switch(data=images, pred=images[0, 0, 0, 0] > 0)
        return tf.raw_ops.Merge(inputs=[if_not, convolve(if_so, kernel)])[0]

    inner = tf.function(branch, autograph=False).get_concrete_function(tf.TensorSpec(IMAGES.shape))
    assert {"Switch", "Merge"} <= operations(inner)

    def call(images: tf.Tensor) -> tf.Tensor:
        return inner(tf.ensure_shape(convolve(images, kernel), IMAGES.shape))

    made = lowered(call, IMAGES)
    assert made.text == "depthwise 1"
    assert operations(made.forward) & {"PartitionedCall", "StatefulPartitionedCall"}
    assert difference(made.forward(tf.constant(IMAGES))[0], call(tf.constant(IMAGES))) < TOLERANCE


def test_what_can_not_be_built_again_stays(kernel: tf.Variable, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    total = tf.Variable(0.0)

    def counting(images: tf.Tensor) -> tf.Tensor:
        total.assign_add(1.0)
        return total * convolve(images, kernel)

    function = trace(counting, IMAGES.shape)
    made = lowering.lower(function, list(Lowering))
    assert (made.forward, made.text) == (function, "")


def test_a_failure_leaves_the_function_as_it_was(
    kernel: tf.Variable, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(node: Any) -> None:
        raise ValueError("no such thing")

    caplog.set_level("INFO")
    monkeypatch.setitem(lowering.SUBSTITUTES, Lowering.STEM, fail)
    function = trace(lambda images: convolve(tf.nn.relu(images), kernel), IMAGES.shape)
    made = lowering.lower(function, list(Lowering))
    assert (made.forward, made.text) == (function, "")
    assert "no such thing" in caplog.text


def test_long_chains_do_not_end_in_pythons_limit(kernel: tf.Variable) -> None:
    def chain(images: tf.Tensor) -> tf.Tensor:
        for _ in range(1500):
            images = tf.nn.relu(images)
        return convolve(images, kernel)

    assert lowered(chain, IMAGES).text == "depthwise 1"


def test_images_of_a_fixed_batch_are_taken(kernel: tf.Variable) -> None:
    function = trace(lambda images: convolve(images, kernel), IMAGES.shape)
    made = lowering.lower(function, list(Lowering))
    assert made.text == "depthwise 1"
    assert difference(compiled(made, IMAGES), convolve(IMAGES, kernel)) < TOLERANCE


def test_what_was_told_of_a_shape_is_kept(kernel: tf.Variable) -> None:
    def run(images: tf.Tensor) -> tf.Tensor:
        images = tf.reshape(images, tf.roll(tf.shape(images), 4, 0))
        images.set_shape((None, *IMAGES.shape[1:]))
        return convolve(images, kernel)

    check(run, "depthwise 1")


def test_outputs_keep_their_order_and_what_is_an_input_may_be_an_output(kernel: tf.Variable) -> None:
    made = lowered(lambda images: (images, convolve(images, kernel), tf.reduce_sum(kernel)), IMAGES)
    first, second, third = tf.function(made.forward, jit_compile=True, autograph=False)(tf.constant(IMAGES))
    assert difference(first, IMAGES) == 0
    assert difference(second, convolve(IMAGES, kernel)) < TOLERANCE
    assert difference(third, tf.reduce_sum(kernel)) < TOLERANCE
