"""Protobuf's wire format (protobuf.dev, "Encoding"), for what is too large for protobuf itself.

Protobuf copies a bytes field into its arena, and again for Python, and it holds the interpreter's lock all the time:
two bytes of an empty field take as long as 150 of an image, so 60 MB of them hold everything up for seconds. Large
messages are therefore taken apart here: images and tensors are viewed where they lie, and protobuf parses the little
that is left. What is large in a response is written in that format as well, by NumPy or on threads.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

import numpy as np
from google.protobuf.message import DecodeError, Message
from numpy.typing import NDArray

from xlaserve.errors import InvalidArgument
from xlaserve.wire.shared import parts
from xlaserve.wire.shared.parts import Part

LARGE_BYTES: Final = 16 * 1024
"""Messages from here on are taken apart."""
MAX_FIELDS: Final = 8192
"""More than any honest message has; to scan them takes some milliseconds."""
MAX_REST_BYTES: Final = 64 * 1024
"""Bytes of a message without its images and tensors: protobuf takes at most 5 ms for any such, and a hundred times the
memory."""

MAX_INLINE_BYTES: Final = 2**19
"""Responses up to this size are joined on the event loop."""

Fields = Mapping[int, "str | Fields"]
"""By number: the name of a field of bytes that is viewed, or the fields within a field that holds such fields."""

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
_CONTINUES: Final = 0x80
_MAX_VARINT_BYTES: Final = 10
_SHIFTS: Final = np.arange(0, 64, 7, dtype=np.uint64)
_STEP: Final = 1 << 16
_COPY_BYTES: Final = 1 << 20

Wire = list[Part]
"""A message as it stands on the wire, in parts. Whole fields may stand in any order, but for those of one list."""
wire_bytes: Final = parts.wire_bytes


class Split(NamedTuple):
    """A message taken apart."""

    rest: bytes
    """The message without the fields in `views`."""
    views: Mapping[str, list[memoryview]]
    """Views of the message's bytes by the name of their field, in the order of the message."""


def split(message: type[Message], data: bytes | memoryview, fields: Fields) -> Split:
    """Takes a `message` apart; its unknown fields are dropped.

    Raises DecodeError for other bytes, InvalidArgument beyond the bounds above.
    """
    return split_each(message, (data,), fields)[0]


def split_each(message: type[Message], several: Iterable[bytes | memoryview], fields: Fields) -> list[Split]:
    """Takes each of `several` messages apart as `split` does; its bounds hold for all of them together."""
    fields_left, size_bytes = MAX_FIELDS, 0
    found = []
    for data in several:
        splitter = _Splitter(data, fields_left)
        try:
            rest = splitter.split(0, len(data), fields, message.DESCRIPTOR.fields_by_number)
        except IndexError:
            raise DecodeError from None
        fields_left = splitter.fields_left
        size_bytes += sum(map(len, rest))
        if size_bytes > MAX_REST_BYTES:
            expected = (
                f"at most {MAX_REST_BYTES} bytes in addition to images and tensors; send listed numbers as bytes,"
                " in raw_input_contents or tensor_content"
            )
            raise InvalidArgument("message", expected, f"{size_bytes} bytes")
        found.append(Split(b"".join(rest), splitter.views))
    return found


def record(number: int, *content: Part) -> Wire:
    """Returns the field `number` of a message that holds `content`, one part after the other; not yet joined."""
    return [opening(number, wire_bytes(content)), *content]


def opening(number: int, size_bytes: int) -> bytes:
    """Returns what stands before the content of the field `number`."""
    return _to_varint(number << 3 | _LENGTH) + _to_varint(size_bytes)


async def join(wire: Wire, size_bytes: int) -> bytes:
    """Returns a message of `size_bytes` in one piece; a large one is joined on a thread, without Python's lock."""
    if size_bytes <= MAX_INLINE_BYTES:
        return b"".join(wire)
    return await asyncio.to_thread(lambda: b"".join(_as_bytes(wire)))


def packed(values: NDArray[Any]) -> bytes:
    """Returns the values of a packed list: floats, or integers and truth values as varints."""
    if values.dtype.kind == "f":
        return values.astype(values.dtype.newbyteorder("<"), copy=False).tobytes()
    # Negative ones take ten bytes, as protobuf has it.
    numbers = values.reshape(-1).astype(np.int64).view(np.uint64)
    return b"".join(_to_varints(numbers[start : start + _STEP]) for start in range(0, len(numbers), _STEP))


def unpacked(octets: NDArray[np.uint8]) -> NDArray[np.uint32]:
    """Returns the varints of a packed list, of each the low 32 bits, as protobuf does for types of that size.

    Raises DecodeError. Takes some nanoseconds a byte, in steps, so that other threads get the interpreter's lock.
    """
    numbers = []
    while len(octets):
        step = octets[:_STEP]
        (ends,) = np.nonzero(step[-_MAX_VARINT_BYTES:] < _CONTINUES)
        if not len(ends):
            raise DecodeError
        step = step[: max(0, len(step) - _MAX_VARINT_BYTES) + ends[-1] + 1]
        numbers.append(_from_varints(step))
        octets = octets[len(step) :]
    return np.concatenate(numbers) if numbers else np.empty(0, np.uint32)


def _from_varints(octets: NDArray[np.uint8]) -> NDArray[np.uint32]:
    (ends,) = np.nonzero(octets < _CONTINUES)
    numbers = octets.take(ends).astype(np.uint32)
    # From each number's last octet to its first. Before the first number stands the last octet of all, which is an end.
    reaches = np.ones(len(ends), bool)
    for back in range(1, _MAX_VARINT_BYTES + 1):
        octet = octets.take(ends - back, mode="wrap")
        reaches &= octet >= _CONTINUES
        if not reaches.any():
            return numbers
        numbers = np.where(reaches, numbers << 7 | octet & (_CONTINUES - 1), numbers)
    raise DecodeError


def _to_varints(numbers: NDArray[np.uint64]) -> bytes:
    if numbers.max() < _CONTINUES:
        return numbers.astype(np.uint8).tobytes()
    groups = numbers[:, np.newaxis] >> _SHIFTS
    is_there = groups != 0
    is_there[:, 0] = True
    octets: NDArray[np.uint8] = (groups & np.uint64(_CONTINUES - 1)).astype(np.uint8)
    octets[:, :-1] |= np.where(is_there[:, 1:], _CONTINUES, 0).astype(np.uint8)
    there: bytes = octets[is_there].tobytes()
    return there


class _Splitter:
    def __init__(self, data: bytes | memoryview, fields_left: int) -> None:
        self._data = data
        self._view = memoryview(data)
        self.fields_left = fields_left
        self.views: defaultdict[str, list[memoryview]] = defaultdict(list)

    def split(  # noqa: PLR0912 - a function for each kind costs more than all else
        self, position: int, end: int, fields: Fields, known: Container[int] | None = None
    ) -> list[bytes | memoryview]:
        """Returns what is left of the message from `position` to `end`."""
        data, view = self._data, self._view
        rest: list[bytes | memoryview] = []
        kept_to = position
        while position < end:
            self.fields_left -= 1
            if self.fields_left < 0:
                raise InvalidArgument("message", f"at most {MAX_FIELDS} fields", "more")
            begin, within = position, None
            tag = data[position]
            if tag < 0x80:  # as nearly all are, and a call costs more than all the rest
                position += 1
            else:
                tag, position = _varint(data, position)
            kind = tag & 7
            if kind == _LENGTH:
                length = data[position]
                if length < 0x80:
                    position += 1
                else:
                    length, position = _varint(data, position)
                start, position = position, position + length
                within = fields.get(tag >> 3)
                if position > end:
                    raise DecodeError
                if within is not None:
                    if kept_to < begin:
                        rest.append(view[kept_to:begin])
                    kept_to = position
                    if isinstance(within, str):
                        self.views[within].append(view[start:position])
                    else:
                        rest += record(tag >> 3, *self.split(start, position, within))
            elif kind == _VARINT:
                _, position = _varint(data, position)
            elif kind in (_FIXED64, _FIXED32):
                position += 8 if kind == _FIXED64 else 4
            else:
                raise DecodeError
            if known is not None and within is None and tag >> 3 and tag >> 3 not in known:
                rest.append(view[kept_to:begin])
                kept_to = position
        if position != end:
            raise DecodeError
        rest.append(view[kept_to:end])
        return rest


def _as_bytes(message: Iterable[Part]) -> Iterator[bytes]:
    """Yields bytes alone, which are joined without the interpreter's lock, and copied with it in steps."""
    for part in message:
        if isinstance(part, bytes):
            yield part
        else:
            yield from (bytes(part[start : start + _COPY_BYTES]) for start in range(0, len(part), _COPY_BYTES))


def _varint(data: bytes | memoryview, position: int) -> tuple[int, int]:
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


def _to_varint(number: int) -> bytes:
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)
