"""Tensors of the Open Inference Protocol, to and from NumPy.

All checks of requests that depend on the wire format are here; the result is an array of the stated type and shape, or
a list of encoded images.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Any, Final

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from xlaserve.config import PixelRange
from xlaserve.engine.program import Images, Value
from xlaserve.errors import InvalidArgument, UnsupportedFeature
from xlaserve.image import Encoded, check_pixels
from xlaserve.pipeline import Pending
from xlaserve.rpc import parts
from xlaserve.rpc.infer_message import IMAGE, PIXELS, InferMessage
from xlaserve_proto import open_inference_pb2 as pb

PIXEL_DTYPES: Final[dict[str, tuple[str, np.dtype[Any]]]] = {
    "UINT8": ("uint_contents", np.dtype(np.uint8)),
    "INT32": ("int_contents", np.dtype("<i4")),
    "FP32": ("fp32_contents", np.dtype("<f4")),
}
"""By datatype: the field of `contents` that holds it, and its type in raw bytes."""
OUTPUT_FIELDS: Final = {
    np.dtype(np.float32): ("FP32", "fp32_contents"),
    np.dtype(np.int32): ("INT32", "int_contents"),
    np.dtype(np.uint8): ("UINT8", "uint_contents"),
}
"""By an output's NumPy type: its datatype, and the field of `contents` that holds it."""
MAX_TYPED_VALUES: Final = 2**21
"""Values in one request's `contents`."""
MAX_INLINE_PIXEL_VALUES: Final = 2**19
"""INT32 and FP32 pixels become levels at about a nanosecond each. More are left to a thread."""
MAX_INLINE_VARINT_BYTES: Final = 2**16
"""INT32 and UINT8 pixels in `contents` become an array at up to ten nanoseconds a byte. More are left to a thread."""
MAX_TYPED_BYTES: Final = 4 * MAX_TYPED_VALUES
MAX_COPIED_BYTES: Final = 64 * 1024
"""Outputs up to this size are copied before the response is put together: that costs less than a view."""
MAX_IMAGES: Final = 4096
"""Encoded images in one request: they are taken apart on the event loop."""

Input = pb.ModelInferRequest.InferInputTensor
Output = pb.ModelInferResponse.InferOutputTensor
_OUTPUTS: Final = pb.ModelInferResponse.OUTPUTS_FIELD_NUMBER
_RAW_OUTPUTS: Final = pb.ModelInferResponse.RAW_OUTPUT_CONTENTS_FIELD_NUMBER


def images_of(
    request: InferMessage, default_range: PixelRange = PixelRange.LEVELS, pixel_range: PixelRange | None = None
) -> Images | Pending | list[Encoded]:
    """Returns the pixels or the encoded images of a request. Raises InvalidArgument or UnsupportedFeature.

    FP32 pixels are of `pixel_range` where the request names it, else of the model's, `default_range`.
    """
    head = request.head
    if head.known_shape is not None:
        return np.ndarray(head.known_shape, np.uint8, request.raw[0])
    tensors = head.fields.inputs
    if len(tensors) != 1:
        names = ", ".join(repr(tensor.name[:64]) for tensor in tensors[:8]) or "none"
        raise InvalidArgument("inputs", f"one tensor, {PIXELS!r} or {IMAGE!r}", names)
    tensor = tensors[0]
    if tensor.parameters:
        reject_parameters(tensor.parameters, f"inputs.{tensor.name[:64]}")
    raw = request.raw
    if raw and len(raw) != 1:
        raise InvalidArgument("raw_input_contents", "one entry, as there is one input", len(raw))
    if raw and tensor.HasField("contents"):
        raise InvalidArgument("inputs.contents", "nothing alongside raw_input_contents", "both")
    data = raw[0] if raw else None
    if pixel_range is PixelRange.UNIT and (tensor.name, tensor.datatype) != (PIXELS, "FP32"):
        got = f"{tensor.datatype[:32]} {tensor.name[:64]!r}"
        raise InvalidArgument("parameters.pixel_range", f"{PixelRange.UNIT} with FP32 {PIXELS!r} alone", got)
    if tensor.name == PIXELS:
        pixels = _pixels(request, data)
        if isinstance(pixels, PackedIntegers):
            return Pending(pixels, pixel_range or default_range)
        if pixels.dtype == np.uint8:
            levels = check_pixels(pixels)
            if raw:
                head.remember_shape(levels.shape)
            return levels
        if pixels.size <= MAX_INLINE_PIXEL_VALUES:
            return check_pixels(pixels, pixel_range or default_range)
        return Pending(pixels, pixel_range or default_range)
    if tensor.name == IMAGE:
        return _encoded(request, data)
    raise InvalidArgument("inputs", f"one tensor, {PIXELS!r} or {IMAGE!r}", repr(tensor.name[:64]))


def reject_parameters(parameters: Mapping[str, pb.InferParameter], where: str) -> None:
    """Raises UnsupportedFeature where a tensor is said to live in shared memory, InvalidArgument for the rest."""
    for key in parameters:
        if key.startswith("shared_memory_"):
            raise UnsupportedFeature(f"{where}: shared memory is not supported; send the data in the message")
        raise InvalidArgument(f"{where}.parameters", "none", repr(key[:64]))


def _pixels(request: InferMessage, raw: memoryview | None) -> NDArray[np.generic] | PackedIntegers:
    """Returns an array of the tensor's type and shape, or what becomes one: views or a copy of what was sent."""
    (tensor,) = request.fields.inputs
    if tensor.datatype not in PIXEL_DTYPES:
        expected = " or ".join(PIXEL_DTYPES)
        raise InvalidArgument(f"{PIXELS}.datatype", expected, repr(tensor.datatype[:32]))
    field, dtype = PIXEL_DTYPES[tensor.datatype]
    shape = _shape(tensor, PIXELS, "[n, height, width, 3]", ranks=(4,))
    elements = math.prod(shape)
    if raw is not None:
        if len(raw) != elements * dtype.itemsize:
            expected = f"{elements * dtype.itemsize} bytes for {tensor.datatype} {list(shape)}"
            raise InvalidArgument(f"raw_input_contents of {PIXELS}", expected, f"{len(raw)} bytes")
        return np.frombuffer(raw, dtype).reshape(shape)
    contents = getattr(tensor.contents, field)
    packed: NDArray[np.uint8] | None = None
    count = len(contents)
    if views := request.contents.get(field):
        packed, count = _packed(field, views, has_others=count > 0)
    if count != elements:
        expected = f"{elements} values in {field} for {list(shape)}"
        raise InvalidArgument(f"contents of {PIXELS}", expected, f"{count} values")
    if packed is None:
        values = np.array(contents, np.uint32 if field == "uint_contents" else dtype)
        return _narrowed(values).reshape(shape)
    if field == "fp32_contents":
        return packed.view(dtype).reshape(shape)
    integers = PackedIntegers(field, packed, shape)
    return integers if packed.nbytes > MAX_INLINE_VARINT_BYTES else np.asarray(integers)


@dataclass(frozen=True, slots=True)
class PackedIntegers:
    """INT32 or UINT8 pixels as they stand in `contents`, for `pipeline.Pending`."""

    field: str
    octets: NDArray[np.uint8]
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return math.prod(self.shape) * 4

    def __array__(self, dtype: object = None, copy: object = None) -> NDArray[np.int32]:
        try:
            values = parts.unpacked(self.octets)
        except DecodeError:
            raise _not_packed(self.field) from None
        is_signed = self.field == "int_contents"
        return _narrowed(values.view(np.int32) if is_signed else values).reshape(self.shape)


def _narrowed(values: NDArray[Any]) -> NDArray[Any]:
    """UINT8 pixels, which are wider on the wire than the tensor's type, are checked as INT32 is."""
    return np.minimum(values, np.iinfo(np.int32).max).astype(np.int32) if values.dtype == np.uint32 else values


def _packed(field: str, views: Sequence[memoryview], has_others: bool) -> tuple[NDArray[np.uint8], int]:
    """Returns a list as it stands on the wire, and how many values it has.

    Raises InvalidArgument for too many, and where the list `has_others`, one by one: nobody knows in which order.
    """
    size_bytes = sum(map(len, views))
    too_many = InvalidArgument(
        f"contents of {PIXELS}",
        f"at most {MAX_TYPED_VALUES} values; raw_input_contents takes more",
        f"{size_bytes} bytes",
    )
    if size_bytes > MAX_TYPED_BYTES:
        raise too_many
    octets = np.frombuffer(views[0] if len(views) == 1 else b"".join(views), np.uint8)
    if field == "fp32_contents":
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


def _encoded(request: InferMessage, raw: memoryview | None) -> list[Encoded]:
    (tensor,) = request.fields.inputs
    if tensor.datatype != "BYTES":
        raise InvalidArgument(f"{IMAGE}.datatype", "BYTES", repr(tensor.datatype[:32]))
    shape = _shape(tensor, IMAGE, "[n] or [n, 1]", ranks=(1, 2))
    if len(shape) == 2 and shape[1] != 1:
        raise InvalidArgument(f"{IMAGE}.shape", "[n] or [n, 1]", list(shape))
    count = shape[0]
    if count > MAX_IMAGES:
        raise InvalidArgument(f"{IMAGE}.shape", f"at most {MAX_IMAGES} images", list(shape))
    if raw is not None:
        return _split(raw, count)
    contents: list[Encoded] = [*tensor.contents.bytes_contents, *request.contents.get("bytes_contents", ())]
    if len(contents) != count:
        raise InvalidArgument(
            f"contents of {IMAGE}", f"{count} elements for {list(shape)}", f"{len(contents)} elements"
        )
    return contents


def _shape(tensor: Input, name: str, expected: str, ranks: Iterable[int]) -> tuple[int, ...]:
    shape = tuple(tensor.shape[:16])
    if len(shape) not in ranks or min(shape) < 1:
        raise InvalidArgument(f"{name}.shape", f"{expected} with every dimension at least 1", list(shape))
    return shape


def _split(raw: memoryview, count: int) -> list[Encoded]:
    """Returns the `count` elements of a raw BYTES tensor."""
    elements: list[Encoded] = []
    start = 0
    for index in range(count):
        begin = start + 4
        # A length that is itself cut off is read all the same: `begin` is beyond the end then.
        start = begin + int.from_bytes(raw[start:begin], "little")
        if max(begin, start) > len(raw):
            raise InvalidArgument(
                f"raw_input_contents of {IMAGE}",
                f"{count} elements, each behind its length in 4 bytes",
                f"{len(raw)} bytes, which end within element {index}",
            )
        elements.append(raw[begin:start])
    if start != len(raw):
        raise InvalidArgument(f"raw_input_contents of {IMAGE}", f"{count} elements", f"{len(raw) - start} bytes more")
    return elements


def piece_of_values(values: NDArray[Value]) -> bytes:
    """Returns a part of a tensor's `contents`, as it stands in a response."""
    number = pb.InferTensorContents.DESCRIPTOR.fields_by_name[OUTPUT_FIELDS[values.dtype][1]].number
    return b"".join(parts.record(number, parts.packed(values)))


def piece_of_bytes(elements: Iterable[bytes], as_raw: bool) -> bytes:
    """Returns a part of a tensor of BYTES, as it stands in a response."""
    if as_raw:
        return _join(elements)
    records = (parts.record(pb.InferTensorContents.BYTES_CONTENTS_FIELD_NUMBER, element) for element in elements)
    return b"".join(chain.from_iterable(records))


def output_parts(spec: tuple[str, str, Sequence[int]], pieces: Iterable[parts.Part], as_raw: bool) -> parts.Wire:
    """Returns the parts of a response that hold an output, of this name, datatype and shape, and its pieces."""
    name, datatype, shape = spec
    tensor: bytes = Output(name=name, datatype=datatype, shape=shape).SerializeToString()
    if as_raw:
        return [*parts.record(_OUTPUTS, tensor), *parts.record(_RAW_OUTPUTS, *pieces)]
    contents = parts.record(Output.CONTENTS_FIELD_NUMBER, *pieces)
    return parts.record(_OUTPUTS, tensor, *contents)


def raw_output_parts(name: str, values: NDArray[Value]) -> parts.Wire:
    """Returns the parts of a response that hold an output, raw."""
    before = _before_raw(name, OUTPUT_FIELDS[values.dtype][0], values.shape, values.nbytes)
    if values.nbytes <= MAX_COPIED_BYTES:
        return [before, values.tobytes()]
    return [before, np.ascontiguousarray(values).data.cast("B")]


@lru_cache(maxsize=1024)
def _before_raw(name: str, datatype: str, shape: tuple[int, ...], size_bytes: int) -> bytes:
    tensor: bytes = Output(name=name, datatype=datatype, shape=shape).SerializeToString()
    return b"".join((*parts.record(_OUTPUTS, tensor), parts.opening(_RAW_OUTPUTS, size_bytes)))


def _join(elements: Iterable[bytes]) -> bytes:
    """Returns a raw BYTES tensor."""
    return b"".join(struct.pack("<I", len(element)) + element for element in elements)
