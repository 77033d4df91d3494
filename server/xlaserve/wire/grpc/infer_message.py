"""ModelInferRequest without copies: pixels and images stay in the bytes that arrived."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any, Final, NamedTuple

import numpy as np
from google.protobuf.message import DecodeError, Message

from xlaserve.images.image_input import ImageInput
from xlaserve.wire.grpc import wire_format
from xlaserve.wire.grpc.packed_lists import ListField
from xlaserve.wire.grpc.wire_format import LARGE_BYTES
from xlaserve.wire.shared.inference import Parameters
from xlaserve.wire.shared.input_tensors import MAX_INPUTS, MAX_SHOWN, SHARED_MEMORY
from xlaserve_proto import open_inference_pb2 as pb

RAW: Final = "raw_input_contents"
TYPED: Final = {
    "UINT8": ListField("uint_contents", np.uint32),
    "INT32": ListField("int_contents", np.int32),
    "FP32": ListField("fp32_contents", np.float32),
}
"""By datatype: the field of `contents` that holds it."""
TYPED_BY_NAME: Final = {field.name: field for field in TYPED.values()}
BYTES: Final = "bytes_contents"
ENCODED: Final = "BYTES"
"""The datatype of encoded images."""

MAX_KNOWN: Final = 64
"""Requests that are kept."""
MAX_KNOWN_BYTES: Final = 1024
"""Bytes that are kept of one request; parsed, they take some times as much."""
NAME_BYTES: Final = 32
"""Prefix that distinguishes requests of equal size, by the model's name in it; one request is kept per prefix."""

SHARED_PREFIX: Final = b"shared_memory_"
"""How the names of SHARED_MEMORY begin."""

_LISTS: Final = pb.InferTensorContents.DESCRIPTOR.fields_by_name
_CONTENTS: Final = {_LISTS[name].number: name for name in (*(field.name for field in TYPED.values()), BYTES)}
_INPUT: Final[wire_format.Fields] = {pb.ModelInferRequest.InferInputTensor.CONTENTS_FIELD_NUMBER: _CONTENTS}
_FIELDS: Final[wire_format.Fields] = {
    pb.ModelInferRequest.RAW_INPUT_CONTENTS_FIELD_NUMBER: RAW,
    pb.ModelInferRequest.INPUTS_FIELD_NUMBER: _INPUT,
}
_INPUTS: Final = "inputs"
_INPUTS_ALONE: Final[wire_format.Fields] = {pb.ModelInferRequest.INPUTS_FIELD_NUMBER: _INPUTS}


class CachedHeader:
    """All of a request but the contents of its tensors.

    Requests that differ in those alone share a head: nobody changes its `fields`, and what checks of one request have
    found is remembered for the next.
    """

    __slots__ = (
        *("fields", "has_outputs", "has_shared", "id", "known_input", "known_parameters", "known_shape", "model"),
        "version",
    )

    def __init__(self, data: bytes) -> None:
        """Parses a request without the fields that stay views of its bytes. Raises DecodeError."""
        self.fields = fields = pb.ModelInferRequest.FromString(data)
        """The parsed message; fields that are views of its bytes may be missing."""
        self.model: str = fields.model_name
        self.version: str = fields.model_version
        self.id: str = fields.id
        self.has_outputs = bool(fields.outputs)
        """Whether it names the outputs that it wants."""
        # To look at each tensor takes far longer than to search.
        self.has_shared = SHARED_PREFIX in data and any(
            map(_is_shared, chain(islice(fields.inputs, MAX_SHOWN), islice(fields.outputs, MAX_SHOWN)))
        )
        """Whether tensors lie in shared memory. More tensors than are looked at will be refused."""
        self.known_parameters: Parameters | None = None
        """Its parameters, once they were checked."""
        self.known_shape: tuple[int, ...] | None = None
        """Shape of its raw UINT8 pixels, once it was checked. Messages with one head have one size, so it fits all."""
        self.known_input: ImageInput | None = None
        """The input that `known_shape` is for: a model that is loaded again may have another."""


class InferMessage(NamedTuple):
    """A request as it arrived."""

    head: CachedHeader
    raw: Sequence[memoryview]
    """`raw_input_contents`; empty for an input that is listed, where others lie in shared memory."""
    contents: Sequence[Mapping[str, Sequence[memoryview]]]
    """Of each input the lists of typed `contents` that are viewed as they were sent, by the field's name; empty for a
    small message."""

    @property
    def wants_raw(self) -> bool:
        """Whether outputs are raw, as they are for raw inputs and in shared memory."""
        return bool(self.raw) or self.head.has_shared


class _Known(NamedTuple):
    """The parts that messages of one size and one head have in common."""

    beginning: bytes
    """The bytes before the first byte of the first tensor."""
    between: Sequence[tuple[int, bytes]]
    """The bytes between two tensors, and where they begin."""
    tensors: Sequence[tuple[int, int]]
    """Where each tensor begins and ends."""
    head: CachedHeader

    def fits(self, data: bytes) -> bool:
        """Returns whether a message of that size has these parts."""
        return data.startswith(self.beginning) and (
            not self.between or all(data.startswith(part, at) for at, part in self.between)
        )


class InferMessages:
    """Parses requests.

    Most differ from an earlier one only in the bytes of their raw tensors, which come last. Their size and their first
    bytes identify them, and the head of the earlier one is reused. Requests with an id are not kept.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[int, bytes], _Known] = {}
        """By a message's size and prefix."""

    def parse(self, data: bytes) -> InferMessage | None:
        """Returns the message, None where `data` can't be parsed.

        Raises InvalidArgument beyond a bound of `wire_format`.
        """
        known = self._known.get((len(data), data[:NAME_BYTES]))
        if known is not None and known.fits(data):
            view = memoryview(data)
            return InferMessage(known.head, [view[start:stop] for start, stop in known.tensors], ())
        try:
            message = _parse(data)
        except DecodeError:
            return None
        if 0 < len(message.raw) <= MAX_INPUTS and not message.head.id:  # more are refused
            self._learn(data, message.raw)
        return message

    def _learn(self, data: bytes, raw: Sequence[memoryview]) -> None:
        """Keeps how a message begins, where its tensors come last.

        Protobuf parses two messages, one behind the other, as one with the fields of both. So the rest means the same
        with any tensors of these sizes behind it.
        """
        end, tensors, openings = len(data), [], []
        for tensor in reversed(raw):
            start = end - len(tensor)
            opening = wire_format.opening(pb.ModelInferRequest.RAW_INPUT_CONTENTS_FIELD_NUMBER, len(tensor))
            tensors.append((start, end))
            end = start - len(opening)
            openings.append((end, opening))
            if end < 0 or not data.startswith(opening, end):
                return
        if end > MAX_KNOWN_BYTES:
            return
        try:
            head = CachedHeader(data[:end])
        except DecodeError:
            return
        inputs = head.fields.inputs
        # Encoded images hardly ever have one size.
        if len(inputs) != len(raw) or any(tensor.datatype == ENCODED for tensor in inputs):
            return
        if len(self._known) >= MAX_KNOWN:
            del self._known[next(iter(self._known))]
        _, *others = reversed(openings)
        known = _Known(data[: tensors[-1][0]], others, tensors[::-1], head)
        self._known[len(data), data[:NAME_BYTES]] = known


def parameter_items(parameters: Mapping[str, pb.InferParameter]) -> Iterator[tuple[str, object]]:
    """Yields names and values, None for a parameter without one."""
    for key, value in parameters.items():
        yield key, parameter_value(value)


def parameter_value(value: Message) -> object:
    """Returns the value of any message with a `parameter_choice`; None where it has none."""
    return getattr(value, kind) if (kind := value.WhichOneof("parameter_choice")) else None


def _is_shared(tensor: Any) -> bool:
    """Returns whether an input or a requested output lies in shared memory."""
    parameters = tensor.parameters
    return bool(parameters) and any(key in parameters for key in SHARED_MEMORY)


def _parse(data: bytes) -> InferMessage:
    """Raises DecodeError, and InvalidArgument beyond a bound of `wire_format`."""
    if len(data) >= LARGE_BYTES:
        rest, views = wire_format.split(pb.ModelInferRequest, data, _FIELDS)
        head = CachedHeader(rest)
        contents: Sequence[Mapping[str, Sequence[memoryview]]] = ()
        if len(head.fields.inputs) == 1:
            contents = (views,)
        elif views.keys() - {RAW}:  # nobody knows which list is of which input
            inputs = wire_format.split(pb.ModelInferRequest, data, _INPUTS_ALONE).views[_INPUTS]
            apart = wire_format.split_each(pb.ModelInferRequest.InferInputTensor, inputs, _INPUT)
            contents = [of_input for _, of_input in apart]
        return InferMessage(head, views.get(RAW, ()), contents)
    head = CachedHeader(data)
    return InferMessage(head, tuple(map(memoryview, head.fields.raw_input_contents)), ())
