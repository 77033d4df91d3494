"""ModelInferRequest without copies: pixels and images stay in the bytes that arrived."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from google.protobuf.message import DecodeError

from xlaserve.config import PixelRange
from xlaserve.rpc import parts
from xlaserve.rpc.parts import LARGE_BYTES
from xlaserve_proto import open_inference_pb2 as pb

PIXELS: Final = "pixels"
IMAGE: Final = "image"
RAW: Final = "raw_input_contents"
TYPED: Final = ("int_contents", "uint_contents", "fp32_contents")
BYTES: Final = "bytes_contents"

MAX_KNOWN: Final = 64
"""Kinds of requests that are kept."""
MAX_KNOWN_BYTES: Final = 1024
"""Bytes that are kept of one request; parsed, they take some times as much."""
NAME_BYTES: Final = 32
"""Bytes that tell requests of one size apart; they hold the model's name. Of those that begin alike one is kept."""

_UNKNOWN: Final[tuple[bytes, Head | None]] = (b"", None)
_CONTENTS: Final = {pb.InferTensorContents.DESCRIPTOR.fields_by_name[name].number: name for name in (*TYPED, BYTES)}
_FIELDS: Final[parts.Fields] = {
    pb.ModelInferRequest.RAW_INPUT_CONTENTS_FIELD_NUMBER: RAW,
    pb.ModelInferRequest.INPUTS_FIELD_NUMBER: {
        pb.ModelInferRequest.InferInputTensor.CONTENTS_FIELD_NUMBER: _CONTENTS,
    },
}


class Head:
    """All of a request but the contents of its tensors. Requests that are alike share one, so nobody changes `fields`;
    what was found out about it stays for the next."""

    __slots__ = ("asked", "fields", "has_outputs", "id", "model", "pixels_shape", "version")

    def __init__(self, fields: pb.ModelInferRequest) -> None:
        self.fields = fields
        self.model: str = fields.model_name
        self.version: str = fields.model_version
        self.id: str = fields.id
        self.has_outputs = bool(fields.outputs)
        """Whether it names the outputs that it wants."""
        self.asked: Asked | None = None
        """What its parameters ask for, once they were found right."""
        self.pixels_shape: tuple[int, ...] | None = None
        """Shape of its raw UINT8 pixels, once it was found right."""


class Asked(NamedTuple):
    """What a request's parameters ask for."""

    mode: str = ""
    timeout_s: float = math.inf
    pixel_range: PixelRange | None = None


class InferMessage(NamedTuple):
    """A request as it arrived."""

    head: Head
    raw: Sequence[memoryview]
    """`raw_input_contents`."""
    contents: Mapping[str, Sequence[memoryview]]
    """Lists of typed `contents` that are viewed as they were sent, by the field's name."""

    @property
    def fields(self) -> pb.ModelInferRequest:
        """Everything but what is viewed, which may be empty in it."""
        return self.head.fields


class InferMessages:
    """Parses requests. Most differ from one before in nothing but the bytes of their raw tensor, which comes last: they
    are known by their size and by how they begin, and only the tensor is looked at. Those with an id are not kept."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, bytes], tuple[bytes, Head]] = {}
        """Known messages by their size and first bytes, which usually hold the model's name: how a message begins,
        up to the tensor's first byte, and its head."""

    def parse(self, data: bytes) -> InferMessage | None:
        """Returns the message, None where `data` is none. Raises InvalidArgument where it is beyond all bounds."""
        beginning, head = self._known.get((len(data), data[:NAME_BYTES]), _UNKNOWN)
        if head is not None and data.startswith(beginning):
            return InferMessage(head, (memoryview(data)[len(beginning) :],), {})
        try:
            message = _parse(data)
        except DecodeError:
            return None
        if len(message.raw) == 1 and not message.head.id:
            self._learn(data, message.raw[0])
        return message

    def _learn(self, data: bytes, tensor: memoryview) -> None:
        """Keeps how a message begins, where its tensor comes last.

        Protobuf parses two messages, one behind the other, as one with the fields of both. So the rest means the same
        with any tensor of this size behind it.
        """
        beginning = data[: len(data) - len(tensor)]
        opening = parts.opening(pb.ModelInferRequest.RAW_INPUT_CONTENTS_FIELD_NUMBER, len(tensor))
        if len(beginning) > MAX_KNOWN_BYTES or not beginning.endswith(opening):
            return
        try:
            rest = pb.ModelInferRequest.FromString(beginning.removesuffix(opening))
        except DecodeError:
            return
        if [tensor.name for tensor in rest.inputs] != [PIXELS]:  # encoded images hardly ever have one size
            return
        if len(self._known) >= MAX_KNOWN:
            del self._known[next(iter(self._known))]
        self._known[len(data), data[:NAME_BYTES]] = beginning, Head(rest)


def _parse(data: bytes) -> InferMessage:
    """Raises DecodeError, and InvalidArgument where the message is beyond all bounds."""
    if len(data) >= LARGE_BYTES:
        rest, views = parts.split(pb.ModelInferRequest, data, _FIELDS)
        return InferMessage(Head(pb.ModelInferRequest.FromString(rest)), views.get(RAW, ()), views)
    fields = pb.ModelInferRequest.FromString(data)
    return InferMessage(Head(fields), tuple(map(memoryview, fields.raw_input_contents)), {})
