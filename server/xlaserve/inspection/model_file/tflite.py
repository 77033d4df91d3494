"""Descriptions of TFLite files, which are FlatBuffers: tables whose fields are found by their numbers."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from xlaserve.inspection.model_file import keras, packages
from xlaserve.inspection.model_file.description import Description, Shape, Tensor
from xlaserve.inspection.model_file.image_input import SIGNED
from xlaserve.models.sources import file_content

MAGIC: Final = b"TFL3"
"""Bytes 4 to 7 of every file."""
TYPES: Final = {
    **{0: "float32", 1: "float16", 2: "int32", 3: "uint8", 4: "int64", 5: "string", 6: "bool", 7: "int16"},
    **{9: "int8", 10: "float64", 12: "uint64", 15: "uint32", 16: "uint16"},
}
"""TFLite's numbers of types."""
ACTIVATIONS: Final = {25: "softmax", 14: "sigmoid", 28: "tanh", 19: "relu"}
"""Activations by the numbers of their operators."""
LINEAR: Final = (9, 3, 4)
"""Operators whose numbers have gone through no activation: FULLY_CONNECTED, CONV_2D, DEPTHWISE_CONV_2D."""
PASSING: Final = (22, 43, 6, 114)
"""Operators that change no number: RESHAPE, SQUEEZE, DEQUANTIZE, QUANTIZE."""
# Numbers of fields.
OPERATOR_CODES, SUBGRAPHS, DESCRIPTION, BUFFERS = 1, 2, 3, 4  # of the model
TENSORS, INPUTS, OUTPUTS, OPERATORS = 0, 1, 2, 3  # of a subgraph
SHAPE, TYPE, BUFFER, NAME, SHAPE_SIGNATURE = 0, 1, 2, 3, 7  # of a tensor
OLD_CODE, CUSTOM_CODE, CODE = 0, 1, 3  # of an operator's code
OPCODE, TAKEN, GIVEN = 0, 1, 2  # of an operator
DATA: Final = 0  # of a buffer


class Table:
    """A table of a FlatBuffer."""

    def __init__(self, data: bytes, place: int) -> None:
        self._data, self._place = data, place
        self._fields = place - _number(data, place, "i")
        self._size = _number(data, self._fields, "H")

    def number(self, field: int, kind: str, default: int = 0) -> int:
        """Returns a number of `struct`'s type `kind`."""
        place = self._at(field)
        return default if place is None else _number(self._data, place, kind)

    def numbers(self, field: int) -> list[int]:
        """Returns a vector of numbers of 32 bits."""
        start, count = self._vector(field)
        return list(struct.unpack_from(f"<{count}i", self._data, start))

    def length(self, field: int) -> int:
        """Returns how many elements a vector has."""
        return self._vector(field)[1]

    def text(self, field: int) -> str:
        """Returns a text."""
        start, count = self._vector(field)
        return self._data[start : start + count].decode(errors="replace")

    def tables(self, field: int) -> list[Table]:
        """Returns a vector of tables."""
        start, count = self._vector(field)
        return [
            Table(self._data, place + _number(self._data, place, "I")) for place in range(start, start + 4 * count, 4)
        ]

    def _at(self, field: int) -> int | None:
        entry = 4 + 2 * field
        offset = _number(self._data, self._fields + entry, "H") if entry < self._size else 0
        return self._place + offset if offset else None

    def _vector(self, field: int) -> tuple[int, int]:
        place = self._at(field)
        if place is None:
            return 0, 0
        place += _number(self._data, place, "I")
        return place + 4, _number(self._data, place, "I")


def describe(path: Path, file: Path) -> Description:
    """Describes a TFLite file. Raises ModelFailed."""
    data = file.read_bytes()
    try:
        return _described(path, data)
    except (struct.error, IndexError) as error:
        raise file_content.cut_off(file) from error


def _described(path: Path, data: bytes) -> Description:
    model = Table(data, _number(data, 0, "I"))
    graph = model.tables(SUBGRAPHS)[0]
    tensors, buffers = graph.tables(TENSORS), model.tables(BUFFERS)
    codes = [max(one.number(CODE, "i"), one.number(OLD_CODE, "b")) for one in model.tables(OPERATOR_CODES)]
    custom = keras.once(filter(None, (one.text(CUSTOM_CODE) for one in model.tables(OPERATOR_CODES))))
    activations = {index: _activation(graph, codes, index) for index in graph.numbers(OUTPUTS)}
    inputs = tuple(_tensor(tensors[index]) for index in graph.numbers(INPUTS))
    is_signed = any(one.dtype == SIGNED for one in inputs)
    stored = {index for index, one in enumerate(buffers) if one.length(DATA)}
    return Description(
        path=path,
        format="TFLite",
        written_by=model.text(DESCRIPTION),
        inputs=inputs,
        outputs=tuple(_tensor(tensors[index], activations[index]) for index in graph.numbers(OUTPUTS)),
        layers=custom,
        parameters=sum(math.prod(one.numbers(SHAPE)) for one in tensors if one.number(BUFFER, "I") in stored),
        size_bytes=len(data),
        notes=(packages.read_by("openvino"), *(("pixels from 0 to 255 become its levels -128 to 127",) * is_signed)),
    )


def _tensor(table: Table, activation: str = "") -> Tensor:
    sides: Iterator[int] = iter(table.numbers(SHAPE_SIGNATURE) or table.numbers(SHAPE))
    shape: Shape = tuple(None if side < 0 else side for side in sides)
    number = table.number(TYPE, "b")
    return Tensor(table.text(NAME), shape, TYPES.get(number, f"type {number}"), activation)


def _activation(graph: Table, codes: list[int], tensor: int) -> str:
    given = {output: one for one in graph.tables(OPERATORS) for output in one.numbers(GIVEN)}
    while (operator := given.pop(tensor, None)) is not None:
        code = codes[operator.number(OPCODE, "I")]
        if code in LINEAR:
            return "linear"
        if code not in PASSING:
            return ACTIVATIONS.get(code, "")
        tensor = operator.numbers(TAKEN)[0]
    return ""


def _number(data: bytes, place: int, kind: str) -> int:
    (number,) = struct.unpack_from(f"<{kind}", data, place)
    return int(number)
