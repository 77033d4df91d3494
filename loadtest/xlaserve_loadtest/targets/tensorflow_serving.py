"""TensorFlow Serving over gRPC: Predict of one signature."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import numpy as np
from google.protobuf.message import DecodeError

from xlaserve_loadtest.addresses import Address
from xlaserve_loadtest.schedule.payload import STAMP_BYTES, Request
from xlaserve_loadtest.schedule.tensors import BYTES, Tensor
from xlaserve_loadtest.targets.answers import Answer, NoAnswer, Output
from xlaserve_loadtest.targets.channel import PLAIN, Transport, open_channel
from xlaserve_loadtest.targets.grpc_target import GrpcTarget, ask
from xlaserve_loadtest.targets.open_inference import size_of
from xlaserve_loadtest.targets.requests import Input, check_modeless, inputs_of
from xlaserve_loadtest.targets.target import ModelInfo, TargetError
from xlaserve_proto import tensorflow_messages_pb2 as pb
from xlaserve_proto import tensorflow_serving_pb2_grpc as pb_grpc

SIGNATURE: Final = "signature"
"""The property that names the signature which is called."""
SIGNATURE_DEF: Final = "signature_def"
_DEFAULT: Final = "serving_default"
_METHOD: Final = "/tensorflow.serving.PredictionService/Predict"
_DATATYPES: Final[Mapping[pb.DataType.ValueType, str]] = {
    pb.DT_BOOL: "BOOL",
    pb.DT_UINT8: "UINT8",
    pb.DT_UINT16: "UINT16",
    pb.DT_UINT32: "UINT32",
    pb.DT_UINT64: "UINT64",
    pb.DT_INT8: "INT8",
    pb.DT_INT16: "INT16",
    pb.DT_INT32: "INT32",
    pb.DT_INT64: "INT64",
    pb.DT_HALF: "FP16",
    pb.DT_FLOAT: "FP32",
    pb.DT_DOUBLE: "FP64",
    pb.DT_STRING: BYTES,
}
_DTYPES: Final = {name: dtype for dtype, name in _DATATYPES.items()}
_NO_VALUES: Final = ("dtype", "tensor_shape", "version_number")


def target(deadline_s: float) -> GrpcTarget:
    """Returns the target. `deadline_s` bounds every inference."""
    return GrpcTarget(_METHOD, read, deadline_s)


async def describe(address: str, model: str, transport: Transport = PLAIN) -> ModelInfo:
    """Asks a server for the signature of a model. Raises TargetError."""
    async with open_channel(Address.parse(address).authority, transport) as channel:
        stub: Any = pb_grpc.PredictionServiceStub(channel)
        request = pb.GetModelMetadataRequest(model_spec=pb.ModelSpec(name=model), metadata_field=[SIGNATURE_DEF])
        metadata = await ask(address, transport, stub.GetModelMetadata, request)
    try:
        signatures = pb.SignatureDefMap.FromString(metadata.metadata[SIGNATURE_DEF].value)
    except DecodeError as error:
        raise TargetError(f"{address}: the signatures of {model} can't be read: {error}") from None
    return model_info(address, model, signatures, metadata.model_spec.version.value, transport)


def model_info(
    address: str, model: str, signatures: pb.SignatureDefMap, version: int, transport: Transport
) -> ModelInfo:
    """Returns what a signature says of a model. Raises TargetError."""
    named = signatures.signature_def
    name = _DEFAULT if _DEFAULT in named else next(iter(sorted(named)), "")
    if not name:
        raise TargetError(f"{address}: {model} has no signature")
    inputs = _tensors(named[name].inputs)
    return ModelInfo(
        name=model,
        size=size_of(inputs, {}),
        outputs=_tensors(named[name].outputs),
        properties={SIGNATURE: name, "version": str(version)},
        server="TensorFlow Serving's protocol",
        inputs=inputs,
        transport=transport,
    )


def encode(request: Request, model: ModelInfo) -> Request:
    """Returns a request as a serialised PredictRequest, which ends with the last input. Raises PayloadError."""
    check_modeless(request, "TensorFlow Serving")
    spec = pb.ModelSpec(name=model.name, signature_name=model.properties[SIGNATURE])
    message = pb.PredictRequest(model_spec=spec)
    for one in inputs_of(request):
        message.inputs[one.name].CopyFrom(_tensor_proto(one))
    data = message.SerializeToString()
    return replace(request, data=data, stamp_at=None if request.stamp_at is None else len(data) - STAMP_BYTES)


def read(data: bytes, model: ModelInfo) -> Answer:
    """Reads a serialised PredictResponse. Raises NoAnswer."""
    try:
        response = pb.PredictResponse.FromString(data)
    except DecodeError as error:
        raise NoAnswer(str(error)) from None
    return Answer([_output(name, tensor) for name, tensor in response.outputs.items()], response.model_spec.name)


def _tensors(declared: Mapping[str, pb.TensorInfo]) -> tuple[Tensor, ...]:
    """Returns tensors in the order of their names: maps have none."""
    return tuple(
        Tensor(name, _datatype(own.dtype), tuple(dim.size for dim in own.tensor_shape.dim))
        for name, own in sorted(declared.items())
    )


def _datatype(dtype: pb.DataType.ValueType) -> str:
    return _DATATYPES.get(dtype) or f"DT_{dtype}"


def _tensor_proto(one: Input) -> pb.TensorProto:
    shape = pb.TensorShapeProto(dim=[pb.TensorShapeProto.Dim(size=side) for side in one.shape])
    if one.datatype == BYTES:
        return pb.TensorProto(dtype=pb.DT_STRING, tensor_shape=shape, string_val=one.elements())
    return pb.TensorProto(dtype=_DTYPES[one.datatype], tensor_shape=shape, tensor_content=one.raw)


def _output(name: str, tensor: pb.TensorProto) -> Output:
    shape = tuple(dim.size for dim in tensor.tensor_shape.dim)
    if tensor.tensor_content:
        return Output(name, _datatype(tensor.dtype), shape, tensor.tensor_content)
    if tensor.dtype == pb.DT_HALF:  # its bits are listed
        return Output(name, "FP16", shape, np.array(tensor.half_val, "<u2").tobytes())
    lists = [values for field, values in tensor.ListFields() if field.name not in _NO_VALUES]
    return Output(name, _datatype(tensor.dtype), shape, listed=lists[0] if len(lists) == 1 else ())
