"""Calls of TensorFlow's functions with arrays, without their walk over variables and structures in Python."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from numpy.typing import NDArray
from tensorflow.python.framework import ops

from xlaserve.engine.inputs import Inputs, InputSpec
from xlaserve.engine.program import Executable, FixedShape, Outputs
from xlaserve.programs.tf.frozen_graph import memory_named
from xlaserve.programs.tf.lowered_function import Forward


def specs(
    inputs: Inputs, batch: int | None, height: int | None = None, width: int | None = None
) -> tuple[tf.TensorSpec, ...]:
    """Returns what TensorFlow takes as the type of each input; None is a side of any length."""
    return tuple(tf.TensorSpec((batch, *_sides(each, height, width)), each.dtype, each.name) for each in inputs)


def _sides(spec: InputSpec, height: int | None, width: int | None) -> Sequence[int | None]:
    return spec.shape if height is None or width is None else spec.row_shape(height, width)


def concrete(function: Forward, inputs: Sequence[tf.TensorSpec], *, jit_compile: bool) -> Forward:
    """Traces `function` for `inputs`; returns the concrete function."""
    # jit_compile is never left to a default: graph mode must not turn into XLA where TensorFlow or Keras see fit.
    compiled = tf.function(function, autograph=False, jit_compile=jit_compile)
    traced: Forward = compiled.get_concrete_function(*inputs)
    return traced


class Function:
    """Calls a function of tensors with arrays. `warnings` are for users of the model."""

    def __init__(self, function: Forward, warnings: tuple[str, ...] = ()) -> None:
        self.function = function
        self.warnings = warnings
        self._call = _flat(function) if isinstance(function, tf.types.experimental.ConcreteFunction) else function

    def release_graph(self) -> None:
        """Frees the graph of a concrete function in Python, and the cached graphs of functions that it calls, for good.

        TensorFlow has its own, which is what runs.
        """
        graph = self.function.graph  # type: ignore[attr-defined]
        for called in graph._functions.values():
            called._cached_graph = None
        ops.dismantle_graph(graph)  # and what it knows of those

    def __call__(self, *rows: NDArray[Any]) -> Outputs:
        """Runs `rows` and returns the outputs. Raises OutOfDeviceMemory, or TensorFlow's errors."""
        with memory_named():
            # `numpy` waits for the result and copies it out of TensorFlow's memory.
            return tuple(output.numpy() for output in self._call(*map(tf.convert_to_tensor, rows)))


def _flat(concrete: Any) -> Forward:
    """Returns a call of a concrete function of tensors without a walk over its variables and structures in Python.

    That takes 200 us for MobileNetV2's 54 weights, in which no other lane can start.
    """
    call, captured = concrete.inference_fn.call_flat, tuple(concrete.captured_inputs)
    return lambda *inputs: call(*inputs, *captured)


def stablehlo(executable: Executable) -> str:
    """Returns the StableHLO that XLA gets for an XLA executable of `TensorFlowProgram`; lowers it again."""
    if not isinstance(executable, FixedShape) or not isinstance(executable.run, Function):
        raise TypeError(f"expected an executable of TensorFlow's XLA, got {executable!r}")
    # A method of tf.function alone, which a concrete function does not have.
    function = tf.function(executable.run.function, autograph=False, jit_compile=True)
    lower = function.experimental_get_compiler_ir(*specs(executable.inputs, *executable.bucket))
    return str(lower(stage="stablehlo"))
