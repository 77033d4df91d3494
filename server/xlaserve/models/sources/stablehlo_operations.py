"""StableHLO's operations as TensorFlow's (https://openxla.org/stablehlo/spec): the table, and shapes and reductions."""

from __future__ import annotations

import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import tensorflow as tf
from jax.extend.mlir.dialects import stablehlo

from xlaserve.models.sources import stablehlo_slices, stablehlo_windows
from xlaserve.models.sources.stablehlo_elementwise import by_type, compare, convert, divide, elementwise
from xlaserve.models.sources.stablehlo_values import (
    Graph,
    Shape,
    Sizes,
    Translate,
    UntranslatableModuleError,
    Value,
    array,
    dtype,
    identity,
    integers,
    inverse,
    known,
    shape,
    side,
)


def _constant(graph: Graph, operation: Any, operands: Sequence[Value]) -> Value:
    sides = shape(operation.results[0])
    return Value(array(operation.attributes["value"]), sides, identity(sides))


def _iota(graph: Graph, operation: Any, operands: Sequence[Value]) -> Value:
    sides, axis = shape(operation.results[0]), int(operation.attributes["iota_dimension"])
    sizes = _sizes(graph, operands, sides)
    count = sizes.tensor[axis] if sizes and sides[axis] is None else sides[axis]
    numbers = tf.cast(tf.range(count), dtype(operation.results[0]))
    compact = [-1 if one == axis else 1 for one in range(len(sides))]
    return Value(tf.reshape(numbers, compact), sides, identity(sides), sizes)


def _sizes(graph: Graph, shapes: Sequence[Value], sides: Shape) -> Sizes | None:
    """Returns the sizes of a result whose shape is the only one of `shapes`, if there is one."""
    return Sizes(graph.whole(shapes[0]), identity(sides)) if shapes else None


def _broadcast(graph: Graph, operation: Any, operands: Sequence[Value]) -> Value:
    """Gives the operand sides of 1 where the result repeats it; the repeating itself waits until it is needed."""
    (operand, *shapes), sides = operands, shape(operation.results[0])
    places = integers(operation, "broadcast_dimensions")
    sizes = _sizes(graph, shapes, sides)
    if places == list(range(len(sides))):
        return Value(graph.tensor(operand), sides, operand.order, sizes)
    tensor = graph.tensor(operand, identity(operand.shape))
    compact: list[Any] = [1] * len(sides)
    for axis, place in enumerate(places):
        compact[place] = tensor.shape[axis]
    if list(places) != sorted(places):
        tensor = tf.transpose(tensor, np.argsort(places))
    return Value(_reshaped(tensor, compact), sides, identity(sides), sizes)


def _reshape(graph: Graph, operation: Any, operands: Sequence[Value]) -> Value:
    operand, sides = operands[0], shape(operation.results[0])
    before = [size for size in operand.shape if size != 1]
    if before == [size for size in sides if size != 1]:  # only sides of 1 are added or dropped
        tensor = graph.tensor(operand, identity(operand.shape))
        kept = iter([tensor.shape[axis] for axis, size in enumerate(operand.shape) if size != 1])
        compact = [1 if size == 1 else next(kept) for size in sides]
    else:
        tensor, compact = graph.whole(operand), list(sides)
    return Value(_reshaped(tensor, compact), sides, identity(sides), _sizes(graph, operands[1:], sides))


def _reshaped(tensor: Any, sides: Sequence[int | None]) -> Any:
    if list(tensor.shape) == list(sides):
        return tensor
    if list(sides).count(None) > 1:
        raise UntranslatableModuleError("it has several sides of unknown size")
    return tf.reshape(tensor, [-1 if size is None else size for size in sides])


def _transpose(graph: Graph, operation: Any, operands: Sequence[Value]) -> Value:
    (operand,), places = operands, integers(operation, "permutation")
    order = tuple(operand.order[place] for place in places)
    sizes = operand.sizes and operand.sizes.of(places)
    return Value(graph.tensor(operand), shape(operation.results[0]), order, sizes)


def _reverse(graph: Graph, operation: Any, operands: Sequence[Value]) -> Value:
    (operand,), axes = operands, integers(operation, "dimensions")
    places = {operand.order[axis] for axis in axes}
    # As slices, which OpenVINO knows.
    slices = tuple(slice(None, None, -1 if place in places else 1) for place in range(len(operand.shape)))
    return Value(graph.tensor(operand)[slices], operand.shape, operand.order, operand.sizes)


def _concatenate(graph: Graph, operation: Any, operands: Sequence[Value]) -> Value:
    axis, sides = int(operation.attributes["dimension"]), shape(operation.results[0])
    order = next((one.order for one in operands if not one.is_known), operands[0].order)
    tensors = [graph.tensor(one, order, range(len(sides))) for one in operands]
    return Value(tf.concat(tensors, order[axis]), sides, order)


def _reduce(graph: Graph, operation: Any, operands: Sequence[Value]) -> Value:
    if len(operands) != 2:
        raise UntranslatableModuleError("a reduction of several values is not translated")
    operand, first = operands
    axes = integers(operation, "dimensions")
    reduce, combine, neutral = REDUCTIONS[stablehlo_windows.of_region(operation)]
    tensor = graph.tensor(operand, axes=axes)
    reduced = reduce(tensor, [operand.order[axis] for axis in axes])
    if not first.is_known or first.tensor != neutral(tensor.dtype):
        reduced = combine(reduced, graph.tensor(first))
    kept = [axis for axis in range(len(operand.shape)) if axis not in axes]
    order = inverse(inverse([operand.order[axis] for axis in kept]))
    sizes = operand.sizes and operand.sizes.of(kept)
    return Value(reduced, shape(operation.results[0]), order, sizes)


def _dot(graph: Graph, operation: Any, operands: Sequence[Value]) -> Value:
    letters = iter(string.ascii_letters)
    axes = stablehlo.DotDimensionNumbers(operation.attributes["dot_dimension_numbers"])
    batching = axes.lhs_batching_dimensions, axes.rhs_batching_dimensions
    contracting = axes.lhs_contracting_dimensions, axes.rhs_contracting_dimensions
    names = [[""] * len(operand.shape) for operand in operands]
    for pair in (*zip(*batching, strict=True), *zip(*contracting, strict=True)):
        letter = next(letters)
        for name, axis in zip(names, pair, strict=True):
            name[axis] = letter
    result = [names[0][axis] for axis in batching[0]]
    for name in names:
        for axis, letter in enumerate(name):
            if not letter:
                name[axis] = next(letters)
                result.append(name[axis])
    sides, to = shape(operation.results[0]), dtype(operation.results[0])
    tensors = [tf.cast(graph.tensor(one, axes=range(len(one.shape))), to) for one in operands]
    if [names[0], names[1], result] == [["b", "a"], ["a", "c"], ["b", "c"]] and all(
        one.order == (0, 1) for one in operands
    ):
        return Value(tf.linalg.matmul(*tensors), sides, identity(sides))
    inputs = ",".join(
        "".join(name[axis] for axis in inverse(one.order)) for name, one in zip(names, operands, strict=True)
    )
    return Value(tf.einsum(f"{inputs}->{''.join(result)}", *tensors), sides, identity(sides))


def _size(graph: Graph, operation: Any, operands: Sequence[Value]) -> Value:
    (operand,), axis = operands, int(operation.attributes["dimension"])
    if (size := operand.shape[axis]) is not None:
        return known(np.int32(size))
    if side(operand, axis) is not None:
        raise UntranslatableModuleError("a size is not known")
    return Value(tf.shape(graph.tensor(operand))[operand.order[axis]], (), ())


REDUCTIONS: Final[Mapping[str, tuple[Callable[..., Any], Callable[..., Any], Callable[[tf.DType], Any]]]] = {
    "stablehlo.add": (tf.reduce_sum, tf.add, lambda _: 0),
    "stablehlo.multiply": (tf.reduce_prod, tf.multiply, lambda _: 1),
    "stablehlo.maximum": (tf.reduce_max, tf.maximum, lambda kind: -np.inf if kind.is_floating else kind.min),
    "stablehlo.minimum": (tf.reduce_min, tf.minimum, lambda kind: np.inf if kind.is_floating else kind.max),
    "stablehlo.and": (tf.reduce_all, tf.logical_and, lambda _: True),
    "stablehlo.or": (tf.reduce_any, tf.logical_or, lambda _: False),
}
"""By the only operation of a reduction's region: the reduction, its operation on two values, its neutral element."""
OF_A_SHAPE: Final = frozenset({"stablehlo.dynamic_broadcast_in_dim", "stablehlo.dynamic_reshape"})
"""Operations whose second operand is only the shape of their result."""
TABLE: Final[Mapping[str, Translate]] = {
    "chlo.erf": elementwise(tf.math.erf),
    "stablehlo.abs": elementwise(tf.abs),
    "stablehlo.add": by_type(tf.add, tf.logical_or),
    "stablehlo.and": by_type(tf.bitwise.bitwise_and, tf.logical_and),
    "stablehlo.atan2": elementwise(tf.atan2),
    "stablehlo.broadcast_in_dim": _broadcast,
    "stablehlo.ceil": elementwise(tf.math.ceil),
    "stablehlo.clamp": elementwise(lambda low, values, high: tf.minimum(tf.maximum(values, low), high)),
    "stablehlo.compare": compare,
    "stablehlo.concatenate": _concatenate,
    "stablehlo.constant": _constant,
    "stablehlo.convert": convert,
    "stablehlo.convolution": stablehlo_windows.convolution,
    "stablehlo.cosine": elementwise(tf.cos),
    "stablehlo.divide": elementwise(divide),
    "stablehlo.dot_general": _dot,
    "stablehlo.dynamic_broadcast_in_dim": _broadcast,
    "stablehlo.dynamic_gather": stablehlo_slices.gather,
    "stablehlo.dynamic_iota": _iota,
    "stablehlo.dynamic_reshape": _reshape,
    "stablehlo.dynamic_slice": stablehlo_slices.dynamic_slice,
    "stablehlo.exponential": elementwise(tf.exp),
    "stablehlo.exponential_minus_one": elementwise(tf.math.expm1),
    "stablehlo.floor": elementwise(tf.floor),
    "stablehlo.gather": stablehlo_slices.gather,
    "stablehlo.get_dimension_size": _size,
    "stablehlo.iota": _iota,
    "stablehlo.is_finite": elementwise(tf.math.is_finite),
    "stablehlo.log": elementwise(tf.math.log),
    "stablehlo.log_plus_one": elementwise(tf.math.log1p),
    "stablehlo.logistic": elementwise(tf.sigmoid),
    "stablehlo.maximum": by_type(tf.maximum, tf.logical_or),
    "stablehlo.minimum": by_type(tf.minimum, tf.logical_and),
    "stablehlo.multiply": by_type(tf.multiply, tf.logical_and),
    "stablehlo.negate": elementwise(tf.negative),
    "stablehlo.not": by_type(tf.bitwise.invert, tf.logical_not),
    "stablehlo.or": by_type(tf.bitwise.bitwise_or, tf.logical_or),
    "stablehlo.pad": stablehlo_slices.pad,
    "stablehlo.power": elementwise(tf.pow),
    "stablehlo.real_dynamic_slice": stablehlo_slices.slice_of,
    "stablehlo.reduce": _reduce,
    "stablehlo.reduce_window": stablehlo_windows.pooling,
    "stablehlo.remainder": elementwise(tf.truncatemod),
    "stablehlo.reshape": _reshape,
    "stablehlo.reverse": _reverse,
    "stablehlo.round_nearest_even": elementwise(tf.round),
    "stablehlo.rsqrt": elementwise(tf.math.rsqrt),
    "stablehlo.select": elementwise(tf.where),
    "stablehlo.sign": elementwise(tf.sign),
    "stablehlo.sine": elementwise(tf.sin),
    "stablehlo.slice": stablehlo_slices.slice_of,
    "stablehlo.sqrt": elementwise(tf.sqrt),
    "stablehlo.subtract": elementwise(tf.subtract),
    "stablehlo.tan": elementwise(tf.tan),
    "stablehlo.tanh": elementwise(tf.tanh),
    "stablehlo.transpose": _transpose,
    "stablehlo.xor": by_type(tf.bitwise.bitwise_xor, tf.math.logical_xor),
}
