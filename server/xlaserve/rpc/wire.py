"""What a message will take, told from its bytes before protobuf takes it apart.

Two bytes on the wire can become a hundred in memory: a message of 64 MiB of empty fields takes gigabytes, and a packed
integer of one byte takes up to eight. The wire format's rules are in protobuf.dev, "Encoding".
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError

from xlaserve.errors import InvalidArgument

LARGE_BYTES: Final = 16 * 1024
"""Messages from here on are worth a look."""
MAX_FIELDS: Final = 8192
"""More than any honest message has; looking at them takes some milliseconds."""
_NESTED_BYTES: Final = 64
"""Smaller messages within a message are not looked into: there can't be many fields in them."""

VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5
_NUMBER_BYTES: Final = {
    FieldDescriptor.CPPTYPE_INT64: 8,
    FieldDescriptor.CPPTYPE_UINT64: 8,
    FieldDescriptor.CPPTYPE_INT32: 4,
    FieldDescriptor.CPPTYPE_UINT32: 4,
    FieldDescriptor.CPPTYPE_ENUM: 4,
}
_FIXED: Final = {
    FieldDescriptor.TYPE_FIXED32,
    FieldDescriptor.TYPE_FIXED64,
    FieldDescriptor.TYPE_SFIXED32,
    FieldDescriptor.TYPE_SFIXED64,
}


@dataclass(frozen=True, slots=True)
class Shape:
    """What a type of message has, by the fields' numbers."""

    messages: dict[int, Shape] = field(default_factory=dict)
    """Fields that are messages themselves."""
    growth: dict[int, int] = field(default_factory=dict)
    """Packed numbers: how many bytes each of theirs may become, besides itself."""


def shape_of(message: Descriptor) -> Shape:
    """Returns the shape of a type of message that does not contain itself."""
    shape = Shape()
    for one in message.fields:
        if one.message_type is not None:
            shape.messages[one.number] = shape_of(one.message_type)
        elif one.type not in _FIXED and (number_bytes := _NUMBER_BYTES.get(one.cpp_type)):
            shape.growth[one.number] = number_bytes - 1
    return shape


def memory_bytes(data: bytes, shape: Shape) -> int:  # noqa: PLR0912 - a function for each kind costs more than all else
    """Returns the bytes that the message takes once it is parsed, or more.

    Raises DecodeError or IndexError for bytes that are no message, InvalidArgument for too many fields.
    """
    size_bytes = end = len(data)
    position = 0
    around: list[tuple[int, Shape]] = []
    for _ in range(MAX_FIELDS):
        while position >= end:
            if not around:
                return size_bytes
            end, shape = around.pop()
        tag = data[position]
        if tag < 0x80:  # as nearly all are, and a call costs more than all the rest
            position += 1
        else:
            tag, position = varint(data, position)
        kind = tag & 7
        if kind == LENGTH:
            length = data[position]
            if length < 0x80:
                position += 1
            else:
                length, position = varint(data, position)
            if position + length > end:
                raise DecodeError
            if length >= _NESTED_BYTES:
                number = tag >> 3
                if (inner := shape.messages.get(number)) is not None:
                    around.append((end, shape))
                    end, shape = position + length, inner
                    continue
                size_bytes += length * shape.growth.get(number, 0)
            position += length
        elif kind == VARINT:
            while data[position] >= 0x80:
                position += 1
            position += 1
        elif kind in (FIXED64, FIXED32):
            position += 8 if kind == FIXED64 else 4
        else:
            raise DecodeError
    raise InvalidArgument("message", f"at most {MAX_FIELDS} fields", "more")


def varint(data: bytes, position: int) -> tuple[int, int]:
    """Returns the number at `position` and where it ends."""
    number = shift = 0
    while True:
        byte = data[position]
        position += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, position
        shift += 7
        if shift > 63:
            raise DecodeError
