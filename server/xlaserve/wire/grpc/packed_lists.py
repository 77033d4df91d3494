"""Lists of numbers as they stand in protobuf's messages, packed: of pixels in requests, of outputs in responses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final, NamedTuple

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from xlaserve.engine.program import Value
from xlaserve.errors import InvalidArgument
from xlaserve.models.task import DATATYPES, Datatype
from xlaserve.pipeline.request_inputs import Readable
from xlaserve.wire.grpc import wire_format
from xlaserve.wire.shared.input_tensors import check_count
from xlaserve.wire.shared.named_inputs import cast
from xlaserve.wire.shared.output_tensors import raw_part
from xlaserve.wire.shared.parts import Part

MAX_LISTED_VALUES: Final = 2**21
"""Values in one list of a request."""
MAX_LISTED_BYTES: Final = 4 * MAX_LISTED_VALUES
MAX_INLINE_VARINT_BYTES: Final = 2**16
"""Packed integers become an array at up to ten nanoseconds a byte. More are left to a thread."""
MAX_INLINE_COPIED_VALUES: Final = 2**15
"""Pixels that are filled up or converted on the event loop, at up to twenty nanoseconds each."""
US_PER_INTEGER: Final = 0.1
"""Time to write an integer of an output."""


class ListField(NamedTuple):
    """A field of a message that lists numbers."""

    name: str
    dtype: type[np.float32 | np.int32 | np.uint32]


@dataclass(frozen=True, slots=True)
class PackedIntegers:
    """Integers as they stand in a packed list."""

    field: ListField
    where: str
    """The field for messages: `contents of pixels`."""
    octets: NDArray[np.uint8]
    count: int

    def __len__(self) -> int:
        return self.count

    def values(self) -> NDArray[Any]:
        """Returns the integers as int32 or uint32, as their field has them. Raises InvalidArgument."""
        try:
            return wire_format.unpacked(self.octets).view(self.field.dtype)
        except DecodeError:
            raise _not_packed(self.field, self.where) from None

    def read(self) -> NDArray[np.int32]:
        """Returns pixels of the integers. Raises InvalidArgument."""
        return _narrowed(self.values())


class ListedPixels(NamedTuple):
    """Pixels that a message lists, for `pipeline.Pending`; missing numbers are the same as the last one."""

    numbers: NDArray[Any] | PackedIntegers
    """The numbers that were sent, at least one."""
    shape: tuple[int, ...]
    is_half: bool = False
    """Whether the numbers are the bits of float16."""

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return math.prod(self.shape) * 4

    @property
    def is_slow(self) -> bool:
        """Whether it takes too long for the event loop to make the array."""
        if isinstance(self.numbers, PackedIntegers) and self.numbers.octets.nbytes > MAX_INLINE_VARINT_BYTES:
            return True
        count = math.prod(self.shape)
        return count > MAX_INLINE_COPIED_VALUES and (self.is_half or count != len(self.numbers))

    def __array__(self, dtype: object = None, copy: object = None) -> NDArray[Any]:
        """Returns int32, float32 or float16. Raises InvalidArgument."""
        numbers = self.numbers.read() if isinstance(self.numbers, PackedIntegers) else self.numbers
        if self.is_half:
            numbers = numbers.astype(np.uint16).view(np.float16)
        missing = math.prod(self.shape) - len(numbers)
        if missing:
            numbers = np.concatenate([numbers, np.full(missing, numbers[-1])])
        return numbers.reshape(self.shape)


def numbers_of(
    field: ListField, listed: Sequence[Any], views: Sequence[memoryview], where: str, raw_field: str
) -> NDArray[Any] | PackedIntegers:
    """Returns the numbers of a list: as protobuf has `listed` them, or as its `views` do, without a copy.

    `where` is the field for messages. Raises InvalidArgument for too many, of which `raw_field` takes more, and where
    both have some: nobody knows in which order.
    """
    if not views:
        return _narrowed(np.array(listed, field.dtype))
    size_bytes = sum(map(len, views))
    too_many = InvalidArgument(
        where,
        f"at most {MAX_LISTED_VALUES} values; {raw_field} takes more",
        f"{size_bytes} bytes",
    )
    if size_bytes > MAX_LISTED_BYTES:
        raise too_many
    octets = np.frombuffer(views[0] if len(views) == 1 else b"".join(views), np.uint8)
    if field.dtype is np.float32:
        count, is_cut = size_bytes // 4, any(len(view) % 4 for view in views)
    else:
        is_end = octets < 0x80  # each ends with its only byte below
        count, is_cut = int(np.count_nonzero(is_end)), any(view[-1] >= 0x80 for view in views if view)
    if count > MAX_LISTED_VALUES:
        raise too_many
    if is_cut or listed:
        raise _not_packed(field, where)
    return octets.view("<f4") if field.dtype is np.float32 else PackedIntegers(field, where, octets, count)


def pixels_of(
    numbers: NDArray[Any] | PackedIntegers, shape: tuple[int, ...], *, is_half: bool = False
) -> NDArray[Any] | Readable:
    """Returns pixels of numbers, as an array where the event loop can make one."""
    pixels = ListedPixels(numbers, shape, is_half)
    return pixels if pixels.is_slow else np.asarray(pixels)


def listed_numbers(
    listed: Sequence[Any],
    views: Sequence[memoryview],
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    *,
    field: ListField | None,
    where: str,
    name: str,
    raw_field: str,
    fills: bool = False,
) -> NDArray[Any]:
    """Returns an input that holds no images: `listed` by protobuf, or `views` of a packed `field` that is known.

    `where` is the list's name for messages. Numbers that are missing are the same as the last one where it `fills`.
    Raises InvalidArgument for numbers that are none of `dtype`, or too few or too many for `shape`.
    """
    numbers: Any = listed
    place, count = f"{where} of {name[:64]}", math.prod(shape)
    if views:
        assert field is not None
        numbers = numbers_of(field, listed, views, place, raw_field)
    sent = len(numbers)
    if not (fills and 1 <= sent <= count):  # before they are read, which takes a time by their number
        check_count(sent, shape, where, name=name[:64])
    values = cast(np.asarray(numbers.values() if isinstance(numbers, PackedIntegers) else numbers), dtype, place)
    if sent < count:
        filled = np.full(count, values[-1])  # unlike a list, without the interpreter's lock
        filled[:sent] = values
        values = filled
    return values.reshape(shape)


def _narrowed(values: NDArray[Any]) -> NDArray[Any]:
    """UINT8 pixels, which are wider on the wire than the tensor's type, are checked as INT32 is."""
    return np.minimum(values, np.iinfo(np.int32).max).astype(np.int32) if values.dtype == np.uint32 else values


def _not_packed(field: ListField, where: str) -> InvalidArgument:
    return InvalidArgument(where, f"packed values in {field.name}", "other bytes")


class PackedListing(NamedTuple):
    """Lists of an output tensor, for `wire.shared.output_tensors`."""

    fields: dict[Datatype, int]
    """The number of the field that lists numbers, by datatype."""
    elements_field: int

    def us_per_value(self, datatype: Datatype) -> float:
        """Returns 0 for floats, which are sent as they lie in memory."""
        return 0.0 if datatype.startswith("FP") else US_PER_INTEGER

    def numbers(self, values: NDArray[Value]) -> list[Part]:
        """Returns the field that lists the numbers."""
        content = raw_part(values) if values.dtype.kind == "f" else wire_format.packed(values)
        return wire_format.record(self.fields[DATATYPES[values.dtype]], content)

    def elements(self, elements: Sequence[bytes]) -> list[Part]:
        """Returns a field for each of the elements."""
        return [b"".join(chain.from_iterable(wire_format.record(self.elements_field, one) for one in elements))]
