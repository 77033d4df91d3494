"""Programs with lowerings, and without those that fail."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tests.required import required
from tests.server.programs.tf.functions import BUCKET, doubled, has_no_xla_kernel, noise, sums, unchanged

from xlaserve.config import Bucket, Lowering, Mode
from xlaserve.engine.program import Compilation
from xlaserve.errors import ModelFailed
from xlaserve.models.lowering import lower
from xlaserve.programs.tf.lowered_function import Forward, Lowered
from xlaserve.programs.tf.tensorflow_program import TensorFlowProgram
from xlaserve.programs.xla_refusal import explain


def test_only_xla_runs_lowered_code_and_it_is_asked_for_once_a_size() -> None:
    asked = []

    def lower(function: Forward) -> Lowered:
        asked.append(function)
        return doubled(function)

    program = TensorFlowProgram(sums, lower)
    assert program.lowerings(BUCKET) == "doubling 1"
    pixels = noise(seed=5)
    for bucket in (BUCKET, BUCKET._replace(batch=1)):
        in_xla, in_graph = (program.compile(mode, bucket).executable for mode in (Mode.XLA, Mode.GRAPH))
        np.testing.assert_allclose(in_xla(pixels[: bucket.batch])[0], 2 * in_graph(pixels[: bucket.batch])[0])
    assert len(asked) == 1
    assert TensorFlowProgram(sums).lowerings(BUCKET) == ""


def failing(function: Any) -> Lowered:
    """Replaces what XLA can compile by what it can't."""

    def run(pixels: tf.Tensor) -> tuple[tf.Tensor, ...]:
        with tf.name_scope("a/b/"):
            resized = tf.image.resize(tf.cast(pixels, tf.float32), (8, 8), "bicubic")
        totals, *rest = function(pixels)
        return totals + 0 * tf.reduce_sum(resized), *rest

    spec = tf.TensorSpec(function.inputs[0].shape, tf.uint8)
    made = tf.function(run, autograph=False).get_concrete_function(spec)
    return Lowered(made, "stem 1, pooling 2", {"b/": "stem", "a/b/": "pooling"})


def bright_ones(pixels: tf.Tensor) -> tuple[tf.Tensor]:
    """Returns the means of images that are bright and 0 of others: a dimension that XLA knows as it runs alone."""
    pixels = tf.cast(pixels, tf.float32)
    places = tf.where(tf.reduce_max(pixels, [1, 2, 3]) > 100)
    pooled = tf.nn.avg_pool2d(tf.gather(pixels, places[:, 0]), 3, 1, "SAME")
    return (tf.scatter_nd(places, tf.reduce_mean(pooled, [1, 2]), tf.shape(pixels, tf.int64)[0:4:3]),)


def test_a_lowering_without_a_dimension_that_it_needs_is_left_out_by_name() -> None:
    program = TensorFlowProgram(bright_ones, partial(lower, names={*Lowering}))
    assert "pooling" in program.lowerings(BUCKET)
    in_xla, in_graph = program.compile(Mode.XLA, BUCKET), program.compile(Mode.GRAPH, BUCKET)
    pixels = noise(seed=3)
    pixels[0] = 7
    np.testing.assert_allclose(in_xla.executable(pixels)[0], in_graph.executable(pixels)[0], rtol=1e-5)
    (warning,) = in_xla.warnings
    assert warning.startswith("XLA runs 4x5 without lowerings, as a program failed with pooling: ")


@pytest.mark.parametrize("buckets", [[BUCKET], [BUCKET, BUCKET._replace(batch=1)]])
def test_what_xla_can_not_compile_with_lowerings_is_compiled_without(buckets: list[Bucket]) -> None:
    asked = []

    def lower(function: Forward) -> Lowered:
        asked.append(function)
        return failing(function)

    program = TensorFlowProgram(sums, lower)
    assert program.lowerings(BUCKET) == "stem 1, pooling 2"
    for bucket in buckets:
        compilation = program.compile(Mode.XLA, bucket)
        pixels = noise(bucket, seed=3)
        np.testing.assert_allclose(compilation.executable(pixels)[0], pixels.sum(axis=(1, 2)))
        (warning,) = compilation.warnings
        assert warning.startswith("XLA runs 4x5 without lowerings, as a program failed with pooling: ")
        assert compilation.unlowered is None
    assert program.lowerings(BUCKET) == ""
    assert program.compile(Mode.GRAPH, BUCKET).warnings == ()
    assert len(asked) == 1


def test_programs_that_fail_together_are_all_made_without_lowerings() -> None:
    program, together = TensorFlowProgram(sums, failing), threading.Barrier(2, timeout=60)
    program.lowerings(BUCKET)

    def make(bucket: Bucket) -> Compilation:
        first = program.unlowered(bucket) is None
        try:
            return program.compile_once(Mode.XLA, bucket)
        finally:
            if first:
                together.wait()

    buckets = [BUCKET, BUCKET._replace(batch=1)]
    with ThreadPoolExecutor(2) as pool:
        made = list(pool.map(lambda bucket: program.with_fallback(bucket, partial(make, bucket)), buckets))
    assert [len(compilation.warnings) for compilation in made] == [1, 1]


def test_what_was_lowered_before_another_failed_can_be_made_without() -> None:
    program = TensorFlowProgram(sums, doubled)

    def make() -> Compilation:
        made = program.compile_once(Mode.XLA, BUCKET)
        program.leave_unlowered(BUCKET, "another failed")  # on another thread
        return made

    compilation = program.with_fallback(BUCKET, make)
    assert compilation.warnings == (), "it is lowered"
    again = required(compilation.unlowered)(ModelFailed("it computes something else"))
    assert again.warnings == ("another failed",)
    pixels = noise(seed=3)
    np.testing.assert_allclose(compilation.executable(pixels)[0], 2 * again.executable(pixels)[0])


def test_lowerings_that_another_thread_gives_up_meanwhile_fail_nothing() -> None:
    program = TensorFlowProgram(sums, failing)
    replaced = program._replaced

    def overtaken(bucket: Bucket) -> Lowered | None:
        program.leave_unlowered(bucket, "another failed")
        return replaced(bucket)

    program._replaced = overtaken  # type: ignore[method-assign]
    assert program.compile(Mode.XLA, BUCKET).warnings == ("another failed",)


def test_an_operation_that_xla_lacks_is_traced_to_its_line_when_lowered() -> None:
    with pytest.raises(tf.errors.InvalidArgumentError) as failure:
        TensorFlowProgram(has_no_xla_kernel, doubled).compile(Mode.XLA, BUCKET)
    refusal = explain(failure.value)
    assert refusal.operation == "ResizeBicubic"
    assert refusal.line is not None
    assert "in has_no_xla_kernel" in refusal.line


def test_a_lowered_program_that_answers_wrong_is_made_without_lowerings() -> None:
    program = TensorFlowProgram(sums, doubled)
    compilation = program.compile(Mode.XLA, BUCKET)
    assert compilation.unlowered is not None
    pixels = noise(seed=5)
    np.testing.assert_allclose(compilation.executable(pixels)[0], 2 * pixels.sum(axis=(1, 2)))
    again = compilation.unlowered(ModelFailed("it computes something else"))
    np.testing.assert_allclose(again.executable(pixels)[0], pixels.sum(axis=(1, 2)))
    assert again.warnings == (
        "XLA runs 4x5 without lowerings, as a program failed with doubling 1: it computes something else",
    )
    assert TensorFlowProgram(sums, unchanged).compile(Mode.XLA, BUCKET).unlowered is None
