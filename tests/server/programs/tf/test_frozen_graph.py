from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf
from numpy.typing import NDArray

from xlaserve.config import Bucket, Mode
from xlaserve.programs.tf import frozen_graph
from xlaserve.programs.tf.frozen_graph import FrozenGraph, UnfreezableError, freeze
from xlaserve.programs.tf.lowered_function import Forward
from xlaserve.programs.tf.tensorflow_program import TensorFlowProgram

BUCKET = Bucket(2, 8, 8)


def images(batch: int = 2) -> NDArray[np.uint8]:
    return np.random.default_rng(0).integers(0, 256, (batch, 8, 8, 3), np.uint8)


def concrete(forward: Forward) -> Forward:
    traced = tf.function(forward, autograph=False, jit_compile=False)
    function: Forward = traced.get_concrete_function(tf.TensorSpec((None, 8, 8, 3), tf.uint8))
    return function


class Normalized:
    """A convolution, batch normalization and a ReLU."""

    def __init__(self) -> None:
        noise = np.random.default_rng(1)
        self.weights = tf.Variable(noise.normal(size=(3, 3, 3, 4)), dtype=tf.float32)
        self.statistics = [tf.Variable(noise.uniform(0.5, 2, 4), dtype=tf.float32) for _ in range(4)]

    def __call__(self, pixels: tf.Tensor) -> tuple[tf.Tensor, ...]:
        scale, offset, mean, variance = self.statistics
        maps = tf.nn.conv2d(tf.cast(pixels, tf.float32), self.weights, strides=1, padding="SAME")
        normal = tf.raw_ops.FusedBatchNormV3(
            x=maps, scale=scale, offset=offset, mean=mean, variance=variance, is_training=False
        )
        return (tf.nn.relu(normal.y),)


@pytest.fixture
def normalized() -> Normalized:
    """Made here, because a graph refers to its variables weakly."""
    return Normalized()


def operations(graph: FrozenGraph, pixels: NDArray[np.uint8]) -> set[str]:
    """Returns the kinds of operation that really ran."""
    metadata = tf.compat.v1.RunMetadata()
    options = tf.compat.v1.RunOptions(trace_level=tf.compat.v1.RunOptions.FULL_TRACE)
    session = graph._session
    (fetch,) = (op.outputs[0] for op in session.graph.get_operations() if op.type == "Relu")
    session.run(fetch, {"pixels:0": pixels}, options, metadata)
    stats = [node for device in metadata.step_stats.dev_stats for node in device.node_stats]
    return {label.partition(" = ")[2].partition("(")[0] for label in (node.timeline_label for node in stats)} - {""}


def test_a_frozen_graph_computes_its_function_for_every_batch_size(normalized: Normalized) -> None:
    function = concrete(normalized)
    graph = FrozenGraph(freeze(function))
    for batch in (1, 2, 5):
        (expected,) = function(tf.constant(images(batch)))
        (got,) = graph(images(batch))
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-3)


def test_batch_norm_is_folded_and_what_follows_a_convolution_is_fused(normalized: Normalized) -> None:
    ran = operations(FrozenGraph(freeze(concrete(normalized))), images())
    assert any("FusedConv2D" in operation for operation in ran), ran
    assert not any("BatchNorm" in operation or operation in ("Relu", "Mul", "ReadVariableOp") for operation in ran), ran


def test_the_values_of_variables_are_those_of_the_moment(normalized: Normalized) -> None:
    graph = FrozenGraph(freeze(concrete(normalized)))
    (before,) = graph(images())
    normalized.weights.assign(normalized.weights * 0)
    (after,) = graph(images())
    np.testing.assert_array_equal(before, after)


def test_outputs_own_their_memory_even_where_they_are_constants() -> None:
    constant = tf.constant([[1.0], [2.0]])
    graph = FrozenGraph(freeze(concrete(lambda pixels: (constant,))))
    (first,) = graph(images())
    assert first.flags.owndata
    first[:] = 7
    np.testing.assert_array_equal(graph(images())[0], [[1], [2]])


def looked_up() -> Forward:
    numbers = tf.range(256, dtype=tf.int64)
    table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(numbers, numbers * 2), 0)
    return lambda pixels: (tf.cast(table.lookup(tf.cast(pixels, tf.int64)), tf.float32),)


def test_what_is_no_variable_can_not_be_frozen() -> None:
    with pytest.raises(UnfreezableError, match="neither a variable nor a constant"):
        freeze(concrete(looked_up()))


def test_weights_beyond_what_a_graph_holds_can_not_be_frozen(
    normalized: Normalized, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frozen_graph, "MAX_BYTES", 100)
    with pytest.raises(UnfreezableError, match="GiB of weights"):
        freeze(concrete(normalized))


def test_weights_that_freezing_has_no_memory_for_are_not_frozen(
    normalized: Normalized, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frozen_graph, "PEAK_COPIES", 2**50)
    with pytest.raises(UnfreezableError, match=r"GiB for a moment, and .* are free"):
        freeze(concrete(normalized))


def test_memory_that_the_process_has_freed_is_free(normalized: Normalized, monkeypatch: pytest.MonkeyPatch) -> None:
    available = iter([0, 2**40])
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=next(available)))
    freeze(concrete(normalized))


def test_graph_mode_runs_what_can_not_be_frozen_all_the_same_and_says_so() -> None:
    compilation = TensorFlowProgram(looked_up()).compile(Mode.GRAPH, BUCKET)
    (warning,) = compilation.warnings
    assert "graph mode runs slower than it could" in warning
    np.testing.assert_array_equal(compilation.executable(images())[0], images() * 2.0)
