"""TensorFlow models as executables: one function, traced and compiled once, for each mode and bucket."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import numpy as np
import tensorflow as tf

from xlaserve.config import Bucket, Mode
from xlaserve.engine.program import Compilation, Executable, Images, Outputs

Forward = Callable[[tf.Tensor], tuple[tf.Tensor, ...]]
"""uint8 `[batch, height, width, 3]` to float32, int32 or uint8 tensors whose first dimension is the batch."""

CHANNELS: Final = 3


class TensorFlowProgram:
    """A `Program` whose computation is `forward`, preprocessing included."""

    platform = "tensorflow"

    def __init__(self, forward: Forward) -> None:
        self._forward = forward
        self._any_batch: dict[tuple[int, int], Forward] = {}

    def compile(self, mode: Mode, bucket: Bucket) -> Compilation:
        """Makes the executable for `mode` and `bucket` and runs it. Raises what TensorFlow raises."""
        shape = (*bucket, CHANNELS)
        began = time.perf_counter()
        function = self._forward if mode is Mode.EAGER else self._trace(bucket, jit_compile=mode is Mode.XLA)
        traced = time.perf_counter()
        executable = _Executable(function, shape)
        blank = np.zeros(shape, np.uint8)
        executable(blank)
        first_run = time.perf_counter()
        if mode is Mode.EAGER:
            return Compilation(executable, trace_s=0.0, compile_s=0.0)
        executable(blank)
        first_run_s, later_run_s = first_run - traced, time.perf_counter() - first_run
        return Compilation(executable, trace_s=traced - began, compile_s=max(0.0, first_run_s - later_run_s))

    def _trace(self, bucket: Bucket, *, jit_compile: bool) -> Forward:
        # Python walks the model once for all batch sizes, which takes as long as compiling it; a bucket then wraps
        # the graph of that, and fixes its shape.
        size = (bucket.height, bucket.width)
        if size not in self._any_batch:
            self._any_batch[size] = _concrete(self._forward, (None, *size, CHANNELS), jit_compile=False)
        any_batch = self._any_batch[size]
        return _concrete(any_batch, (*bucket, CHANNELS), jit_compile=jit_compile)


def _concrete(function: Forward, shape: tuple[int | None, ...], *, jit_compile: bool) -> Forward:
    # jit_compile is never left to a default: graph mode must not turn into XLA where TensorFlow or Keras see fit.
    compiled = tf.function(function, autograph=False, jit_compile=jit_compile)
    concrete: Forward = compiled.get_concrete_function(tf.TensorSpec(shape, tf.uint8, name="pixels"))
    return concrete


class _Executable:
    """Calls `function` with images of one shape only."""

    def __init__(self, function: Forward, shape: tuple[int, ...]) -> None:
        self._function = function
        self._shape = shape

    def __call__(self, images: Images) -> Outputs:
        # Checked here because a concrete function takes a tensor of any shape, and XLA then compiles anew.
        if images.shape != self._shape or images.dtype != np.uint8:
            raise ValueError(f"pixels: expected uint8 {self._shape}, got {images.dtype} {images.shape}")
        # `numpy` waits for the result and copies it out of TensorFlow's memory.
        return tuple(output.numpy() for output in self._function(tf.convert_to_tensor(images)))


def stablehlo(executable: Executable) -> str:
    """Returns what XLA is given of an executable that `TensorFlowProgram` made, in StableHLO; lowers it anew."""
    if not isinstance(executable, _Executable):
        raise TypeError(f"expected an executable of TensorFlow, got {type(executable).__name__}")
    # A method of tf.function alone, which a concrete function does not have.
    function = tf.function(executable._function, autograph=False, jit_compile=True)
    lower = function.experimental_get_compiler_ir(tf.TensorSpec(executable._shape, tf.uint8, name="pixels"))
    return str(lower(stage="stablehlo"))
