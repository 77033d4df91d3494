"""OpenVINO's operations that move elements and compute none, as TensorFlow's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import tensorflow as tf

from xlaserve.models.sources.onnx_tflite.openvino_values import LAST, Operation, UntranslatableError, Value, value


def _transposition(operation: Operation) -> list[Value]:
    one = operation.inputs[0]
    axes = operation.numbers(1) or [*reversed(range(one.rank))]
    if one.is_known:
        return [value(np.transpose(one.tensor, axes))]
    return [Value(one.tensor, tuple(one.order[axis] for axis in axes))]


def _shape_of(operation: Operation) -> list[Value]:
    one = operation.inputs[0]
    to = tf.as_dtype(operation.node.get_element_type().to_dtype())
    sizes = tf.shape(operation.tensor(one, one.order), to)
    # Each size by itself, as far as it is known.
    sides = [one.tensor.shape[place] for place in one.order]
    known = [sizes[place] if side is None else side for place, side in zip(one.order, sides, strict=True)]
    return [value(tf.stack([tf.cast(side, to) for side in known]) if known else sizes)]


def _reshape(operation: Operation) -> list[Value]:
    tensor = operation.tensor(operation.inputs[0])
    shape = operation.tensor(operation.inputs[1])
    if operation.attributes.get("special_zero") and (known := tf.get_static_value(shape)) is not None:
        sizes = tf.shape(tensor, shape.dtype)
        if 0 in known:
            shape = tf.stack([sizes[axis] if side == 0 else side for axis, side in enumerate(known)])
    return [value(tf.reshape(tensor, shape))]


def _squeeze(operation: Operation) -> list[Value]:
    tensor = operation.tensor(operation.inputs[0])
    axes = operation.axes(1) if len(operation.inputs) > 1 else None
    return [value(tf.squeeze(tensor, axes))]


def _unsqueeze(operation: Operation) -> list[Value]:
    tensor = operation.tensor(operation.inputs[0])
    rank = operation.inputs[0].rank + len(operation.numbers(1))
    for axis in sorted(axis % rank for axis in operation.numbers(1)):
        tensor = tf.expand_dims(tensor, axis)
    return [value(tensor)]


def _concat(operation: Operation) -> list[Value]:
    axis = int(operation.attributes["axis"])
    orders = [one.order for one in operation.inputs if not one.is_known]
    order = next((order for order in orders if order == LAST), None)
    tensors = [operation.tensor(one, order) for one in operation.inputs]
    if order is None:
        return [value(tf.concat(tensors, axis))]
    return [Value(tf.concat(tensors, order[axis % len(order)]), order)]


def _split(operation: Operation) -> list[Value]:
    one = operation.inputs[0]
    place = one.order[operation.axes(1)[0]]
    is_even = operation.kind == "Split"
    sizes = int(operation.attributes["num_splits"]) if is_even else operation.numbers(2)
    parts = tf.split(operation.tensor(one, one.order), sizes, place)
    return [Value(part, one.order) for part in parts]


def _gather(operation: Operation) -> list[Value]:
    tensor, indices = (operation.tensor(one) for one in operation.inputs[:2])
    (axis,) = operation.axes(2)
    batch = int(operation.attributes.get("batch_dims", 0))
    side = tf.cast(tf.shape(tensor)[axis], indices.dtype) if tensor.shape[axis] is None else tensor.shape[axis]
    known = tf.get_static_value(indices)
    if known is None or (known < 0).any():
        indices = tf.where(indices < 0, indices + side, indices)
    return [value(tf.gather(tensor, indices, axis=axis, batch_dims=batch))]


def _strided_slice(operation: Operation) -> list[Value]:
    own = operation.attributes
    tensor = operation.tensor(operation.inputs[0])
    begin, end = (tf.cast(operation.tensor(one), tf.int64) for one in operation.inputs[1:3])
    steps = operation.numbers(3) if len(operation.inputs) > 3 else [1] * int(begin.shape[0])

    def mask(name: str) -> int:
        return sum(1 << axis for axis, one in enumerate(own[name]) if one)

    return [
        value(
            tf.strided_slice(
                tensor,
                begin,
                end,
                tf.constant(steps, tf.int64),
                begin_mask=mask("begin_mask"),
                end_mask=mask("end_mask"),
                ellipsis_mask=mask("ellipsis_mask"),
                new_axis_mask=mask("new_axis_mask"),
                shrink_axis_mask=mask("shrink_axis_mask"),
            )
        )
    ]


def _slice(operation: Operation) -> list[Value]:
    one = operation.inputs[0]
    steps = operation.numbers(3)
    axes = operation.axes(4) if len(operation.inputs) > 4 else [*range(len(steps))]
    begin, end = (tf.get_static_value(operation.tensor(each)) for each in operation.inputs[1:3])
    if begin is None or end is None:
        raise UntranslatableError(f"{operation.kind} with sizes that depend on the image")
    parts: list[Any] = [slice(None)] * one.rank
    for axis, low, high, step in zip(axes, begin.tolist(), end.tolist(), steps, strict=True):
        last = None if (step < 0 and high < -(2**31)) or high >= 2**31 - 1 else high
        parts[one.order[axis]] = slice(low if abs(low) < 2**31 - 1 else None, last, step)
    return [Value(operation.tensor(one, one.order)[tuple(parts)], one.order)]


def _pad(operation: Operation) -> list[Value]:
    one = operation.inputs[0]
    begin, end = operation.numbers(1), operation.numbers(2)
    if min((*begin, *end)) < 0:
        raise UntranslatableError("negative padding")
    pads = [(0, 0)] * one.rank
    for axis, place in enumerate(one.order):
        pads[place] = (begin[axis], end[axis])
    mode = str(operation.attributes["pad_mode"]).lower()
    tensor = operation.tensor(one, one.order)
    if mode == "edge":
        for place, (low, high) in enumerate(pads):
            side = tensor.shape[place]
            if low or high:
                if side is None:
                    raise UntranslatableError("padding of images of any size by their edges")
                indices = np.clip(np.arange(-low, side + high), 0, side - 1)
                tensor = tf.gather(tensor, indices, axis=place)
        return [Value(tensor, one.order)]
    fill = operation.array(3).item() if len(operation.inputs) > 3 else 0
    names = {"constant": "CONSTANT", "reflect": "REFLECT", "symmetric": "SYMMETRIC"}
    return [Value(tf.pad(tensor, pads, names[mode], constant_values=tf.cast(fill, tensor.dtype)), one.order)]


def _broadcast(operation: Operation) -> list[Value]:
    tensor, shape = (operation.tensor(one) for one in operation.inputs[:2])
    match str(operation.attributes["mode"]).lower():
        case "numpy":
            return [value(tf.broadcast_to(tensor, shape))]
        case "bidirectional":
            sizes = tf.broadcast_dynamic_shape(tf.shape(tensor, shape.dtype), shape)
            return [value(tf.broadcast_to(tensor, sizes))]
    raise UntranslatableError("Broadcast of this form")


def _tile(operation: Operation) -> list[Value]:
    tensor, times = (operation.tensor(one) for one in operation.inputs)
    return [value(tf.tile(tensor, times))]


def _depth_to_space(operation: Operation) -> list[Value]:
    return _blocks(operation, is_into_space=True)


def _space_to_depth(operation: Operation) -> list[Value]:
    return _blocks(operation, is_into_space=False)


def _blocks(operation: Operation, *, is_into_space: bool) -> list[Value]:
    size, mode = int(operation.attributes["block_size"]), str(operation.attributes["mode"]).lower()
    images = operation.tensor(operation.inputs[0], LAST)
    if mode == "blocks_first":
        compute = tf.nn.depth_to_space if is_into_space else tf.nn.space_to_depth
        return [Value(compute(images, size), LAST)]
    if not is_into_space:
        raise UntranslatableError("SpaceToDepth with the depth first")
    depth = images.shape[-1] // size**2
    blocks = tf.reshape(images, [*tf.unstack(tf.shape(images)[:3]), depth, size**2])
    blocks = tf.reshape(tf.transpose(blocks, (0, 1, 2, 4, 3)), [*tf.unstack(tf.shape(images)[:3]), depth * size**2])
    return [Value(tf.nn.depth_to_space(blocks, size), LAST)]


TABLE: Final[Mapping[str, Callable[[Operation], Sequence[Value]]]] = {
    "Broadcast": _broadcast,
    "Concat": _concat,
    "DepthToSpace": _depth_to_space,
    "Gather": _gather,
    "Pad": _pad,
    "Reshape": _reshape,
    "ShapeOf": _shape_of,
    "Slice": _slice,
    "SpaceToDepth": _space_to_depth,
    "Split": _split,
    "Squeeze": _squeeze,
    "StridedSlice": _strided_slice,
    "Tile": _tile,
    "Transpose": _transposition,
    "Unsqueeze": _unsqueeze,
    "VariadicSplit": _split,
}
