"""The tables of TFLite files, which are FlatBuffers: fields are found by their numbers."""

from __future__ import annotations

import struct
from typing import Final

MAGIC: Final = b"TFL3"
"""Bytes 4 to 7 of every file."""
DETECTION: Final = "TFLite_Detection_PostProcess"
"""The operation with which TensorFlow Lite decodes and suppresses a detector's boxes."""
# Numbers of fields.
OPERATOR_CODES, SUBGRAPHS, DESCRIPTION, BUFFERS = 1, 2, 3, 4  # of the model
TENSORS, INPUTS, OUTPUTS, OPERATORS = 0, 1, 2, 3  # of a subgraph
SHAPE, TYPE, BUFFER, NAME, QUANTIZATION, SHAPE_SIGNATURE = 0, 1, 2, 3, 4, 7  # of a tensor
SCALE, ZERO_POINT = 2, 3  # of a quantization
OLD_CODE, CUSTOM_CODE, CODE = 0, 1, 3  # of an operator's code
OPCODE, TAKEN, GIVEN, CUSTOM_OPTIONS = 0, 1, 2, 5  # of an operator
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

    def numbers(self, field: int, kind: str = "i") -> list[int]:
        """Returns a vector of whole numbers, by default of 32 bits."""
        start, count = self.vector(field)
        return list(struct.unpack_from(f"<{count}{kind}", self._data, start))

    def floats(self, field: int) -> list[float]:
        """Returns a vector of floats of 32 bits."""
        start, count = self.vector(field)
        return list(struct.unpack_from(f"<{count}f", self._data, start))

    def length(self, field: int) -> int:
        """Returns how many elements a vector has."""
        return self.vector(field)[1]

    def content(self, field: int) -> bytes:
        """Returns a vector of bytes."""
        start, count = self.vector(field)
        return self._data[start : start + count]

    def text(self, field: int) -> str:
        """Returns a text."""
        return self.content(field).decode(errors="replace")

    def table(self, field: int) -> Table | None:
        """Returns a table in a field; None where there is none."""
        place = self._at(field)
        return None if place is None else Table(self._data, place + _number(self._data, place, "I"))

    def tables(self, field: int) -> list[Table]:
        """Returns a vector of tables."""
        start, count = self.vector(field)
        return [
            Table(self._data, place + _number(self._data, place, "I")) for place in range(start, start + 4 * count, 4)
        ]

    def vector(self, field: int) -> tuple[int, int]:
        """Returns where a vector's first element is in the file, in bytes, and how many elements there are."""
        place = self._at(field)
        if place is None:
            return 0, 0
        place += _number(self._data, place, "I")
        return place + 4, _number(self._data, place, "I")

    def _at(self, field: int) -> int | None:
        entry = 4 + 2 * field
        offset = _number(self._data, self._fields + entry, "H") if entry < self._size else 0
        return self._place + offset if offset else None


def root(data: bytes) -> Table:
    """Returns the table of the model. Raises struct.error for data that ends too early, as all tables do."""
    return Table(data, _number(data, 0, "I"))


def _number(data: bytes, place: int, kind: str) -> int:
    (number,) = struct.unpack_from(f"<{kind}", data, place)
    return int(number)
