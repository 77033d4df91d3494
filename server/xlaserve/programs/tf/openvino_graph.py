"""Traced functions of TensorFlow in OpenVINO: converted, and compiled with the threads that TensorFlow was given."""

from __future__ import annotations

from typing import Any, Final

import tensorflow as tf
from tensorflow.python.framework import ops

from xlaserve.config import Mode, Precision
from xlaserve.errors import ModelFailed
from xlaserve.programs.openvino.openvino_program import (
    CompiledModel,
    ConvertedGraph,
    Shapes,
    Threads,
    at_full_priority,
    convert,
    load,
)
from xlaserve.programs.tf.device import usable_cores
from xlaserve.programs.tf.frozen_graph import UnfreezableError, arguments, portable

ON_CPU_ONLY: Final = "mode openvino runs on a CPU only: expected device: cpu, or other modes"


def check_openvino() -> None:
    """Raises ModelFailed where OpenVINO can't be used."""
    if tf.config.get_visible_devices("GPU"):
        raise ModelFailed(ON_CPU_ONLY, lacks_mode=True)
    load()


def in_openvino(
    converted: ConvertedGraph, precision: Precision, shapes: Shapes, *, is_profiled: bool = False
) -> CompiledModel:
    """Compiles a converted graph for inputs of `shapes`; with `is_profiled` it measures each layer's time.

    Raises ModelFailed.
    """
    return converted.compile(shapes, precision, openvino_threads(), is_profiled=is_profiled)


def openvino_threads() -> Threads:
    """Returns the threads of OpenVINO: those that TensorFlow was given when the device was chosen."""
    lanes = tf.config.threading.get_inter_op_parallelism_threads() or 1
    return Threads(lanes, max(lanes, tf.config.threading.get_intra_op_parallelism_threads() or usable_cores()))


def converted(function: Any) -> ConvertedGraph:
    """Returns a concrete function as OpenVINO's graph, converted at full priority. Raises ModelFailed."""
    return at_full_priority(lambda: _convert(function))


def _convert(function: Any) -> ConvertedGraph:
    try:
        graph = portable(function)
    except UnfreezableError as error:
        raise ModelFailed(f"modes: {Mode.OPENVINO} runs frozen graphs alone, and this can be none: {error}") from error
    made = convert(graph, arguments(function), [output.name for output in function.outputs])
    ops.dismantle_graph(graph)  # a copy of the weights
    return made
