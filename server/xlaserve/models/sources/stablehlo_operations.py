"""StableHLO's operations as TensorFlow's (https://openxla.org/stablehlo/spec)."""

from __future__ import annotations

import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Protocol

import numpy as np
import tensorflow as tf
from jax.extend.mlir.dialects import stablehlo

from xlaserve.models.sources import stablehlo_windows
from xlaserve.models.sources.stablehlo_values import (
    Order,
    Shape,
    Sizes,
    UntranslatableError,
    Value,
    array,
    dtype,
    identity,
    integers,
    inverse,
    known,
    shape,
)

Translate = Callable[["Graph", Any, Sequence[Value]], Value]
"""Returns the result of an operation for its operands. Raises UntranslatableError."""


class Graph(Protocol):
    """The graph in which operations are made."""

    def tensor(self, value: Value, order: Order | None = None, axes: Iterable[int] = ()) -> Any:
        """Returns a value's tensor, its axes in `order`, as large as the value along `axes`."""

    def whole(self, value: Value) -> tf.Tensor:
        """Returns a value as it is."""


def elementwise(compute: Callable[..., Any]) -> Translate:
    """Returns the translation of an elementwise operation; TensorFlow broadcasts operands that are to be repeated."""

    def translate(graph: Graph, operation: Any, operands: Sequence[Value]) -> Value:
        sides = shape(operation.results[0])
        full = [one for one in operands if len(one.shape) == len(sides)]
        order = next((one.order for one in full if not one.is_known), full[0].order)
        tensors = [graph.tensor(one, order if len(one.shape) == len(sides) else None) for one in operands]
        sizes = next((one.sizes for one in full if one.sizes is not None), None)
        return Value(compute(*tensors), sides, order, sizes)

    return translate


def _by_type(of_numbers: Callable[..., Any], of_booleans: Callable[..., Any]) -> Translate:
    return elementwise(lambda *tensors: of_booleans(*tensors) if tensors[0].dtype == tf.bool else of_numbers(*tensors))


def _divide(first: Any, second: Any) -> Any:
    return first / second if first.dtype.is_floating else tf.truncatediv(first, second)


def _compare(graph: Graph, operation: Any, operands: Sequence[Value]) -> Value:
    direction = stablehlo.ComparisonDirectionAttr(operation.attributes["comparison_direction"]).value
    return elementwise(COMPARISONS[direction])(graph, operation, operands)


def _convert(graph: Graph, operation: Any, operands: Sequence[Value]) -> Value:
    to = dtype(operation.results[0])
    return elementwise(lambda tensor: _cast(tensor, to))(graph, operation, operands)


def _cast(tensor: Any, to: tf.DType) -> Any:
    """Converts as XLA does: whole numbers are clipped to the limits of their type, and NaN becomes 0."""
    cast = tf.cast(tensor, to)
    if not (tensor.dtype.is_floating and to.is_integer):
        return cast
    low, high = (tf.constant(limit, to) for limit in (to.min, to.max))
    is_low, is_high = tensor <= tf.cast(low, tensor.dtype), tensor >= tf.cast(high, tensor.dtype)
    return tf.where(is_low, low, tf.where(is_high, high, tf.where(tf.math.is_nan(tensor), tf.zeros_like(cast), cast)))


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
    if before == [size for size in sides if size != 1]:  # which adds or drops sides of 1
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
        raise UntranslatableError("it has several sides of unknown size")
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


def _slice(graph: Graph, operation: Any, operands: Sequence[Value]) -> Value:
    operand, sides = operands[0], shape(operation.results[0])
    if len(operands) > 1:
        starts, limits, strides = (list(tf.unstack(graph.whole(one))) for one in operands[1:])
    else:
        starts, limits, strides = (
            list(integers(operation, name)) for name in ("start_indices", "limit_indices", "strides")
        )
    axes = [axis for axis, size in enumerate(operand.shape) if size is None or size != sides[axis]]
    tensor = graph.tensor(operand, axes=axes)
    slices: list[Any] = [slice(None)] * len(sides)
    for axis in range(len(sides)):
        if axis in axes or _side(operand, axis) != 1:
            slices[operand.order[axis]] = slice(starts[axis], limits[axis], strides[axis])
    return Value(_with_sides(tensor[tuple(slices)], sides, operand.order), sides, operand.order, operand.sizes)


def _dynamic_slice(graph: Graph, operation: Any, operands: Sequence[Value]) -> Value:
    (operand, *starts), sides = operands, shape(operation.results[0])
    if not all(start.is_known for start in starts):
        raise UntranslatableError("a slice from a computed place is not translated")
    places = {axis: start.tensor for axis, start in enumerate(starts)}
    return Value(_slice_from(graph, operand, places, sides), sides, identity(sides))


def _gather(graph: Graph, operation: Any, operands: Sequence[Value]) -> Value:
    """Translates the gathers of JAX's indexing: one slice from a known place, or slices of whole sides."""
    (operand, starts, *_), sides = operands, shape(operation.results[0])
    axes = stablehlo.GatherDimensionNumbers(operation.attributes["dimension_numbers"])
    if axes.operand_batching_dims or axes.index_vector_dim != len(starts.shape) - 1:
        raise UntranslatableError("a gathering of this form is not translated")
    dropped, kept = list(axes.collapsed_slice_dims), iter([sides[axis] for axis in axes.offset_dims])
    taken = [1 if axis in dropped else next(kept) for axis in range(len(operand.shape))]
    if len(starts.shape) == 1 and starts.is_known:
        places = np.broadcast_to(starts.tensor, [len(axes.start_index_map)])
        cut = _slice_from(graph, operand, dict(zip(axes.start_index_map, places, strict=True)), taken)
        return Value(tf.squeeze(cut, dropped) if dropped else cut, sides, identity(sides))
    others = [axis for axis in range(len(operand.shape)) if axis not in axes.start_index_map]
    if dropped != sorted(axes.start_index_map) or any(operand.shape[axis] != taken[axis] for axis in others):
        raise UntranslatableError("a gathering of parts is not translated")
    tensor = graph.tensor(operand, inverse([*axes.start_index_map, *others]), range(len(operand.shape)))
    sizes: Any = [operand.shape[axis] for axis in axes.start_index_map]
    if None in sizes:
        sizes = tf.shape(tensor)[: len(sizes)]
    indices = tf.clip_by_value(tf.cast(graph.whole(starts), tf.int32), 0, tf.subtract(sizes, 1))
    batch = [axis for axis in range(len(sides)) if axis not in axes.offset_dims]
    return Value(tf.gather_nd(tensor, indices), sides, inverse([*batch, *axes.offset_dims]))


def _slice_from(graph: Graph, operand: Value, places: Mapping[int, Any], taken: Sequence[int | None]) -> Any:
    """Returns `taken` sizes of `operand` from `places` on."""
    cut = [axis for axis, size in enumerate(operand.shape) if size != taken[axis]]
    slices = [slice(None)] * len(taken)
    for axis in cut:
        size, count = operand.shape[axis], taken[axis]
        if size is None or count is None:
            raise UntranslatableError("a slice along a side of unknown size is not translated")
        start = int(np.clip(places.get(axis, 0), 0, size - count))
        slices[axis] = slice(start, start + count)
    return graph.tensor(operand, identity(operand.shape), cut)[tuple(slices)]


def _with_sides(tensor: Any, sides: Sequence[int | None], order: Order) -> Any:
    """Sets the sizes of `tensor` that StableHLO states, where TensorFlow can't infer them."""
    places = inverse(order)
    known_sides = [sides[axis] if size is None else size for axis, size in zip(places, tensor.shape, strict=True)]
    return tf.ensure_shape(tensor, known_sides) if known_sides != list(tensor.shape) else tensor


def _pad(graph: Graph, operation: Any, operands: Sequence[Value]) -> Value:
    (operand, fill), sides = operands, shape(operation.results[0])
    low, high, interior = (
        integers(operation, name) for name in ("edge_padding_low", "edge_padding_high", "interior_padding")
    )
    if any(interior):
        raise UntranslatableError("padding between elements is not translated")
    axes = [axis for axis in range(len(sides)) if low[axis] or high[axis]]
    tensor = graph.tensor(operand, axes=axes)
    pads = [(low[axis], high[axis]) for axis in inverse(operand.order)]
    slices = tuple(slice(max(0, -first), last if last < 0 else None) for first, last in pads)
    if min(*low, *high) < 0:
        tensor = tensor[slices]
    if max(*low, *high) > 0:
        pads = [(max(0, first), max(0, last)) for first, last in pads]
        tensor = tf.pad(tensor, pads, constant_values=graph.tensor(fill))
    return Value(tensor, sides, operand.order, operand.sizes)


def _reduce(graph: Graph, operation: Any, operands: Sequence[Value]) -> Value:
    if len(operands) != 2:
        raise UntranslatableError("a reduction of several values is not translated")
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
    if _side(operand, axis) is not None:
        raise UntranslatableError("a size is not known")
    return Value(tf.shape(graph.tensor(operand))[operand.order[axis]], (), ())


def _side(value: Value, axis: int) -> int | None:
    size: int | None = value.tensor.shape[value.order[axis]]
    return size


COMPARISONS: Final[Mapping[str, Callable[..., Any]]] = {
    "EQ": tf.equal,
    "NE": tf.not_equal,
    "GE": tf.greater_equal,
    "GT": tf.greater,
    "LE": tf.less_equal,
    "LT": tf.less,
}
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
    "stablehlo.add": _by_type(tf.add, tf.logical_or),
    "stablehlo.and": _by_type(tf.bitwise.bitwise_and, tf.logical_and),
    "stablehlo.atan2": elementwise(tf.atan2),
    "stablehlo.broadcast_in_dim": _broadcast,
    "stablehlo.ceil": elementwise(tf.math.ceil),
    "stablehlo.clamp": elementwise(lambda low, values, high: tf.minimum(tf.maximum(values, low), high)),
    "stablehlo.compare": _compare,
    "stablehlo.concatenate": _concatenate,
    "stablehlo.constant": _constant,
    "stablehlo.convert": _convert,
    "stablehlo.convolution": stablehlo_windows.convolution,
    "stablehlo.cosine": elementwise(tf.cos),
    "stablehlo.divide": elementwise(_divide),
    "stablehlo.dot_general": _dot,
    "stablehlo.dynamic_broadcast_in_dim": _broadcast,
    "stablehlo.dynamic_gather": _gather,
    "stablehlo.dynamic_iota": _iota,
    "stablehlo.dynamic_reshape": _reshape,
    "stablehlo.dynamic_slice": _dynamic_slice,
    "stablehlo.exponential": elementwise(tf.exp),
    "stablehlo.exponential_minus_one": elementwise(tf.math.expm1),
    "stablehlo.floor": elementwise(tf.floor),
    "stablehlo.gather": _gather,
    "stablehlo.get_dimension_size": _size,
    "stablehlo.iota": _iota,
    "stablehlo.is_finite": elementwise(tf.math.is_finite),
    "stablehlo.log": elementwise(tf.math.log),
    "stablehlo.log_plus_one": elementwise(tf.math.log1p),
    "stablehlo.logistic": elementwise(tf.sigmoid),
    "stablehlo.maximum": _by_type(tf.maximum, tf.logical_or),
    "stablehlo.minimum": _by_type(tf.minimum, tf.logical_and),
    "stablehlo.multiply": _by_type(tf.multiply, tf.logical_and),
    "stablehlo.negate": elementwise(tf.negative),
    "stablehlo.not": _by_type(tf.bitwise.invert, tf.logical_not),
    "stablehlo.or": _by_type(tf.bitwise.bitwise_or, tf.logical_or),
    "stablehlo.pad": _pad,
    "stablehlo.power": elementwise(tf.pow),
    "stablehlo.real_dynamic_slice": _slice,
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
    "stablehlo.slice": _slice,
    "stablehlo.sqrt": elementwise(tf.sqrt),
    "stablehlo.subtract": elementwise(tf.subtract),
    "stablehlo.tan": elementwise(tf.tan),
    "stablehlo.tanh": elementwise(tf.tanh),
    "stablehlo.transpose": _transpose,
    "stablehlo.xor": _by_type(tf.bitwise.bitwise_xor, tf.math.logical_xor),
}
