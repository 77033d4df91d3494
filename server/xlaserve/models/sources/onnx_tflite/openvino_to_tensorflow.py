"""Translates a model that OpenVINO has read to TensorFlow's operations.

OpenVINO's operations have the channels of images first, TensorFlow's kernels last. So values keep their tensors as the
kernels leave them, with the order of their axes: a transposition changes the order alone.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import tensorflow as tf
from tensorflow.python.ops import resource_variable_ops

from xlaserve.models.sources.onnx_tflite import openvino_operations
from xlaserve.models.sources.onnx_tflite.openvino_values import (
    Operation,
    Order,
    UntranslatableError,
    Value,
    transposed,
    value,
)

MIN_VARIABLE: Final = 4096
"""Numbers of a weight that becomes a variable; smaller ones are constants of the graph."""
NARROW: Final = frozenset({"f16", "bf16"})
ADDED: Final = re.compile(r"^serving_default_|:\d+$")
"""Parts of names that TensorFlow adds to those of inputs in TFLite files."""
INVALID: Final = re.compile(r"[^A-Za-z0-9_.\\/>-]")
"""Characters that names of TensorFlow's tensors don't have."""


class Translator:
    """Builds a model into the graph that is being traced."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._weights: dict[tuple[str, Order], tf.Variable] = {}
        self.inputs = [
            tf.TensorSpec(static_shape(each), _dtype(each), name=_input_name(_name(each, index, "input")))
            for index, each in enumerate(model.inputs)
        ]
        """The types of the inputs, with their names."""
        self.outputs = [_name(output, index) for index, output in enumerate(model.outputs)]
        """The names of the outputs."""

    def run(self, *given: tf.Tensor) -> dict[str, tf.Tensor]:
        """Returns the outputs for inputs as the file has them. Raises UntranslatableError."""
        parameters = {
            each.get_node().get_name(): tensor for each, tensor in zip(self._model.inputs, given, strict=True)
        }
        values: dict[tuple[str, int], Value] = {}
        results: dict[str, Value] = {}
        for node in self._model.get_ordered_ops():
            kind, name = node.get_type_name(), node.get_name()
            sources = [source.get_source_output() for source in node.inputs()]
            inputs = [values[source.get_node().get_name(), source.get_index()] for source in sources]
            match kind:
                case "Parameter":
                    made: Sequence[Value] = [value(parameters[name])]
                case "Constant":
                    made = [value(_array(node))]
                case "Result":
                    results[name] = inputs[0]
                    continue
                case _:
                    made = self._made(node, kind, inputs)
            values |= {(name, index): one for index, one in enumerate(made)}
        ends = [results[output.get_node().get_name()] for output in self._model.outputs]
        return {name: self._tensor(end) for name, end in zip(self.outputs, ends, strict=True)}

    def _made(self, node: Any, kind: str, inputs: Sequence[Value]) -> Sequence[Value]:
        if (translate := openvino_operations.TABLE.get(kind)) is None:
            raise UntranslatableError(f"the operation {kind}")
        attributes = node.get_attributes()
        if inputs and all(one.is_known for one in inputs):
            with tf.init_scope():
                operation = Operation(node, kind, attributes, inputs, transposed)
                return [value(np.asarray(transposed(one))) for one in translate(operation)]
        made = translate(Operation(node, kind, attributes, inputs, self._tensor))
        for one, output in zip(made, node.outputs(), strict=False):
            shape = static_shape(output)
            if shape is not None and not one.is_known:
                sides: list[int | None] = [None] * len(shape)
                for axis, place in enumerate(one.order):
                    sides[place] = shape[axis]
                one.tensor.set_shape(sides)
        return made

    def _tensor(self, one: Value, order: Order | None = None) -> Any:
        if not one.is_known:
            return transposed(one, order)
        array = transposed(one, order)
        if array.size < MIN_VARIABLE:
            return tf.constant(array)
        key = (str(id(one.tensor)), order or one.order)
        if key not in self._weights:
            with tf.init_scope():
                # Not tf.Variable, which a function being traced makes only once.
                self._weights[key] = resource_variable_ops.ResourceVariable(array, trainable=False)
                self._weights[key].kept = one.tensor  # whose id is the key
        return self._weights[key].read_value()


def _array(node: Any) -> Any:
    """Returns a constant; narrow floats as float32, which is what everything is computed in."""
    kind = node.get_element_type().get_type_name()
    data = node.get_data(dtype=np.float32) if kind == "bf16" else node.data
    return np.array(data, np.float32 if kind in NARROW else None)


def static_shape(output: Any) -> list[int | None] | None:
    """Returns the shape of an input or output of OpenVINO, None where its rank is not known."""
    shape = output.get_partial_shape()
    if shape.rank.is_dynamic:
        return None
    return [None if side.is_dynamic else side.get_length() for side in shape]


def _dtype(output: Any) -> tf.DType:
    kind = output.get_element_type().get_type_name()
    return tf.float32 if kind in NARROW else tf.as_dtype(output.get_element_type().to_dtype())


def _input_name(name: str) -> str:
    return INVALID.sub("_", ADDED.sub("", name))


def _name(port: Any, index: int, kind: str = "output") -> str:
    names = sorted(port.get_names())
    return names[0] if names else f"{kind}_{index}"
