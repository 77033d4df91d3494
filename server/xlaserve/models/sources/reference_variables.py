"""Reference variables of TensorFlow 1 (`VariableV2`), for which XLA has no operation: variables of today, with their
values, take their places."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import tensorflow as tf

from xlaserve.models.lowering.replay import Node, replay
from xlaserve.models.networks.any_batch import named
from xlaserve.programs.tf.frozen_graph import own_inputs

KINDS: Final = frozenset({"Variable", "VariableV2"})


class ReferenceVariables:
    """The reference variables of a function that TensorFlow has loaded; functions refer to their values weakly."""

    def __init__(self, function: Any) -> None:
        self._variables = _variables(function) if hasattr(function, "prune") else {}

    def __bool__(self) -> bool:
        return bool(self._variables)

    def read(self, node: Node) -> tf.Tensor | None:
        """Returns the value of a reference variable, for `replay`."""
        variable = self._variables.get(node.operation.name) if node.kind in KINDS else None
        return None if variable is None else variable.read_value()

    def replaced(self, function: Any) -> Any:
        """Returns their function without them; it takes its tensors in their order.

        Raises ValueError where it has branches or loops of TensorFlow 1.
        """
        structure = function.structured_outputs

        def run(*values: tf.Tensor) -> Any:
            return named(structure, replay(function, self.read, values))

        specs = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in own_inputs(function)]
        return tf.function(run, autograph=False).get_concrete_function(*specs)


def _variables(function: Any) -> Mapping[str, tf.Variable]:
    """Returns variables with the values of a function's own, by their names in its graph."""
    found = {
        one.name: reads[0].outputs[0]
        for one in function.graph.get_operations()
        if one.type in KINDS
        and (reads := [reader for reader in one.outputs[0].consumers() if reader.type == "Identity"])
    }
    if not found:
        return {}
    values = function.prune([], found)()
    return {name: tf.Variable(value, trainable=False) for name, value in values.items()}
