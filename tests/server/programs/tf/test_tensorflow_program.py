from __future__ import annotations

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from numpy.typing import NDArray
from tensorflow.compiler.tf2xla.python import xla
from tests.server.programs.tf.functions import ALL_MODES, BUCKET, doubled, has_no_xla_kernel, noise, sums, unchanged

from xlaserve.config import Bucket, Mode
from xlaserve.errors import ModelFailed, OutOfDeviceMemory
from xlaserve.models.networks.keras_runtime import keras
from xlaserve.programs.tf.lowered_function import Forward, Lower
from xlaserve.programs.tf.tensorflow_program import TensorFlowProgram


@ALL_MODES
def test_every_output_comes_back_as_float32(mode: Mode) -> None:
    pixels = noise()
    totals, brightest = TensorFlowProgram(sums).compile(mode, BUCKET).executable(pixels)
    assert totals.dtype == brightest.dtype == np.float32
    np.testing.assert_allclose(totals, pixels.sum(axis=(1, 2)))
    np.testing.assert_allclose(brightest, pixels.max(axis=(1, 2, 3)))


def test_auto_is_no_program_of_its_own() -> None:
    with pytest.raises(ValueError, match="expected one that is compiled, got auto"):
        TensorFlowProgram(sums).compile(Mode.AUTO, BUCKET)


@ALL_MODES
def test_outputs_own_their_memory(mode: Mode) -> None:
    def identity(pixels: tf.Tensor) -> tuple[tf.Tensor, ...]:
        return (tf.cast(pixels, tf.float32),)

    executable = TensorFlowProgram(identity).compile(mode, BUCKET).executable
    pixels = noise()
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
        compilation.executable(noise(seed=seed))
    assert len(traced) == 1
    assert compilation.trace_s > 0
    assert compilation.compile_s > 0


def test_python_walks_the_model_once_for_all_modes_and_batch_sizes() -> None:
    traced = []

    def counted(pixels: tf.Tensor) -> tuple[tf.Tensor, ...]:
        traced.append(pixels.shape.as_list())
        return sums(pixels)

    program = TensorFlowProgram(counted)
    for bucket in (Bucket(1, 4, 5), Bucket(2, 4, 5), Bucket(2, 6, 6)):
        for mode in (Mode.XLA, Mode.GRAPH):
            pixels = noise(bucket)
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
    program = TensorFlowProgram(has_no_xla_kernel)
    program.compile(Mode.EAGER, BUCKET)
    program.compile(Mode.GRAPH, BUCKET)
    with pytest.raises(tf.errors.InvalidArgumentError, match="ResizeBicubic"):
        program.compile(Mode.XLA, BUCKET)


def compiled_by_xla(function: Forward) -> Forward:
    """Returns a forward of which XLA has to compile `function`."""
    inner = tf.function(function, jit_compile=True, autograph=False)
    return lambda pixels: tuple(output * 2 for output in inner(pixels))


def test_what_a_model_would_have_xla_compile_runs_without_it_in_graph_mode() -> None:
    program = TensorFlowProgram(compiled_by_xla(has_no_xla_kernel))
    pixels = noise()
    (expected,) = has_no_xla_kernel(tf.constant(pixels))
    for run in (program.compile(Mode.GRAPH, BUCKET).executable, program.any_size()):
        np.testing.assert_allclose(run(pixels)[0], expected * 2)


def takes_channels_first() -> bool:
    try:
        tf.nn.conv2d(tf.zeros((1, 3, 4, 4)), tf.zeros((1, 1, 3, 3)), 1, "SAME", data_format="NCHW")
    except tf.errors.UnimplementedError:
        return False
    return True


@pytest.mark.parametrize(
    "options", [{}, {"strides": 2}, {"strides": (1, 2)}, {"dilation_rate": 2}, {"data_format": "channels_first"}]
)
@pytest.mark.parametrize("groups", [3, 6])
@pytest.mark.parametrize("precision", ["float32", "mixed_bfloat16"])
def test_convolutions_with_groups_are_the_same_without_xla(
    precision: str, groups: int, options: dict[str, Any]
) -> None:
    if options.get("data_format") == "channels_first" and not takes_channels_first():
        pytest.skip("TensorFlow takes channels first only with oneDNN, which it uses on processors with AVX-512")
    layer = keras.layers.Conv2D(12, 3, groups=groups, padding="same", dtype=precision, **options)

    def convolve(pixels: tf.Tensor) -> tuple[tf.Tensor, ...]:
        values = tf.tile(tf.cast(pixels, tf.float32) / 255, (1, 1, 1, 2))
        if layer.data_format == "channels_first":
            values = tf.transpose(values, (0, 3, 1, 2))
        return (tf.cast(layer(values), tf.float32),)

    program, bucket = TensorFlowProgram(convolve), Bucket(2, 9, 8)
    pixels = noise(bucket)
    (expected,) = convolve(tf.constant(pixels))
    tolerance = 1e-5 if precision == "float32" else 0.02
    for run in (program.compile(Mode.GRAPH, bucket).executable, program.any_size()):
        np.testing.assert_allclose(run(pixels)[0], expected, atol=tolerance * np.abs(expected).max())


def test_what_xla_alone_can_run_is_refused_for_any_size() -> None:
    def run(pixels: tf.Tensor) -> tuple[tf.Tensor, ...]:
        values = tf.cast(pixels, tf.float32)
        return (xla.dynamic_slice(values, [0, 0, 0, 0], tf.shape(values)),)

    with pytest.raises(ModelFailed, match="unmatched: expected reject, as XLA would compile the model for each size"):
        TensorFlowProgram(compiled_by_xla(run)).any_size()


def test_what_cannot_be_frozen_is_refused_for_any_size() -> None:
    table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer([1], [2.0]), 0.0)

    def run(pixels: tf.Tensor) -> tuple[tf.Tensor, ...]:
        looked_up = table.lookup(tf.cast(pixels, tf.int32))
        return compiled_by_xla(lambda values: (values + 1,))(looked_up)

    with pytest.raises(ModelFailed, match="neither a variable nor a constant"):
        TensorFlowProgram(run).any_size()


@ALL_MODES
def test_several_threads_get_the_answers_that_one_gets(mode: Mode) -> None:
    executable = TensorFlowProgram(sums).compile(mode, BUCKET).executable
    inputs = [noise(seed=seed) for seed in range(40)]
    alone = [executable(pixels) for pixels in inputs]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(executable, inputs))
    for one, other in zip(alone, together, strict=True):
        for expected, got in zip(one, other, strict=True):
            np.testing.assert_array_equal(expected, got)


def test_the_reference_has_nothing_of_xla_even_where_a_model_asks_for_it() -> None:
    compiled = tf.function(has_no_xla_kernel, autograph=False, jit_compile=True)
    pixels = noise()
    with pytest.raises(tf.errors.OpError):
        compiled(tf.constant(pixels))
    np.testing.assert_array_equal(TensorFlowProgram(compiled).reference(pixels), has_no_xla_kernel(pixels))
    with pytest.raises(tf.errors.OpError):  # the switch is back where it was
        compiled(tf.constant(pixels))


def test_a_lack_of_memory_has_a_name() -> None:
    def large(pixels: tf.Tensor) -> tuple[tf.Tensor, ...]:
        return (tf.fill((len(pixels), 2**42), 1.0),)

    with pytest.raises(OutOfDeviceMemory) as raised:
        TensorFlowProgram(large).compile(Mode.EAGER, BUCKET)
    assert isinstance(raised.value.__cause__, tf.errors.ResourceExhaustedError)


def test_what_is_dismantled_is_gone_without_the_garbage_collector() -> None:
    def operations() -> int:
        return sum(isinstance(each, tf.Operation) for each in gc.get_objects())

    def many(pixels: tf.Tensor) -> tuple[tf.Tensor, ...]:
        total = tf.cast(pixels, tf.float32)
        for _ in range(200):
            total += 1.0
        return (total,)

    gc.collect()
    gc.disable()
    try:
        before = operations()
        program = TensorFlowProgram(many)
        made = [program.compile(mode, BUCKET) for mode in (Mode.XLA, Mode.GRAPH)]
        assert operations() > before + 400
        program.dismantle()
        del program, made
        assert operations() < before + 50
    finally:
        gc.enable()


@pytest.mark.parametrize("lower", [None, unchanged, doubled])
def test_a_sealed_program_runs_without_its_network_and_compiles_no_more(lower: Lower | None) -> None:
    class Network:
        def __init__(self) -> None:
            self.weight = tf.Variable(2.0)

        def __call__(self, pixels: tf.Tensor) -> tuple[tf.Tensor, ...]:
            return (tf.cast(pixels, tf.float32) * self.weight,)

    network = Network()
    left = weakref.ref(network)
    program = TensorFlowProgram(network, lower)
    in_xla, in_graph = (program.compile(mode, BUCKET).executable for mode in (Mode.XLA, Mode.GRAPH))
    program.seal()
    del network
    gc.collect()
    assert left() is None
    pixels = noise(seed=3)
    np.testing.assert_array_equal(in_graph(pixels)[0], pixels * 2.0)
    np.testing.assert_array_equal(in_xla(pixels)[0], pixels * (4.0 if lower is doubled else 2.0))
    with pytest.raises(RuntimeError, match="sealed"):
        program.compile(Mode.XLA, Bucket(1, 9, 9))
