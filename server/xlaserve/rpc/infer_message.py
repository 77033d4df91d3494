"""ModelInferRequest without copies: pixels and images stay in the bytes that arrived."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from google.protobuf.message import DecodeError

from xlaserve.rpc import parts
from xlaserve.rpc.parts import LARGE_BYTES
from xlaserve_proto import open_inference_pb2 as pb

RAW: Final = "raw_input_contents"
TYPED: Final = ("int_contents", "uint_contents", "fp32_contents")
BYTES: Final = "bytes_contents"

_CONTENTS: Final = {pb.InferTensorContents.DESCRIPTOR.fields_by_name[name].number: name for name in (*TYPED, BYTES)}
_FIELDS: Final[parts.Fields] = {
    pb.ModelInferRequest.RAW_INPUT_CONTENTS_FIELD_NUMBER: RAW,
    pb.ModelInferRequest.INPUTS_FIELD_NUMBER: {
        pb.ModelInferRequest.InferInputTensor.CONTENTS_FIELD_NUMBER: _CONTENTS,
    },
}


class InferMessage(NamedTuple):
    """A request as it arrived."""

    fields: pb.ModelInferRequest
    """Everything but what is viewed, which may be empty in it."""
    raw: Sequence[memoryview]
    """`raw_input_contents`."""
    contents: Mapping[str, Sequence[memoryview]]
    """Lists of typed `contents` that are viewed as they were sent, by the field's name."""


def parse(data: bytes) -> InferMessage | None:
    """Returns the message, None where `data` is none. Raises InvalidArgument where it is beyond all bounds."""
    try:
        if len(data) >= LARGE_BYTES:
            rest, views = parts.split(pb.ModelInferRequest, data, _FIELDS)
            return InferMessage(pb.ModelInferRequest.FromString(rest), views.get(RAW, ()), views)
        fields = pb.ModelInferRequest.FromString(data)
    except DecodeError:
        return None
    return InferMessage(fields, tuple(map(memoryview, fields.raw_input_contents)), {})
