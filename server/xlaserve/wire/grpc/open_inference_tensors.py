"""Tensors of the Open Inference Protocol as they stand in its messages, to and from NumPy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache, partial
from itertools import starmap
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from xlaserve.errors import InvalidArgument
from xlaserve.images.decoder import Encoded
from xlaserve.images.image_input import RGB, ImageInput
from xlaserve.pipeline.request_inputs import Given, Readable
from xlaserve.wire.grpc import wire_format
from xlaserve.wire.grpc.infer_message import BYTES, RAW, TYPED, TYPED_BY_NAME, InferMessage, parameter_items
from xlaserve.wire.grpc.packed_lists import PackedListing, listed_numbers, numbers_of, pixels_of
from xlaserve.wire.shared.inference import InferRequest, RequestedOutput, check_parameters
from xlaserve.wire.shared.input_tensors import SHARED_MEMORY, check_count
from xlaserve.wire.shared.output_tensors import OutputTensor
from xlaserve.wire.shared.shared_memory import Slot
from xlaserve_proto import open_inference_pb2 as pb

Input = pb.ModelInferRequest.InferInputTensor
Output = pb.ModelInferResponse.InferOutputTensor
_OUTPUTS: Final = pb.ModelInferResponse.OUTPUTS_FIELD_NUMBER
_RAW_OUTPUTS: Final = pb.ModelInferResponse.RAW_OUTPUT_CONTENTS_FIELD_NUMBER

LISTING: Final = PackedListing(
    {
        "FP32": pb.InferTensorContents.FP32_CONTENTS_FIELD_NUMBER,
        "FP64": pb.InferTensorContents.FP64_CONTENTS_FIELD_NUMBER,
        "INT8": pb.InferTensorContents.INT_CONTENTS_FIELD_NUMBER,
        "INT16": pb.InferTensorContents.INT_CONTENTS_FIELD_NUMBER,
        "INT32": pb.InferTensorContents.INT_CONTENTS_FIELD_NUMBER,
        "INT64": pb.InferTensorContents.INT64_CONTENTS_FIELD_NUMBER,
        "UINT8": pb.InferTensorContents.UINT_CONTENTS_FIELD_NUMBER,
        "UINT16": pb.InferTensorContents.UINT_CONTENTS_FIELD_NUMBER,
        "UINT32": pb.InferTensorContents.UINT_CONTENTS_FIELD_NUMBER,
        "UINT64": pb.InferTensorContents.UINT64_CONTENTS_FIELD_NUMBER,
        "BOOL": pb.InferTensorContents.BOOL_CONTENTS_FIELD_NUMBER,
    },
    elements_field=pb.InferTensorContents.BYTES_CONTENTS_FIELD_NUMBER,
)
"""The fields of `contents`."""

NO_VIEWS: Final[Mapping[str, Sequence[memoryview]]] = {}
_CONTENTS: Final = pb.InferTensorContents.DESCRIPTOR.fields_by_number


class _Input:
    """An input tensor of a request, for `images_of`."""

    __slots__ = ("_message", "_place", "_tensor", "_views", "datatype", "name", "parameters", "shape")
    bytes_field = RAW
    values_field = "contents"
    states_datatype = True

    def __init__(self, message: InferMessage, place: int, tensor: Input) -> None:
        self._message = message
        self._place = place
        self._tensor = tensor
        self._views = message.contents[place] if message.contents else NO_VIEWS
        self.name: str = tensor.name
        self.datatype: str = tensor.datatype
        self.shape: Sequence[int] = tensor.shape
        self.parameters: Iterable[str] = tensor.parameters

    def raw(self) -> memoryview | None:
        raw = self._message.raw
        if not raw:
            return None
        if len(raw) != (inputs := len(self._message.head.fields.inputs)):
            is_one = "one entry, as there is one input"
            raise InvalidArgument(RAW, is_one if inputs == 1 else f"{inputs} entries, one for each input", len(raw))
        own = raw[self._place]
        if not self._tensor.HasField("contents"):
            return own
        if len(own) or len(raw) == 1:
            raise InvalidArgument("inputs.contents", f"nothing alongside {RAW}", "both")
        return None

    def values(self, shape: tuple[int, ...]) -> NDArray[Any] | Readable:
        """Returns views or a copy of what was sent."""
        field = TYPED.get(self.datatype)
        if field is None:
            raise InvalidArgument(f"{self.values_field} of {self.name[:64]}", f"{self.datatype} as {RAW}", "a list")
        listed, views = getattr(self._tensor.contents, field.name), self._views.get(field.name, ())
        numbers = numbers_of(field, listed, views, f"{self.values_field} of {self.name[:64]}", RAW)
        check_count(len(numbers), shape, self.values_field, f"values in {field.name}", self.name[:64])
        return pixels_of(numbers, shape)

    def elements(self) -> list[Encoded]:
        return [*self._tensor.contents.bytes_contents, *self._views.get(BYTES, ())]

    def numbers(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Returns an array of the listed numbers."""
        if (number := LISTING.fields.get(self.datatype)) is None:  # type: ignore[call-overload]
            raise InvalidArgument(f"{self.values_field} of {self.name[:64]}", f"{self.datatype} as {RAW}", "a list")
        name = _CONTENTS[number].name
        field, views = TYPED_BY_NAME.get(name), self._views.get(name, ())
        return listed_numbers(
            getattr(self._tensor.contents, name),
            views,
            shape,
            dtype,
            field=field,
            where=self.values_field,
            name=self.name,
            raw_field=RAW,
        )


def infer_request(message: InferMessage, image: ImageInput | None = RGB) -> InferRequest:
    """Returns a request for the input `image` as plain data, views of the message; None for a model of other inputs
    than one image.

    Raises InvalidArgument or UnsupportedFeature.
    """
    head = message.head
    if (parameters := head.known_parameters) is None:
        head.known_parameters = parameters = check_parameters(parameter_items(head.fields.parameters))
    is_raw = message.wants_raw
    outputs: Iterable[RequestedOutput] = ()
    if head.has_outputs:
        outputs = (RequestedOutput(one.name, parameter_items(one.parameters), is_raw) for one in head.fields.outputs)
    if head.known_shape is None or head.known_input != image:
        inputs = starmap(partial(_Input, message), enumerate(head.fields.inputs))
        return InferRequest(inputs, outputs, parameters, is_raw, head.id)
    known_images = np.ndarray(head.known_shape, np.uint8, message.raw[0])
    return InferRequest((), outputs, parameters, is_raw, head.id, known_images)


def learn_shape(message: InferMessage, images: Given, image: ImageInput | None = RGB) -> None:
    """Remembers the shape of a request's images, once they were checked for the input `image`, where the next ones can
    do without; see `infer_request`."""
    head = message.head
    is_one = len(head.fields.inputs) == 1
    if image is None or not is_one or not message.raw or not isinstance(images, np.ndarray):
        return
    tensor = head.fields.inputs[0]
    # A model that is loaded again may be strict, and refuse parameters that were ignored.
    # Pixels whose channels came first were copied, and lie otherwise in the message.
    if tensor.datatype == "UINT8" and not image.is_deep and not tensor.parameters and image.is_arranged(tensor.shape):
        head.known_shape, head.known_input = images.shape, image


def output_parts(tensor: OutputTensor) -> wire_format.Wire:
    """Returns the parts of a response that hold an output."""
    name, datatype, shape, values, is_raw = tensor
    if is_raw:
        return [_before_raw(name, datatype, shape, sum(map(len, values))), *values]
    head: bytes = Output(name=name, datatype=datatype, shape=shape).SerializeToString()
    return wire_format.record(_OUTPUTS, head, *wire_format.record(Output.CONTENTS_FIELD_NUMBER, *values))


def shared_output_parts(tensor: OutputTensor, slot: Slot) -> wire_format.Wire:
    """Returns the parts of a response that name an output in shared memory; its raw contents are there, and empty."""
    output = Output(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
    region, size_bytes, offset = (output.parameters[key] for key in SHARED_MEMORY)
    region.string_param, size_bytes.int64_param, offset.int64_param = slot.region, slot.size_bytes, slot.offset
    return [*wire_format.record(_OUTPUTS, output.SerializeToString()), *wire_format.record(_RAW_OUTPUTS)]


@lru_cache(maxsize=1024)
def _before_raw(name: str, datatype: str, shape: tuple[int, ...], size_bytes: int) -> bytes:
    tensor: bytes = Output(name=name, datatype=datatype, shape=shape).SerializeToString()
    return b"".join((*wire_format.record(_OUTPUTS, tensor), wire_format.opening(_RAW_OUTPUTS, size_bytes)))
