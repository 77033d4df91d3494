from __future__ import annotations

import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from numpy.typing import NDArray
from tensorflow.compiler.tf2xla.python import xla
from tests.required import required

from xlaserve.config import Bucket, Mode
from xlaserve.engine.program import Compilation
from xlaserve.errors import ModelFailed, OutOfDeviceMemory
from xlaserve.models.networks.keras_runtime import keras
from xlaserve.programs.tf.lowered_function import Forward, Lower, Lowered
from xlaserve.programs.tf.tensorflow_program import TensorFlowProgram
from xlaserve.programs.xla_refusal import explain

BUCKET = Bucket(2, 4, 5)
ALL_MODES = pytest.mark.parametrize("mode", [mode for mode in Mode if mode is not Mode.AUTO])


def sums(pixels: tf.Tensor) -> tuple[tf.Tensor, ...]:
    values = tf.cast(pixels, tf.float32)
    return tf.reduce_sum(values, axis=(1, 2)), tf.reduce_max(values, axis=(1, 2, 3))


def has_no_xla_kernel(pixels: tf.Tensor) -> tuple[tf.Tensor, ...]:
    return (tf.image.resize(tf.cast(pixels, tf.float32), (8, 8), "bicubic"),)


def images(seed: int, bucket: Bucket = BUCKET) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (*bucket, 3), np.uint8)


@ALL_MODES
def test_every_output_comes_back_as_float32(mode: Mode) -> None:
    pixels = images(0)
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


def unchanged(function: Forward) -> Lowered:
    return Lowered(function, "")


def doubled(function: Any) -> Lowered:
    def run(pixels: tf.Tensor) -> tuple[tf.Tensor, ...]:
        return tuple(2 * output for output in function(pixels))

    spec = tf.TensorSpec(function.inputs[0].shape, tf.uint8)
    return Lowered(tf.function(run, autograph=False).get_concrete_function(spec), "doubling 1")


def test_xla_alone_runs_what_is_lowered_which_is_asked_for_once_for_each_size() -> None:
    asked = []

    def lower(function: Forward) -> Lowered:
        asked.append(function)
        return doubled(function)

    program = TensorFlowProgram(sums, lower)
    assert program.lowerings(BUCKET) == "doubling 1"
    pixels = images(5)
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
        pixels = images(3, bucket)
        np.testing.assert_allclose(compilation.executable(pixels)[0], pixels.sum(axis=(1, 2)))
        (warning,) = compilation.warnings
        assert warning.startswith("XLA runs 4x5 without lowerings, as a program failed with pooling: ")
        assert compilation.unlowered is None
    assert program.lowerings(BUCKET) == ""
    assert program.compile(Mode.GRAPH, BUCKET).warnings == ()
    assert len(asked) == 1


def test_programs_that_fail_at_the_same_time_are_all_made_without_lowerings() -> None:
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
    pixels = images(3)
    np.testing.assert_allclose(compilation.executable(pixels)[0], 2 * again.executable(pixels)[0])


def test_lowerings_that_another_thread_gives_up_meanwhile_fail_nothing() -> None:
    program = TensorFlowProgram(sums, failing)
    replaced = program._replaced

    def overtaken(bucket: Bucket) -> Lowered | None:
        program.leave_unlowered(bucket, "another failed")
        return replaced(bucket)

    program._replaced = overtaken  # type: ignore[method-assign]
    assert program.compile(Mode.XLA, BUCKET).warnings == ("another failed",)


def test_an_operation_that_xla_lacks_is_blamed_on_the_line_that_made_it_whatever_is_lowered() -> None:
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
    pixels = images(5)
    np.testing.assert_allclose(compilation.executable(pixels)[0], 2 * pixels.sum(axis=(1, 2)))
    again = compilation.unlowered(ModelFailed("it computes something else"))
    np.testing.assert_allclose(again.executable(pixels)[0], pixels.sum(axis=(1, 2)))
    assert again.warnings == (
        "XLA runs 4x5 without lowerings, as a program failed with doubling 1: it computes something else",
    )
    assert TensorFlowProgram(sums, unchanged).compile(Mode.XLA, BUCKET).unlowered is None


def test_python_walks_the_model_once_for_all_modes_and_batch_sizes() -> None:
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
    pixels = images(0)
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
    pixels = images(0, bucket)
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


def test_what_can_not_be_frozen_is_refused_for_any_size_where_xla_would_compile_it() -> None:
    table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer([1], [2.0]), 0.0)

    def run(pixels: tf.Tensor) -> tuple[tf.Tensor, ...]:
        looked_up = table.lookup(tf.cast(pixels, tf.int32))
        return compiled_by_xla(lambda values: (values + 1,))(looked_up)

    with pytest.raises(ModelFailed, match="neither a variable nor a constant"):
        TensorFlowProgram(run).any_size()


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


def test_the_reference_has_nothing_of_xla_even_where_a_model_asks_for_it() -> None:
    compiled = tf.function(has_no_xla_kernel, autograph=False, jit_compile=True)
    pixels = images(0)
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
def test_what_is_sealed_runs_on_without_its_network_and_compiles_nothing_more(lower: Lower | None) -> None:
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
    pixels = images(3)
    np.testing.assert_array_equal(in_graph(pixels)[0], pixels * 2.0)
    np.testing.assert_array_equal(in_xla(pixels)[0], pixels * (4.0 if lower is doubled else 2.0))
    with pytest.raises(RuntimeError, match="sealed"):
        program.compile(Mode.XLA, Bucket(1, 9, 9))
