"""Writes ONNX files: the few fields of onnx.proto3 that tests need, in the wire format of protocol buffers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Input = tuple[str, Sequence[int | None]]
"""A tensor's name and its shape; a side of None is open."""
FLOAT, INTS = 1, 7
"""The type of a tensor's numbers, and of an attribute."""
TYPES: Mapping[Any, int] = {np.dtype(np.float32): 1, np.dtype(np.uint8): 2, np.dtype(np.int64): 7}
"""The types of tensors."""


def _varint(number: int) -> bytes:
    done = bytearray()
    while number > 127:
        done.append(number & 127 | 128)
        number >>= 7
    return bytes([*done, number])


def field(number: int, value: int | str | bytes) -> bytes:
    """Returns a field of a message."""
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    contents = value.encode() if isinstance(value, str) else value
    return _varint(number << 3 | 2) + _varint(len(contents)) + contents


def tensor(name: str, values: NDArray[Any]) -> bytes:
    """Returns a TensorProto of float32, uint8 or int64."""
    sides = b"".join(field(1, side) for side in values.shape)
    return sides + field(2, TYPES[values.dtype]) + field(8, name) + field(9, values.tobytes())


def outside(name: str, shape: Sequence[int], file: str) -> bytes:
    """Returns a TensorProto whose numbers are in another file."""
    place = field(1, "location") + field(2, file)
    return (
        b"".join(field(1, side) for side in shape) + field(2, FLOAT) + field(8, name) + field(13, place) + field(14, 1)
    )


def node(kind: str, inputs: Sequence[str], outputs: Sequence[str], **attributes: Sequence[int]) -> bytes:
    """Returns a NodeProto whose attributes are lists of numbers."""
    return b"".join(
        [
            *(field(1, name) for name in inputs),
            *(field(2, name) for name in outputs),
            field(4, kind),
            *(
                field(5, field(1, name) + b"".join(field(8, one) for one in numbers) + field(20, INTS))
                for name, numbers in attributes.items()
            ),
        ]
    )


def model(
    nodes: Sequence[bytes], *, pixels: Input, scores: Input, weights: Sequence[bytes], others: Sequence[Input] = ()
) -> bytes:
    """Returns a ModelProto of one output, and of one input and the `others`."""
    graph = b"".join(
        [
            *(field(1, one) for one in nodes),
            field(2, "graph"),
            *(field(5, one) for one in weights),
            *(field(11, _value(one)) for one in (pixels, *others)),
            field(12, _value(scores)),
        ]
    )
    return field(1, 8) + field(7, graph) + field(8, field(2, 13))


def _value(of: Input) -> bytes:
    name, sides = of
    shape = b"".join(field(1, b"" if side is None else field(1, side)) for side in sides)
    kind: Any = field(1, field(1, FLOAT) + field(2, shape))
    return field(1, name) + field(2, kind)
