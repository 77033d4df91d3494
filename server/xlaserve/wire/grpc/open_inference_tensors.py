"""Tensors of the Open Inference Protocol as they stand in its messages, to and from NumPy."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import chain
from typing import Any, Final

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from xlaserve.config import PixelRange
from xlaserve.engine.program import Images, Value
from xlaserve.errors import InvalidArgument
from xlaserve.images.decoder import Encoded
from xlaserve.pipeline import Pending
from xlaserve.wire.grpc import wire_format
from xlaserve.wire.grpc.infer_message import TYPED, InferMessage
from xlaserve.wire.shared.input_tensors import PIXEL_DTYPES, PIXELS, SHARED_MEMORY, check_count, images_of, raw_bytes
from xlaserve.wire.shared.shared_memory import Slot
from xlaserve_proto import open_inference_pb2 as pb

OUTPUT_FIELDS: Final = {
    np.dtype(np.float32): ("FP32", "fp32_contents"),
    np.dtype(np.int32): ("INT32", "int_contents"),
    np.dtype(np.uint8): ("UINT8", "uint_contents"),
}
"""By an output's NumPy type: its datatype, and the field of `contents` that holds it."""
FLOAT_FIELDS: Final = ("fp32_contents", "float_val")
SIGNED_FIELDS: Final = ("int_contents", "int_val")
"""Lists of float32 and of int32, of the Open Inference Protocol and of TensorFlow; others are of unsigned integers."""
MAX_TYPED_VALUES: Final = 2**21
"""Values in one request's `contents`."""
MAX_INLINE_VARINT_BYTES: Final = 2**16
"""INT32 and UINT8 pixels in `contents` become an array at up to ten nanoseconds a byte. More are left to a thread."""
MAX_TYPED_BYTES: Final = 4 * MAX_TYPED_VALUES
MAX_COPIED_BYTES: Final = 64 * 1024
"""Outputs up to this size are copied before the response is put together: that costs less than a view."""

Input = pb.ModelInferRequest.InferInputTensor
Output = pb.ModelInferResponse.InferOutputTensor
_OUTPUTS: Final = pb.ModelInferResponse.OUTPUTS_FIELD_NUMBER
_RAW_OUTPUTS: Final = pb.ModelInferResponse.RAW_OUTPUT_CONTENTS_FIELD_NUMBER


class _Input:
    """An input tensor of a request, for `images_of`."""

    __slots__ = ("_message", "_tensor", "datatype", "name", "parameters", "shape")
    bytes_field = "raw_input_contents"
    values_field = "contents"

    def __init__(self, message: InferMessage, tensor: Input) -> None:
        self._message = message
        self._tensor = tensor
        self.name: str = tensor.name
        self.datatype: str = tensor.datatype
        self.shape: Sequence[int] = tensor.shape
        self.parameters: Iterable[str] = tensor.parameters

    def raw(self) -> memoryview | None:
        raw = self._message.raw
        if not raw:
            return None
        if len(raw) != 1:
            raise InvalidArgument("raw_input_contents", "one entry, as there is one input", len(raw))
        if self._tensor.HasField("contents"):
            raise InvalidArgument("inputs.contents", "nothing alongside raw_input_contents", "both")
        return raw[0]

    def values(self, shape: tuple[int, ...]) -> NDArray[Any] | PackedIntegers:
        """Returns views or a copy of what was sent."""
        field = TYPED.get(self.datatype)
        if field is None:
            raise InvalidArgument(
                f"{self.values_field} of {PIXELS}", f"{self.datatype} as raw_input_contents", "a list"
            )
        contents = getattr(self._tensor.contents, field)
        packed: NDArray[np.uint8] | None = None
        count = len(contents)
        if views := self._message.contents.get(field):
            packed, count = packed_list(field, views, has_others=count > 0)
        check_count(count, shape, self.values_field, f"values in {field}")
        dtype = PIXEL_DTYPES[self.datatype]
        if packed is None:
            values = np.array(contents, np.uint32 if field == "uint_contents" else dtype)
            return _narrowed(values).reshape(shape)
        if field == "fp32_contents":
            return packed.view(dtype).reshape(shape)
        integers = PackedIntegers(field, packed, shape)
        return integers if packed.nbytes > MAX_INLINE_VARINT_BYTES else np.asarray(integers)

    def elements(self) -> list[Encoded]:
        return [*self._tensor.contents.bytes_contents, *self._message.contents.get("bytes_contents", ())]


def read_images(
    message: InferMessage,
    default_range: PixelRange = PixelRange.LEVELS,
    pixel_range: PixelRange | None = None,
    *,
    input_name: str = "",
    is_strict: bool = False,
) -> Images | Pending | list[Encoded]:
    """Returns the images of a request as `images_of` does."""
    head = message.head
    if head.known_shape is not None:
        return np.ndarray(head.known_shape, np.uint8, message.raw[0])
    inputs = head.fields.inputs
    tensors = map(partial(_Input, message), inputs)
    images = images_of(tensors, default_range, pixel_range, input_name=input_name, is_strict=is_strict)
    # A model that is loaded again may be strict, and refuse parameters that were ignored.
    if message.raw and isinstance(images, np.ndarray) and inputs[0].datatype == "UINT8" and not inputs[0].parameters:
        head.known_shape = images.shape
    return images


@dataclass(frozen=True, slots=True)
class PackedIntegers:
    """Integers as they stand in a packed list, for `pipeline.Pending`."""

    field: str
    octets: NDArray[np.uint8]
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return math.prod(self.shape) * 4

    def __array__(self, dtype: object = None, copy: object = None) -> NDArray[np.int32]:
        try:
            values = wire_format.unpacked(self.octets)
        except DecodeError:
            raise _not_packed(self.field) from None
        is_signed = self.field in SIGNED_FIELDS
        return _narrowed(values.view(np.int32) if is_signed else values).reshape(self.shape)


def _narrowed(values: NDArray[Any]) -> NDArray[Any]:
    """UINT8 pixels, which are wider on the wire than the tensor's type, are checked as INT32 is."""
    return np.minimum(values, np.iinfo(np.int32).max).astype(np.int32) if values.dtype == np.uint32 else values


def packed_list(
    field: str, views: Sequence[memoryview], has_others: bool, raw_field: str = "raw_input_contents"
) -> tuple[NDArray[np.uint8], int]:
    """Returns a list as it stands on the wire, and how many values it has. `raw_field` may hold more.

    Raises InvalidArgument for too many, and where the list `has_others`, one by one: nobody knows in which order.
    """
    size_bytes = sum(map(len, views))
    too_many = InvalidArgument(
        f"contents of {PIXELS}",
        f"at most {MAX_TYPED_VALUES} values; {raw_field} takes more",
        f"{size_bytes} bytes",
    )
    if size_bytes > MAX_TYPED_BYTES:
        raise too_many
    octets = np.frombuffer(views[0] if len(views) == 1 else b"".join(views), np.uint8)
    if field in FLOAT_FIELDS:
        count, is_cut = size_bytes // 4, any(len(view) % 4 for view in views)
    else:
        is_end = octets < 0x80  # each ends with its only byte below
        count, is_cut = int(np.count_nonzero(is_end)), any(view[-1] >= 0x80 for view in views if view)
    if count > MAX_TYPED_VALUES:
        raise too_many
    if is_cut or has_others:
        raise _not_packed(field)
    return octets, count


def _not_packed(field: str) -> InvalidArgument:
    return InvalidArgument(f"contents of {PIXELS}", f"packed values in {field}", "other bytes")


def piece_of_values(values: NDArray[Value]) -> bytes:
    """Returns a part of a tensor's `contents`, as it stands in a response."""
    number = pb.InferTensorContents.DESCRIPTOR.fields_by_name[OUTPUT_FIELDS[values.dtype][1]].number
    return b"".join(wire_format.record(number, wire_format.packed(values)))


def piece_of_bytes(elements: Iterable[bytes], as_raw: bool) -> bytes:
    """Returns a part of a tensor of BYTES, as it stands in a response."""
    if as_raw:
        return raw_bytes(elements)
    records = (wire_format.record(pb.InferTensorContents.BYTES_CONTENTS_FIELD_NUMBER, element) for element in elements)
    return b"".join(chain.from_iterable(records))


def output_parts(
    spec: tuple[str, str, Sequence[int]], pieces: Iterable[wire_format.Part], as_raw: bool
) -> wire_format.Wire:
    """Returns the parts of a response that hold an output, of this name, datatype and shape, and its pieces."""
    name, datatype, shape = spec
    tensor: bytes = Output(name=name, datatype=datatype, shape=shape).SerializeToString()
    if as_raw:
        return [*wire_format.record(_OUTPUTS, tensor), *wire_format.record(_RAW_OUTPUTS, *pieces)]
    contents = wire_format.record(Output.CONTENTS_FIELD_NUMBER, *pieces)
    return wire_format.record(_OUTPUTS, tensor, *contents)


def shared_output_parts(spec: tuple[str, str, Sequence[int]], slot: Slot) -> wire_format.Wire:
    """Returns the parts of a response that name an output in shared memory; its raw contents are there, and empty."""
    name, datatype, shape = spec
    tensor = Output(name=name, datatype=datatype, shape=shape)
    region, size_bytes, offset = (tensor.parameters[key] for key in SHARED_MEMORY)
    region.string_param, size_bytes.int64_param, offset.int64_param = slot.region, slot.size_bytes, slot.offset
    return [*wire_format.record(_OUTPUTS, tensor.SerializeToString()), *wire_format.record(_RAW_OUTPUTS)]


def raw_output_parts(name: str, values: NDArray[Value]) -> wire_format.Wire:
    """Returns the parts of a response that hold an output, raw."""
    before = _before_raw(name, OUTPUT_FIELDS[values.dtype][0], values.shape, values.nbytes)
    if values.nbytes <= MAX_COPIED_BYTES:
        return [before, values.tobytes()]
    return [before, np.ascontiguousarray(values).data.cast("B")]


@lru_cache(maxsize=1024)
def _before_raw(name: str, datatype: str, shape: tuple[int, ...], size_bytes: int) -> bytes:
    tensor: bytes = Output(name=name, datatype=datatype, shape=shape).SerializeToString()
    return b"".join((*wire_format.record(_OUTPUTS, tensor), wire_format.opening(_RAW_OUTPUTS, size_bytes)))
