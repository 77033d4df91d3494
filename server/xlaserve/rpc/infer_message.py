"""ModelInferRequest without copies: pixels stay in the bytes that arrived.

Protobuf copies a bytes field into its arena, and again for Python: at 150 KB an image that is most of what parsing
costs. Large messages, those where a copy costs more than looking at each field in Python, are therefore taken apart
here: the raw tensors are viewed where they lie, unknown fields are dropped, and protobuf parses the rest, which is
little.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from google.protobuf.message import DecodeError

from xlaserve.rpc.wire import FIXED32, FIXED64, LARGE_BYTES, LENGTH, VARINT, varint
from xlaserve_proto import open_inference_pb2 as pb

MAX_FIELDS: Final = 256
"""More than any honest request has. Protobuf takes apart what has more: in Python each would cost a microsecond of the
event loop and a hundred bytes, and a message has room for millions."""

_RAW_TAG: Final = pb.ModelInferRequest.RAW_INPUT_CONTENTS_FIELD_NUMBER << 3 | 2
_KNOWN: Final = frozenset({0, *pb.ModelInferRequest.DESCRIPTOR.fields_by_number})
"""0 is no field, which is for protobuf to say."""


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
        tag, position = varint(data, position)
        kind = tag & 7
        if kind == LENGTH:
            length, position = varint(data, position)
            if tag == _RAW_TAG:
                raw.append(view[position : position + length])
            position += length
        elif kind == VARINT:
            _, position = varint(data, position)
        elif kind in (FIXED64, FIXED32):
            position += 8 if kind == FIXED64 else 4
        else:
            raise DecodeError
        if position > len(data):
            raise DecodeError
        if tag == _RAW_TAG or tag >> 3 not in _KNOWN:
            rest.append(view[kept_to:begin])
            kept_to = position
    return None
