"""StableHLO's slices, gathers and padding, as TensorFlow's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from jax.extend.mlir.dialects import stablehlo

from xlaserve.models.sources.stablehlo_values import (
    Graph,
    Order,
    UntranslatableModuleError,
    Value,
    identity,
    integers,
    inverse,
    shape,
    side,
)


def slice_of(graph: Graph, operation: Any, operands: Sequence[Value]) -> Value:
    """Translates a slice, whose starts, limits and strides are attributes or operands."""
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
        if axis in axes or side(operand, axis) != 1:
            slices[operand.order[axis]] = slice(starts[axis], limits[axis], strides[axis])
    return Value(_with_sides(tensor[tuple(slices)], sides, operand.order), sides, operand.order, operand.sizes)


def dynamic_slice(graph: Graph, operation: Any, operands: Sequence[Value]) -> Value:
    """Translates a slice whose starts are operands, which weights have to determine."""
    (operand, *starts), sides = operands, shape(operation.results[0])
    if not all(start.is_known for start in starts):
        raise UntranslatableModuleError("a slice from a computed place is not translated")
    places = {axis: start.tensor for axis, start in enumerate(starts)}
    return Value(_slice_from(graph, operand, places, sides), sides, identity(sides))


def gather(graph: Graph, operation: Any, operands: Sequence[Value]) -> Value:
    """Translates the gathers of JAX's indexing: one slice from a known place, or slices of whole sides."""
    (operand, starts, *_), sides = operands, shape(operation.results[0])
    axes = stablehlo.GatherDimensionNumbers(operation.attributes["dimension_numbers"])
    if axes.operand_batching_dims or axes.index_vector_dim != len(starts.shape) - 1:
        raise UntranslatableModuleError("a gathering of this form is not translated")
    dropped, kept = list(axes.collapsed_slice_dims), iter([sides[axis] for axis in axes.offset_dims])
    taken = [1 if axis in dropped else next(kept) for axis in range(len(operand.shape))]
    if len(starts.shape) == 1 and starts.is_known:
        places = np.broadcast_to(starts.tensor, [len(axes.start_index_map)])
        cut = _slice_from(graph, operand, dict(zip(axes.start_index_map, places, strict=True)), taken)
        return Value(tf.squeeze(cut, dropped) if dropped else cut, sides, identity(sides))
    others = [axis for axis in range(len(operand.shape)) if axis not in axes.start_index_map]
    if dropped != sorted(axes.start_index_map) or any(operand.shape[axis] != taken[axis] for axis in others):
        raise UntranslatableModuleError("a gathering of parts is not translated")
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
            raise UntranslatableModuleError("a slice along a side of unknown size is not translated")
        start = int(np.clip(places.get(axis, 0), 0, size - count))
        slices[axis] = slice(start, start + count)
    return graph.tensor(operand, identity(operand.shape), cut)[tuple(slices)]


def _with_sides(tensor: Any, sides: Sequence[int | None], order: Order) -> Any:
    """Sets the sizes of `tensor` that StableHLO states, where TensorFlow can't infer them."""
    places = inverse(order)
    known_sides = [sides[axis] if size is None else size for axis, size in zip(places, tensor.shape, strict=True)]
    return tf.ensure_shape(tensor, known_sides) if known_sides != list(tensor.shape) else tensor


def pad(graph: Graph, operation: Any, operands: Sequence[Value]) -> Value:
    """Translates padding around a value, which may be negative."""
    (operand, fill), sides = operands, shape(operation.results[0])
    low, high, interior = (
        integers(operation, name) for name in ("edge_padding_low", "edge_padding_high", "interior_padding")
    )
    if any(interior):
        raise UntranslatableModuleError("padding between elements is not translated")
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
