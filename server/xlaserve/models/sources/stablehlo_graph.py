"""Translates a StableHLO module to TensorFlow's operations.

XLA alone runs StableHLO, as it is. As TensorFlow's operations a program is lowered for XLA on a CPU, and runs in graph
mode and in OpenVINO, like any other. One operation of StableHLO becomes about one of TensorFlow's.

Values that weights alone determine are computed here. Broadcasts and transpositions wait until an operation needs them:
most operations broadcast by themselves, and values that PyTorch computes with their channels first are computed with
their channels last, as TensorFlow's kernels and the lowerings need them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import tensorflow as tf
from tensorflow.python.ops import resource_variable_ops

from xlaserve.models.networks.heads import TensorShape
from xlaserve.models.sources import (
    stablehlo_activations,
    stablehlo_elementwise,
    stablehlo_operations,
    stablehlo_weights,
)
from xlaserve.models.sources.stablehlo_values import (
    Order,
    UnknownSizeError,
    UntranslatableModuleError,
    Value,
    identity,
    inverse,
    known,
    name_of,
)

if TYPE_CHECKING:
    from xlaserve.models.sources.jax_export import ExportedModel

MIN_VARIABLE: Final = 4096
"""Numbers of a weight that becomes a variable; smaller ones are constants of the graph."""
ANY_BATCH: Final = re.compile(
    r"Expected value >= 1 for dimension variable|Expected '\w+' to be greater or equal to [01],"
)
"""Messages of the assertions with which a module for any batch size begins, of JAX and of PyTorch."""
PLATFORM: Final = "_platform_index"
"""JAX's name of the argument that selects one of a module's platforms."""


@dataclass(frozen=True)
class Translated:
    """A function of pixels as a graph of TensorFlow's operations."""

    run: Any
    """A concrete function of pixels, channels last; gives the module's outputs."""
    weights: Sequence[tf.Variable]


def translate(exported: ExportedModel, pixels: TensorShape) -> Translated:
    """Translates an export for a CPU, if it was made for one, whose images are `pixels` with their channels last.

    Raises UntranslatableModuleError, and what TensorFlow raises.
    """
    platforms = exported.platforms
    shape = tuple(exported.image.shape or ())
    if not shape or None in shape[1:]:
        raise UntranslatableModuleError("it takes images of any size")
    order = (0, 3, 1, 2) if pixels is not exported.image else tuple(range(len(shape)))
    with stablehlo_weights.parsed(exported.module) as module:
        translator = Translator(module, platforms.index("cpu") if "cpu" in platforms else 0)

        def main(images: tf.Tensor) -> list[tf.Tensor]:
            image = Value(images, shape, order)
            return translator.main([image if one is None else known(one) for one in exported.arguments])

        spec = tf.TensorSpec(pixels.shape, pixels.dtype, name="pixels")
        run = tf.function(main, autograph=False, jit_compile=False).get_concrete_function(spec)
    return Translated(run, translator.weights)


class Translator:
    """Builds the function `main` of a module into the graph that is being traced."""

    def __init__(self, module: Any, platform: int) -> None:
        self._functions = {one.attributes["sym_name"].value: one for one in module.body.operations}
        self._platform = platform
        self._variables: dict[tuple[Value, Order], tf.Variable] = {}
        self._is_known = False

    @property
    def weights(self) -> list[tf.Variable]:
        """The variables that were made."""
        return list(self._variables.values())

    def main(self, arguments: Sequence[Value]) -> list[tf.Tensor]:
        """Returns the outputs for `arguments`. Raises UntranslatableModuleError."""
        function = self._functions["main"]
        attributes = function.arg_attrs if "arg_attrs" in function.attributes else []
        if any("jax.global_constant" in one for one in attributes):
            first = attributes[0]
            if "jax.global_constant" not in first or first["jax.global_constant"].value != PLATFORM:
                raise UntranslatableModuleError("it takes something else than images and weights")
            arguments = [known(np.int32(self._platform)), *arguments]
        outputs = self.call("main", arguments)
        return [self.whole(output) for output in outputs]

    def call(self, name: str, arguments: Sequence[Value]) -> list[Value]:
        """Returns the results of one of the module's functions for `arguments`."""
        (region,) = self._functions[name].regions
        (block,) = region.blocks
        return self.run(block, dict(zip(block.arguments, arguments, strict=True)))

    def run(self, block: Any, values: dict[Any, Value]) -> list[Value]:
        """Returns the values that `block` returns, with the `values` known so far."""
        for operation in block.operations:
            operands = [values[operand] for operand in operation.operands]
            if name_of(operation) in {"stablehlo.return", "func.return"}:
                return operands
            results = self._results(operation, operands, values)
            values |= dict(zip(operation.results, results, strict=True))
        raise UntranslatableModuleError("a block does not return")

    def _results(self, operation: Any, operands: Sequence[Value], values: dict[Any, Value]) -> Sequence[Value]:
        match name_of(operation):
            case name if operation.name == "func.call" and name not in stablehlo_operations.TABLE:
                return self.call(operation.attributes["callee"].value, operands)
            case "stablehlo.case" if operands[0].is_known:
                regions, index = list(operation.regions), int(operands[0].tensor)
                return self.run(regions[index if 0 <= index < len(regions) else -1].blocks[0], dict(values))
            case "stablehlo.custom_call" if ANY_BATCH.search(str(operation)):
                return []
            case "stablehlo.optimization_barrier":
                return operands
        return [self._result(operation, operands, values)]

    def _result(self, operation: Any, operands: Sequence[Value], values: dict[Any, Value]) -> Value:
        translate = stablehlo_operations.TABLE.get(name_of(operation))
        if translate is None:
            raise UntranslatableModuleError(f"{name_of(operation)} is not translated")
        if (activation := stablehlo_activations.of(operation, values)) is not None:
            translate, operands = stablehlo_elementwise.elementwise(activation.compute), [activation.argument]
        data = operands[:1] if name_of(operation) in stablehlo_operations.OF_A_SHAPE else operands
        if all(operand.is_known for operand in data):
            with suppress(UnknownSizeError), self._now():
                return _known_of(translate(self, operation, operands))
        return translate(self, operation, operands)

    @contextmanager
    def _now(self) -> Iterator[None]:
        """Has operations made here computed now, and not in the program."""
        was_known, self._is_known = self._is_known, True
        try:
            with tf.init_scope():
                yield
        finally:
            self._is_known = was_known

    def tensor(self, value: Value, order: Order | None = None, axes: Iterable[int] = ()) -> Any:
        """Returns the tensor of `value` with its axes in `order`, by default its own.

        Along `axes` it has the value's whole size.
        """
        tensor = value.tensor
        if order is not None and order != value.order:
            places = [value.order[axis] for axis in inverse(order)]
            tensor = (np if value.is_known else tf).transpose(tensor, places)
        order = order or value.order
        tensor = self._in_graph(tensor, value, order) if value.is_known else tensor
        repeated = {order[axis]: axis for axis in axes if tensor.shape[order[axis]] == 1 and value.shape[axis] != 1}
        if not repeated:
            return tensor
        sides = [value.shape[repeated[place]] if place in repeated else size for place, size in enumerate(tensor.shape)]
        sizes = [
            side
            if side is not None
            else self._unknown_size(value, repeated[place])
            if place in repeated
            else tf.shape(tensor)[place]
            for place, side in enumerate(sides)
        ]
        return tf.ensure_shape(tf.broadcast_to(tensor, sizes), sides)

    def whole(self, value: Value) -> tf.Tensor:
        """Returns `value` as it is, with all its axes in order and nothing left to repeat."""
        return self.tensor(value, identity(value.shape), range(len(value.shape)))

    def _unknown_size(self, value: Value, axis: int) -> Any:
        if value.sizes is None or self._is_known:
            raise UnknownSizeError("a size is not known")
        return value.sizes.tensor[value.sizes.places[axis]]

    def _in_graph(self, array: Any, value: Value, order: Order) -> Any:
        if self._is_known or array.size < MIN_VARIABLE:
            return tf.constant(array)
        if (value, order) not in self._variables:
            with tf.init_scope():
                # Not tf.Variable, which a function being traced makes only once.
                self._variables[value, order] = resource_variable_ops.ResourceVariable(array, trainable=False)
        return self._variables[value, order].read_value()


def _known_of(value: Value) -> Value:
    """Returns `value`, which was computed from weights, as an array."""
    return value if value.is_known else replace(value, tensor=np.asarray(value.tensor.numpy()))
