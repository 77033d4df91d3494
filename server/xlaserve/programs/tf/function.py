"""Calls of TensorFlow's functions with arrays, without their walk over variables and structures in Python."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from tensorflow.python.framework import ops

from xlaserve.engine.program import Executable, FixedShape, Images, Outputs
from xlaserve.programs.tf.frozen_graph import memory_named
from xlaserve.programs.tf.lowered_function import Forward


def concrete(function: Forward, shape: tuple[int | None, ...], *, jit_compile: bool) -> Forward:
    """Traces `function` for uint8 images of `shape`; returns the concrete function."""
    # jit_compile is never left to a default: graph mode must not turn into XLA where TensorFlow or Keras see fit.
    compiled = tf.function(function, autograph=False, jit_compile=jit_compile)
    traced: Forward = compiled.get_concrete_function(tf.TensorSpec(shape, tf.uint8, name="pixels"))
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

    def __call__(self, images: Images) -> Outputs:
        """Runs `images` and returns the outputs. Raises OutOfDeviceMemory, or TensorFlow's errors."""
        with memory_named():
            # `numpy` waits for the result and copies it out of TensorFlow's memory.
            return tuple(output.numpy() for output in self._call(tf.convert_to_tensor(images)))


def _flat(concrete: Any) -> Forward:
    """Returns a call of a concrete function of one tensor without a walk over its variables and structures in Python.

    That takes 200 us for MobileNetV2's 54 weights, in which no other lane can start.
    """
    call, captured = concrete.inference_fn.call_flat, tuple(concrete.captured_inputs)
    return lambda images: call(images, *captured)


def stablehlo(executable: Executable) -> str:
    """Returns the StableHLO that XLA gets for an XLA executable of `TensorFlowProgram`; lowers it again."""
    if not isinstance(executable, FixedShape) or not isinstance(executable.run, Function):
        raise TypeError(f"expected an executable of TensorFlow's XLA, got {executable!r}")
    # A method of tf.function alone, which a concrete function does not have.
    function = tf.function(executable.run.function, autograph=False, jit_compile=True)
    lower = function.experimental_get_compiler_ir(tf.TensorSpec(executable.shape, tf.uint8, name="pixels"))
    return str(lower(stage="stablehlo"))
