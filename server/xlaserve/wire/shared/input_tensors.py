"""Input tensors of the Open Inference Protocol, to arrays of the stated type and shape, or to encoded images.

All checks of them are here, except those of how a protocol writes a list of values.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Final, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from xlaserve.config import PixelRange
from xlaserve.engine.inputs import Images
from xlaserve.errors import InvalidArgument
from xlaserve.images.decoder import Encoded, check_pixels
from xlaserve.images.image_input import RGB, ImageInput
from xlaserve.models.task import DATATYPES
from xlaserve.pipeline.request_inputs import Pending, Readable

PIXELS: Final = "pixels"
IMAGE: Final = "image"

PIXEL_DTYPES: Final[dict[str, np.dtype[Any]]] = {
    "UINT8": np.dtype(np.uint8),
    "INT32": np.dtype("<i4"),
    "FP16": np.dtype("<f2"),
    "FP32": np.dtype("<f4"),
}
"""By datatype: its type in raw bytes."""
TENSOR_DATATYPES: Final[Mapping[np.dtype[Any], str]] = {**DATATYPES, np.dtype(np.float16): "FP16"}
"""The protocol's datatypes of inputs, by NumPy's."""
DEEP_DTYPES: Final[dict[str, np.dtype[Any]]] = {
    datatype: dtype.newbyteorder("<") for dtype, datatype in TENSOR_DATATYPES.items() if dtype != np.bool_
}
"""The datatypes of pixels of more than 8 bits, as PIXEL_DTYPES has those of others."""
SHARED_MEMORY: Final = ("shared_memory_region", "shared_memory_byte_size", "shared_memory_offset")
"""Parameters of a tensor that lies in shared memory; `wire.shared.shared_memory` reads them."""
FRACTIONS: Final = ("FP16", "FP32")
"""Datatypes that pixels from 0 to 1 can have."""
MAX_INLINE_PIXEL_VALUES: Final = 2**19
"""INT32 and FP32 pixels become levels, and channels that come first come last, at about a nanosecond a value. More are
left to a thread."""
MAX_INLINE_VALUES: Final = 2**15
"""Listed numbers that are read on the event loop; more are left to a thread."""
MAX_IMAGES: Final = 4096
"""Encoded images in one request: they are taken apart on the event loop."""
MAX_SHOWN: Final = 8
"""Names of inputs that a refusal shows."""
MAX_INPUTS: Final = 64
"""Inputs of a request that are read."""
MAX_PARAMETERS: Final = 64
"""Parameters in one place: those that are not ours are read only to be ignored."""

T = TypeVar("T")


class InputTensor(Protocol):
    """An input tensor as it arrived, in a protocol whose names for its bytes and for a list of values are given.

    Fields are of their types: a protocol whose parser does not see to that, as JSON's, checks them first.
    """

    bytes_field: str
    values_field: str
    states_datatype: bool
    """Whether the request says of what type the values are, and its lists need not be read for that."""
    name: str
    datatype: str
    shape: Sequence[int]
    parameters: Iterable[str]
    """Names of its parameters, except those that the protocol itself acts on."""

    def raw(self) -> memoryview | None:
        """Returns its bytes, None where it was sent as a list of values. May raise InvalidArgument."""

    def values(self, shape: tuple[int, ...]) -> NDArray[Any] | Readable:
        """Returns the listed pixels, as uint8, int32 or float32 or still to be read, once `check_count` has passed."""

    def elements(self) -> list[Encoded]:
        """Returns the listed images."""

    def numbers(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Returns the listed numbers of an input that holds no images; blocks where they are many. Raises
        InvalidArgument."""


class Listed(NamedTuple):
    """Listed numbers, to be read as an array of `dtype`."""

    tensor: InputTensor
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __array__(self, dtype: object = None, copy: object = None) -> NDArray[Any]:
        return self.tensor.numbers(self.shape, self.dtype)


def images_of(
    inputs: Iterable[InputTensor],
    default_range: PixelRange = PixelRange.LEVELS,
    pixel_range: PixelRange | None = None,
    *,
    image: ImageInput = RGB,
    input_name: str = "",
    is_strict: bool = False,
) -> Images | Pending | list[Encoded]:
    """Returns the pixels or the encoded images of a request. Raises InvalidArgument.

    FP16 and FP32 pixels are of `pixel_range` where the request names it, else of the model's, `default_range`. Unknown
    parameters of the tensor are refused where `is_strict`, else ignored. `image` is the model's image input, and
    `input_name` another name of either input.
    """
    tensors = [*islice(inputs, MAX_SHOWN)]
    expected = f"one tensor, {' or '.join(repr(name) for name in (PIXELS, IMAGE, input_name) if name)}"
    if len(tensors) != 1:
        names = ", ".join(repr(tensor.name[:64]) for tensor in tensors) or "none"
        raise InvalidArgument("inputs", expected, names)
    (tensor,) = tensors
    name = tensor.name
    if name == input_name:
        name = IMAGE if tensor.datatype == "BYTES" else PIXELS
    for key in bounded(tensor.parameters, f"inputs.{name[:64]}.parameters"):
        check_unknown(key, f"inputs.{name[:64]}", is_strict=is_strict)
    raw = tensor.raw()
    if pixel_range is PixelRange.UNIT and (name != PIXELS or tensor.datatype not in FRACTIONS):
        got = f"{tensor.datatype[:32]} {name[:64]!r}"
        expected = f"{PixelRange.UNIT} with {' or '.join(FRACTIONS)} {PIXELS!r} alone"
        raise InvalidArgument("parameters.pixel_range", expected, got)
    if name == PIXELS:
        return pixels_of(tensor, raw, image, pixel_range or default_range)
    if name == IMAGE:
        return encoded_of(tensor, raw)
    raise InvalidArgument("inputs", expected, repr(name[:64]))


def bounded(parameters: Iterable[T], field: str) -> Iterator[T]:
    """Yields parameters, whose names and values nobody else has counted. Raises InvalidArgument for too many."""
    for count, parameter in enumerate(parameters):
        if count >= MAX_PARAMETERS:
            raise InvalidArgument(field, f"at most {MAX_PARAMETERS}", "more")
        yield parameter


def check_unknown(key: str, where: str, *, is_strict: bool) -> None:
    """Raises InvalidArgument for a tensor's parameter that is unknown, where `is_strict`."""
    if is_strict and key not in SHARED_MEMORY:
        raise InvalidArgument(f"{where}.parameters", ", ".join(SHARED_MEMORY), repr(key[:64]))


def check_count(count: int, shape: Sequence[int], field: str, values: str = "values", name: str = PIXELS) -> None:
    """Raises InvalidArgument where `count` numbers of a list are not those of a tensor of this shape."""
    if count != math.prod(shape):
        expected = f"{math.prod(shape)} {values} for {list(shape)}"
        raise InvalidArgument(f"{field} of {name}", expected, f"{count} values")


def raw_bytes(elements: Iterable[bytes]) -> bytes:
    """Returns a raw BYTES tensor."""
    return b"".join(struct.pack("<I", len(element)) + element for element in elements)


def pixels_of(
    tensor: InputTensor, raw: memoryview | None, image: ImageInput, pixel_range: PixelRange, name: str = PIXELS
) -> Images | Pending:
    """Returns the pixels of an image input, checked, or to be checked on a thread. Raises InvalidArgument."""
    if image.is_deep and pixel_range is PixelRange.UNIT:
        expected = f"none, as the model takes {image.dtype} pixels as they are"
        raise InvalidArgument("parameters.pixel_range", expected, pixel_range)
    pixels = _pixels(tensor, raw, image, name)
    is_view = (
        isinstance(pixels, np.ndarray)
        and pixels.dtype == image.dtype != "float32"  # of which each is looked at
        and image.is_arranged(pixels.shape)
    )
    if isinstance(pixels, np.ndarray) and (is_view or pixels.size <= MAX_INLINE_PIXEL_VALUES):
        return check_pixels(pixels, pixel_range, image)
    return Pending(pixels, pixel_range, image)


def _pixels(tensor: InputTensor, raw: memoryview | None, image: ImageInput, name: str) -> NDArray[Any] | Readable:
    dtypes = DEEP_DTYPES if image.is_deep else PIXEL_DTYPES
    if tensor.datatype not in dtypes:
        raise InvalidArgument(f"{name}.datatype", " or ".join(dtypes), repr(tensor.datatype[:32]))
    shape = checked_shape(tensor, name, image.text(), ranks=image.ranks)
    if raw is not None:
        return array_of(tensor, raw, dtypes[tensor.datatype], shape, name)
    if image.is_deep:
        return listed_numbers(tensor, shape, np.dtype(image.dtype))
    return tensor.values(shape)


def listed_numbers(tensor: InputTensor, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any] | Listed:
    """Returns listed numbers, still to be read where they are many. Raises InvalidArgument."""
    numbers = Listed(tensor, shape, dtype)
    return numbers if math.prod(shape) > MAX_INLINE_VALUES else np.asarray(numbers)


def array_of(
    tensor: InputTensor, raw: memoryview, dtype: np.dtype[Any], shape: tuple[int, ...], name: str
) -> NDArray[Any]:
    """Returns a view of raw bytes as an array. Raises InvalidArgument where they are too few or too many."""
    size_bytes = math.prod(shape) * dtype.itemsize
    if len(raw) != size_bytes:
        expected = f"{size_bytes} bytes for {tensor.datatype} {list(shape)}"
        raise InvalidArgument(f"{tensor.bytes_field} of {name}", expected, f"{len(raw)} bytes")
    return np.frombuffer(raw, dtype).reshape(shape)


def encoded_of(tensor: InputTensor, raw: memoryview | None, name: str = IMAGE) -> list[Encoded]:
    """Returns the encoded images of an image input. Raises InvalidArgument."""
    if tensor.datatype != "BYTES":
        raise InvalidArgument(f"{name}.datatype", "BYTES", repr(tensor.datatype[:32]))
    shape = checked_shape(tensor, name, "[n] or [n, 1]", ranks=(1, 2))
    if len(shape) == 2 and shape[1] != 1:
        raise InvalidArgument(f"{name}.shape", "[n] or [n, 1]", list(shape))
    count = shape[0]
    if count > MAX_IMAGES:
        raise InvalidArgument(f"{name}.shape", f"at most {MAX_IMAGES} images", list(shape))
    if raw is not None:
        return _split(raw, count, f"{tensor.bytes_field} of {name}")
    elements = tensor.elements()
    if len(elements) != count:
        expected = f"{count} elements for {list(shape)}"
        raise InvalidArgument(f"{tensor.values_field} of {name}", expected, f"{len(elements)} elements")
    return elements


def checked_shape(tensor: InputTensor, name: str, expected: str, ranks: Iterable[int]) -> tuple[int, ...]:
    """Returns the shape of a tensor. Raises InvalidArgument where it has another number of axes, or no row."""
    shape = tuple(tensor.shape[:16])
    if len(shape) not in ranks or min(shape) < 1:
        raise InvalidArgument(f"{name}.shape", f"{expected} with every dimension at least 1", list(shape))
    return shape


def _split(raw: memoryview, count: int, field: str) -> list[Encoded]:
    """Returns the `count` elements of a raw BYTES tensor."""
    elements: list[Encoded] = []
    start = 0
    for index in range(count):
        begin = start + 4
        # A length that is itself cut off is read all the same: `begin` is beyond the end then.
        start = begin + int.from_bytes(raw[start:begin], "little")
        if max(begin, start) > len(raw):
            raise InvalidArgument(
                field,
                f"{count} elements, each behind its length in 4 bytes",
                f"{len(raw)} bytes, which end within element {index}",
            )
        elements.append(raw[begin:start])
    if start != len(raw):
        raise InvalidArgument(field, f"{count} elements", f"{len(raw) - start} bytes more")
    return elements
