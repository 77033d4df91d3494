"""ModelInferRequest without copies: pixels stay in the bytes that arrived.

Protobuf copies a bytes field into its arena, and again for Python: at 150 KB an image that is most of what parsing
costs. Large messages are therefore taken apart here, after the wire format's rules (protobuf.dev, "Encoding"): the raw
tensors are viewed where they lie, and protobuf parses the little that is left.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from google.protobuf.message import DecodeError

from xlaserve_proto import open_inference_pb2 as pb

LARGE_BYTES: Final = 16 * 1024
"""From here on a copy costs more than looking at each field in Python."""
MAX_FIELDS: Final = 256
"""More than any honest request has. Protobuf takes apart what has more: in Python each would cost a microsecond of the
event loop and a hundred bytes, and a message has room for millions."""

_RAW_TAG: Final = pb.ModelInferRequest.RAW_INPUT_CONTENTS_FIELD_NUMBER << 3 | 2
_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5


class InferMessage(NamedTuple):
    """A request as it arrived."""

    fields: pb.ModelInferRequest
    """Everything but `raw_input_contents`, which may be empty in it."""
    raw: tuple[memoryview, ...]
    """`raw_input_contents`; of absurdly many the first."""


def parse(data: bytes) -> InferMessage | None:
    """Returns the message, None where `data` is none."""
    try:
        message = _view(data) if len(data) >= LARGE_BYTES else None
        if message is not None:
            return message
        fields = pb.ModelInferRequest.FromString(data)
    except (DecodeError, IndexError):
        return None
    return InferMessage(fields, tuple(map(memoryview, fields.raw_input_contents[:MAX_FIELDS])))


def _view(data: bytes) -> InferMessage | None:
    """Returns the message with its raw tensors viewed in `data`; None where it has too many fields for that."""
    view = memoryview(data)
    raw: list[memoryview] = []
    rest: list[memoryview] = []
    kept_to = position = 0
    for _ in range(MAX_FIELDS):
        if position >= len(data):
            rest.append(view[kept_to:])
            return InferMessage(pb.ModelInferRequest.FromString(b"".join(rest)), tuple(raw))
        begin = position
        tag, position = _varint(data, position)
        kind = tag & 7
        if kind == _LENGTH:
            length, position = _varint(data, position)
            end = position + length
            if end > len(data):
                raise DecodeError
            if tag == _RAW_TAG:
                raw.append(view[position:end])
                rest.append(view[kept_to:begin])
                kept_to = end
            position = end
        elif kind == _VARINT:
            _, position = _varint(data, position)
        elif kind in (_FIXED64, _FIXED32):
            position += 8 if kind == _FIXED64 else 4
        else:
            raise DecodeError
    return None


def _varint(data: bytes, position: int) -> tuple[int, int]:
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
