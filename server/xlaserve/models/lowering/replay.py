"""A traced function built again, operation by operation, with other subgraphs in the place of some.

Functions that it calls are built into it, as a SavedModel consists of such calls. Bodies of loops and branches stay
unchanged. Weights stay arguments. Operations that no output depends on are left out, such as assertions, and so are
edges that only order operations: no operation here changes a variable. Narrower types may become float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, Final

import tensorflow as tf
from tensorflow.python.eager import context, execute

from xlaserve.programs.tf.definitions import NARROW, has_narrow, is_narrow, widen

CALLS: Final = frozenset({"PartitionedCall", "StatefulPartitionedCall"})
PASSED_ON: Final = frozenset({"Identity", "IdentityN", "StopGradient", "PreventGradient"})
"""Operations whose outputs are their inputs."""
OLD_CONTROL_FLOW: Final = frozenset({"Switch", "Merge", "Enter", "Exit", "NextIteration", "LoopCond"})
"""Operations of branches and loops in TensorFlow 1, which have cycles, and edges that order without data."""

MOST_CONSTANT: Final = 64
"""Numbers of a tensor from outside a graph that become a constant of the graph."""
READ: Final = "ReadVariableOp"
SOURCES: Final = frozenset({"Const", READ})
"""Operations that give numbers of the type that they are stored in."""
FIXED: Final = frozenset({"Bitcast", "XlaCallModule"})
"""Operations that mean something else, or nothing, in other types."""

Substitute = Callable[["Node"], tf.Tensor | None]
"""Returns the tensor that replaces the operation's only output, made in the new graph; None keeps the operation."""


class GraphTensor:
    """A tensor of the old graph: an output of `node`, or an argument of the whole function.

    `tensor` is its tensor in the new graph, where that is not simply a copy.
    """

    def __init__(self, node: Node | None = None, index: int = 0, tensor: tf.Tensor | None = None) -> None:
        self.node = node
        self.index = index
        if tensor is not None:
            self.tensor = tensor

    @cached_property
    def tensor(self) -> tf.Tensor:
        """The tensor in the new graph, made when it is first read: an unread weight must not become an argument."""
        assert self.node is not None
        if self.node.is_stored_narrow and self.known is not None:
            return self.known
        pending = [self.node]
        while pending:  # and not by calls within calls, of which Python allows a thousand
            missing = [value.node for value in pending[-1].inputs if value.node is not None and not value.is_made]
            pending += missing
            if not missing:
                pending.pop().copied  # noqa: B018
        made = self.node.copied[self.index]
        return _wide_tensor(made) if self.node.is_wide else made

    @property
    def is_made(self) -> bool:
        """Whether the tensor has been made in the new graph."""
        return "tensor" in vars(self) or "copied" in vars(self.node) or bool(self.node and self.node.is_stored_narrow)

    @property
    def is_of_weights(self) -> bool:
        """Whether weights and constants alone determine it."""
        return not tf.is_symbolic_tensor(self.tensor) if self.node is None else self.node.is_of_weights

    @cached_property
    def known(self) -> tf.Tensor | None:
        """The numbers themselves, where weights and constants alone determine them; shares a variable's memory."""
        if not self.is_of_weights:
            return None
        if self.node is None:
            return self.tensor
        if (results := self.node.results) is None:
            return None
        with tf.init_scope():
            return _wide_tensor(results[self.index]) if self.node.is_wide else results[self.index]

    @property
    def shape(self) -> tf.TensorShape:
        """The shape, as far as it is known."""
        if self.node is not None and self.is_of_weights:  # the shape of a weight is known without making it an argument
            shape = self.node.operation.outputs[self.index].shape
            return shape if shape.is_fully_defined() or self.known is None else self.known.shape
        return self.tensor.shape


@dataclass(eq=False)
class Node:
    """An operation of the old graph, and its inputs."""

    operation: Any
    inputs: Sequence[GraphTensor]
    name: str
    """The operation's name in the new graph."""
    is_wide: bool = False
    """Whether it computes in float32 where it computed in less."""
    keeps_shapes: bool = True
    """Whether its outputs have the shapes that they had."""

    @property
    def kind(self) -> str:
        """The operation's type."""
        return str(self.operation.type)

    def attribute(self, name: str) -> Any:
        """Returns an attribute."""
        return self.operation.get_attr(name)

    @cached_property
    def is_of_weights(self) -> bool:
        """Whether weights and constants alone determine what it computes."""
        is_pure = self.kind == READ or not self.operation.op_def.is_stateful
        return is_pure and all(value.is_of_weights for value in self.inputs)

    @cached_property
    def is_widened(self) -> bool:
        """Whether it computes in wider types than the old one."""
        return self.is_wide and self.kind not in SOURCES

    @cached_property
    def is_stored_narrow(self) -> bool:
        """Whether it gives numbers of a narrow type that are to be widened."""
        return self.is_wide and self.kind in SOURCES and self.operation.outputs[0].dtype in NARROW

    @cached_property
    def _attributes(self) -> dict[str, Any]:
        attributes = {name: value for name, value in self.operation.node_def.attr.items() if name[0] != "_"}
        if self.is_widened:
            for value in attributes.values():
                widen(value)
        return attributes

    @cached_property
    def copied(self) -> Sequence[tf.Tensor]:
        """The outputs of the same operation in the new graph."""
        graph: Any = tf.compat.v1.get_default_graph()
        attributes = self._attributes
        if self.is_wide and self.kind in FIXED and any(map(is_narrow, self.operation.node_def.attr.values())):
            raise ValueError(f"it has {self.kind} in less than float32")
        for function in _functions(self.operation, attributes.values()):
            if self.is_wide and has_narrow(function):
                raise ValueError("it has branches or loops in less than float32")
            graph._add_function_recursive(function)
        copy = graph.create_op(
            self.kind,
            [_in_graph(value.tensor) for value in self.inputs],
            [tf.float32 if self.is_widened and each.dtype in NARROW else each.dtype for each in self.operation.outputs],
            attrs=attributes,
            name=self.name,
        )
        if self.keeps_shapes:
            for made, original in zip(copy.outputs, self.operation.outputs, strict=True):
                made.set_shape(original.shape)  # the model's author may have set it
        return tuple(copy.outputs)

    def _argument(self, name: str) -> Any:
        value = self.attribute(name)
        return tf.float32 if self.is_widened and isinstance(value, tf.DType) and value in NARROW else value

    @cached_property
    def results(self) -> Sequence[tf.Tensor] | None:
        """The outputs, computed from weights; None where an input is not known or TensorFlow can't run it."""
        inputs = [value.known for value in self.inputs]
        if any(value is None for value in inputs):
            return None
        with tf.init_scope():
            if self.kind == "Const":
                return [tf.constant(tf.make_ndarray(self.attribute("value")))]
            attributes = ((name, self._argument(name)) for name in self._attributes)
            try:
                results: Sequence[tf.Tensor] = execute.quick_execute(
                    self.kind, len(self.operation.outputs), inputs, tuple(chain(*attributes)), context.context()
                )
            except (tf.errors.OpError, TypeError, ValueError):  # an operation of XLA's own, for example
                return None
        return results


def replay(
    function: Any,
    substitute: Substitute,
    inputs: Sequence[tf.Tensor],
    *,
    is_wide: bool = False,
    keeps_shapes: bool = True,
) -> tuple[tf.Tensor, ...]:
    """Builds a concrete function of tensors into the graph that is being traced; returns its outputs for `inputs`.

    What is in bfloat16 or float16 becomes float32 with `is_wide`, other than the outputs. Without `keeps_shapes` those
    of `inputs` may be others than the function was made for. Raises ValueError where its own control flow forbids that.
    """
    graph: Any = tf.compat.v1.get_default_graph()
    for variable in function.variables:
        graph.watch_variable(variable)  # freezing looks for them there
    captured = function.captured_inputs
    if is_wide:
        inputs = list(map(_wide_tensor, inputs))
        with tf.init_scope():
            captured = list(map(_wide_tensor, captured))
    arguments = [GraphTensor(tensor=tensor) for tensor in (*inputs, *captured)]
    outputs = _replay(function.graph, arguments, substitute, "", is_wide=is_wide, keeps_shapes=keeps_shapes)
    if outputs is None:
        raise ValueError("it has branches or loops of TensorFlow 1")
    return tuple(
        tf.cast(value.tensor, output.dtype) if value.tensor.dtype != output.dtype else value.tensor
        for value, output in zip(outputs, function.outputs, strict=True)
    )


def widened_cast(node: Node) -> tf.Tensor | None:
    """Replaces casts from float32 to a narrow type by their input; `replay` makes all other operations wide.

    XLA's CPU backend computes narrow types in float32 and rounds after each operation, also within the sums that
    convolutions are lowered to, which keeps it from vectorizing them.
    """
    if node.kind != "Cast" or node.operation.outputs[0].dtype not in NARROW:
        return None
    images = node.inputs[0].tensor
    return images if images.dtype == tf.float32 else None


def _in_graph(tensor: tf.Tensor) -> tf.Tensor:
    """Returns small numbers from outside the graph as constants: XLA has to know sizes when it compiles."""
    is_outside = not tf.is_symbolic_tensor(tensor) and tensor.dtype != tf.resource
    return tf.constant(tensor.numpy()) if is_outside and tensor.shape.num_elements() <= MOST_CONSTANT else tensor


def _wide_tensor(tensor: tf.Tensor) -> tf.Tensor:
    return tf.cast(tensor, tf.float32) if tensor.dtype in NARROW else tensor


def _replay(
    graph: Any,
    arguments: Iterable[GraphTensor],
    substitute: Substitute,
    scope: str,
    *,
    is_wide: bool,
    keeps_shapes: bool,
) -> list[GraphTensor] | None:
    operations = _needed(graph)
    if any(operation.type in OLD_CONTROL_FLOW for operation in operations):
        return None
    values = {tensor.ref(): value for tensor, value in zip(graph.inputs, arguments, strict=True)}
    for operation in operations:
        if operation.outputs[0].ref() in values:  # an argument
            continue
        inputs = [values[tensor.ref()] for tensor in operation.inputs]
        node = Node(operation, inputs, scope + operation.name, is_wide, keeps_shapes)
        outputs = _outputs(node, substitute)
        values |= {tensor.ref(): value for tensor, value in zip(operation.outputs, outputs, strict=False)}
    return [values[tensor.ref()] for tensor in graph.outputs]


def _needed(graph: Any) -> list[Any]:
    """Returns the operations that the outputs of a graph depend on, in their order."""
    needed = {tensor.op for tensor in graph.inputs}
    pending = [tensor.op for tensor in graph.outputs]
    while pending:
        operation = pending.pop()
        if operation not in needed:
            needed.add(operation)
            pending += [tensor.op for tensor in operation.inputs]
    return [operation for operation in graph.get_operations() if operation in needed]


def _outputs(node: Node, substitute: Substitute) -> Sequence[GraphTensor]:
    if node.kind in PASSED_ON:
        return node.inputs
    if node.kind in CALLS:
        (called,) = _functions(node.operation, [node.operation.node_def.attr["f"]])
        inlined = _replay(
            called.graph,
            node.inputs,
            substitute,
            f"{node.name}/",
            is_wide=node.is_wide,
            keeps_shapes=node.keeps_shapes,
        )
        if inlined is not None:
            return inlined
    if not node.is_of_weights or node.kind == READ:
        with tf.name_scope(f"{node.name}/"):
            substituted = substitute(node)
        if substituted is not None:
            return [GraphTensor(node, tensor=substituted)]
    return [GraphTensor(node, index) for index in range(len(node.operation.outputs))]


def _functions(operation: Any, attributes: Iterable[Any]) -> list[Any]:
    """Returns the functions that attributes of `operation` name."""
    names = [each.name for value in attributes for each in (value.func, *value.list.func) if each.name]
    return [operation.graph._get_function(name) for name in names]
