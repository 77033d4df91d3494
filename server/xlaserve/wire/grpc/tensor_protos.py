"""TensorFlow's tensors as they stand in the messages of TensorFlow Serving, to and from NumPy."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from xlaserve.errors import InvalidArgument
from xlaserve.images.decoder import Encoded
from xlaserve.pipeline.request_inputs import Readable
from xlaserve.wire.grpc import wire_format
from xlaserve.wire.grpc.packed_lists import ListField, PackedListing, listed_numbers, numbers_of, pixels_of
from xlaserve.wire.shared.input_tensors import check_count
from xlaserve.wire.shared.output_tensors import OutputTensor
from xlaserve.wire.shared.tensorflow_serving_models import DTYPES
from xlaserve_proto import tensorflow_messages_pb2 as pb

CONTENT: Final = "tensor_content"
STRINGS: Final = "string_val"
LISTS: Final = {
    "UINT8": ListField("int_val", np.int32),
    "INT32": ListField("int_val", np.int32),
    "FP32": ListField("float_val", np.float32),
    "FP16": ListField("half_val", np.int32),
}
"""By datatype: the field that lists its values."""
VIEWED: Final[wire_format.Fields] = {
    pb.TensorProto.DESCRIPTOR.fields_by_name[name].number: name
    for name in {CONTENT, STRINGS, *(field.name for field in LISTS.values())}
}
"""Fields of a tensor that are viewed where a message is large."""
LISTING: Final = PackedListing(
    {
        "FP32": pb.TensorProto.FLOAT_VAL_FIELD_NUMBER,
        "FP64": pb.TensorProto.DOUBLE_VAL_FIELD_NUMBER,
        "INT8": pb.TensorProto.INT_VAL_FIELD_NUMBER,
        "INT16": pb.TensorProto.INT_VAL_FIELD_NUMBER,
        "INT32": pb.TensorProto.INT_VAL_FIELD_NUMBER,
        "INT64": pb.TensorProto.INT64_VAL_FIELD_NUMBER,
        "UINT8": pb.TensorProto.INT_VAL_FIELD_NUMBER,
        "UINT16": pb.TensorProto.INT_VAL_FIELD_NUMBER,
        "UINT32": pb.TensorProto.UINT32_VAL_FIELD_NUMBER,
        "UINT64": pb.TensorProto.UINT64_VAL_FIELD_NUMBER,
        "BOOL": pb.TensorProto.BOOL_VAL_FIELD_NUMBER,
    },
    elements_field=pb.TensorProto.STRING_VAL_FIELD_NUMBER,
)
"""The fields of a tensor in a response."""
MAX_DIMENSIONS: Final = 16

_DATATYPES: Final = {pb.DataType.Value(dtype): datatype for datatype, dtype in DTYPES.items()}
_OUTPUTS: Final = pb.PredictResponse.OUTPUTS_FIELD_NUMBER
_KEY, _VALUE = 1, 2
"""Fields of a map's entry."""
_FIELDS: Final = pb.TensorProto.DESCRIPTOR.fields_by_number
_LISTS: Final = {field.name: field for field in LISTS.values()}


class TensorInput:
    """An input tensor of a request, for `wire.shared.input_tensors.images_of`.

    `views` are its viewed fields, where the message was taken apart.
    """

    __slots__ = ("_tensor", "_views", "datatype", "name", "parameters", "shape")
    bytes_field = CONTENT
    values_field = STRINGS
    states_datatype = True

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
        listed, views = getattr(self._tensor, field.name), self._views.get(field.name, ())
        numbers = numbers_of(field, listed, views, f"{field.name} of {self.name[:64]}", CONTENT)
        if not 1 <= len(numbers) <= math.prod(shape):
            check_count(len(numbers), shape, field.name, name=self.name[:64])
        return pixels_of(numbers, shape, is_half=self.datatype == "FP16")

    def elements(self) -> list[Encoded]:
        """Returns the listed images."""
        return [*self._tensor.string_val, *self._views.get(STRINGS, ())]

    def numbers(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Returns an array of the listed numbers, their last one repeated where they are too few."""
        if self.datatype == "FP16":
            return np.asarray(self.values(shape)).astype(dtype)
        name = _FIELDS[LISTING.fields[self.datatype]].name  # type: ignore[index]
        return listed_numbers(
            getattr(self._tensor, name),
            self._views.get(name, ()),
            shape,
            dtype,
            field=_LISTS.get(name),
            where=name,
            name=self.name,
            raw_field=CONTENT,
            fills=True,
        )


def output_parts(tensor: OutputTensor) -> wire_format.Wire:
    """Returns the parts of a PredictResponse that hold an output."""
    value = wire_format.record(_VALUE, _head(tensor.datatype, tensor.shape), *tensor.values)
    return wire_format.record(_OUTPUTS, *chain(wire_format.record(_KEY, tensor.name.encode()), value))


@lru_cache(maxsize=1024)
def _head(datatype: str, shape: tuple[int, ...]) -> bytes:
    """Returns a tensor without its values."""
    dims = [pb.TensorShapeProto.Dim(size=size) for size in shape]
    tensor = pb.TensorProto(dtype=pb.DataType.Value(DTYPES[datatype]), tensor_shape=pb.TensorShapeProto(dim=dims))
    data: bytes = tensor.SerializeToString()
    return data


def _dtype_name(number: pb.DataType.ValueType) -> str:
    return pb.DataType.Name(number) if number in pb.DataType.values() else f"DataType {number}"
