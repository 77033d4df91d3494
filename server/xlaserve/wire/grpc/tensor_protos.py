"""TensorFlow's tensors as they stand in the messages of TensorFlow Serving, to and from NumPy."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xlaserve.engine.program import Value
from xlaserve.errors import InvalidArgument
from xlaserve.images.decoder import Encoded
from xlaserve.pipeline import Readable
from xlaserve.wire.grpc import wire_format
from xlaserve.wire.grpc.open_inference_tensors import FLOAT_FIELDS, MAX_COPIED_BYTES, PackedIntegers, packed_list
from xlaserve.wire.shared.input_tensors import check_count
from xlaserve.wire.shared.tensorflow_serving_models import DTYPES
from xlaserve_proto import tensorflow_messages_pb2 as pb

CONTENT: Final = "tensor_content"
STRINGS: Final = "string_val"
LISTS: Final = {"UINT8": "int_val", "INT32": "int_val", "FP32": "float_val", "FP16": "half_val"}
"""By datatype: the field that lists its values."""
VIEWED: Final[wire_format.Fields] = {
    pb.TensorProto.DESCRIPTOR.fields_by_name[name].number: name for name in {CONTENT, STRINGS, *LISTS.values()}
}
"""Fields of a tensor that are viewed where a message is large."""
MAX_INLINE_VALUES: Final = 2**15
"""Listed pixels that become an array on the event loop, at up to twenty nanoseconds each."""
MAX_DIMENSIONS: Final = 16

_DATATYPES: Final = {pb.DataType.Value(dtype): datatype for datatype, dtype in DTYPES.items()}
_OUTPUT_DTYPES: Final = {
    np.dtype(np.float32): pb.DT_FLOAT,
    np.dtype(np.int32): pb.DT_INT32,
    np.dtype(np.uint8): pb.DT_UINT8,
}
_OUTPUTS: Final = pb.PredictResponse.OUTPUTS_FIELD_NUMBER
_KEY, _VALUE = 1, 2
"""Fields of a map's entry."""


class TensorInput:
    """An input tensor of a request, for `wire.shared.input_tensors.images_of`.

    `views` are its viewed fields, where the message was taken apart.
    """

    __slots__ = ("_tensor", "_views", "datatype", "name", "parameters", "shape")
    bytes_field = CONTENT
    values_field = STRINGS

    def __init__(self, name: str, tensor: pb.TensorProto, views: Mapping[str, Sequence[memoryview]]) -> None:
        self.name = name
        self.datatype: str = _DATATYPES.get(tensor.dtype) or _dtype_name(tensor.dtype)
        self.shape: Sequence[int] = [dim.size for dim in tensor.tensor_shape.dim[:MAX_DIMENSIONS]]
        self.parameters: Iterable[str] = ()
        self._tensor = tensor
        self._views = views

    def raw(self) -> memoryview | None:
        """Returns its bytes, None where it was sent as a list."""
        views = self._views.get(CONTENT)
        content = views[-1] if views else memoryview(self._tensor.tensor_content)
        if not len(content):
            return None
        if self.datatype == "BYTES":
            raise InvalidArgument(f"{CONTENT} of {self.name[:64]}", f"nothing: images stand in {STRINGS}", "bytes")
        return content

    def values(self, shape: tuple[int, ...]) -> NDArray[Any] | Readable:
        """Returns the listed pixels, their last one repeated where they are too few."""
        field = LISTS[self.datatype]
        numbers: NDArray[Any] | PackedIntegers
        listed = getattr(self._tensor, field)
        if views := self._views.get(field):
            octets, count = packed_list(field, views, has_others=bool(listed), raw_field=CONTENT)
            numbers = octets.view("<f4") if field in FLOAT_FIELDS else PackedIntegers(field, octets, (count,))
        else:
            numbers, count = np.array(listed, np.float32 if field in FLOAT_FIELDS else np.int32), len(listed)
        if not 1 <= count <= math.prod(shape):
            check_count(count, shape, field)
        pixels = ListedPixels(field, numbers, shape)
        return np.asarray(pixels) if math.prod(shape) <= MAX_INLINE_VALUES else pixels

    def elements(self) -> list[Encoded]:
        """Returns the listed images."""
        return [*self._tensor.string_val, *self._views.get(STRINGS, ())]


class ListedPixels(NamedTuple):
    """Pixels as a list of a tensor has them, for `pipeline.Pending`."""

    field: str
    numbers: NDArray[Any] | PackedIntegers
    """The numbers that were sent, at least one."""
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return math.prod(self.shape) * 4

    def __array__(self, dtype: object = None, copy: object = None) -> NDArray[Any]:
        """Returns int32, float32 or float16. Raises InvalidArgument."""
        numbers = np.asarray(self.numbers)
        if self.field == "half_val":
            numbers = numbers.astype(np.uint16).view(np.float16)
        missing = math.prod(self.shape) - len(numbers)
        if missing:
            numbers = np.concatenate([numbers, np.full(missing, numbers[-1])])
        return numbers.reshape(self.shape)


def piece_of_integers(values: NDArray[Value]) -> bytes:
    """Returns a part of a tensor's list of integers, as it stands in a response."""
    return b"".join(wire_format.record(pb.TensorProto.INT_VAL_FIELD_NUMBER, wire_format.packed(values)))


def output_parts(name: str, values: NDArray[Value], pieces: Iterable[wire_format.Part] = ()) -> wire_format.Wire:
    """Returns the parts of a PredictResponse that hold an output; `pieces` are its values where they are rendered."""
    listed: Iterable[wire_format.Part] = pieces
    if values.dtype == np.float32:
        listed = wire_format.record(pb.TensorProto.FLOAT_VAL_FIELD_NUMBER, _as_bytes(values))
    elif not pieces:
        listed = [piece_of_integers(values)]
    tensor = wire_format.record(_VALUE, _head(values.dtype, values.shape), *listed)
    return wire_format.record(_OUTPUTS, *chain(wire_format.record(_KEY, name.encode()), tensor))


def _as_bytes(values: NDArray[Value]) -> wire_format.Part:
    if values.nbytes <= MAX_COPIED_BYTES:
        return values.tobytes()
    return np.ascontiguousarray(values).data.cast("B")


@lru_cache(maxsize=1024)
def _head(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    """Returns a tensor without its values."""
    dims = [pb.TensorShapeProto.Dim(size=size) for size in shape]
    tensor = pb.TensorProto(dtype=_OUTPUT_DTYPES[dtype], tensor_shape=pb.TensorShapeProto(dim=dims))
    data: bytes = tensor.SerializeToString()
    return data


def _dtype_name(number: pb.DataType.ValueType) -> str:
    return pb.DataType.Name(number) if number in pb.DataType.values() else f"DataType {number}"
