"""The Open Inference Protocol over gRPC."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final

from google.protobuf.message import DecodeError

from xlaserve_loadtest.addresses import Address
from xlaserve_loadtest.record.requests import STAGES
from xlaserve_loadtest.schedule.payload import RGB, Layout, Request
from xlaserve_loadtest.schedule.tensors import Tensor
from xlaserve_loadtest.targets.answers import Answer, NoAnswer, Output, stages_of
from xlaserve_loadtest.targets.channel import PLAIN, Transport, open_channel
from xlaserve_loadtest.targets.grpc_target import GrpcTarget, ask
from xlaserve_loadtest.targets.target import ModelInfo, TargetError
from xlaserve_proto import open_inference_pb2 as oip
from xlaserve_proto import open_inference_pb2_grpc as oip_grpc

METHOD: Final = "/inference.GRPCInferenceService/ModelInfer"


def target(deadline_s: float) -> GrpcTarget:
    """Returns the target. `deadline_s` bounds every inference."""
    return GrpcTarget(METHOD, read, deadline_s)


def encode(request: Request, model: ModelInfo) -> Request:
    """Returns a request as it is sent: it is a serialised ModelInferRequest already."""
    return request


async def describe(address: str, model: str, transport: Transport = PLAIN) -> ModelInfo:
    """Asks a server for its metadata and that of a model. Raises TargetError."""
    async with open_channel(Address.parse(address).authority, transport) as channel:
        stub: Any = oip_grpc.GRPCInferenceServiceStub(channel)
        call = partial(ask, address, transport)
        server = await call(stub.ServerMetadata, oip.ServerMetadataRequest())
        metadata = await call(stub.ModelMetadata, oip.ModelMetadataRequest(name=model))
        try:
            config = (await call(stub.ModelConfig, oip.ModelConfigRequest(name=model))).config
        except TargetError:  # an extension that not every server has
            config = oip.ModelConfig()
    inputs = _tensors(metadata.inputs)
    return ModelInfo(
        name=model,
        size=size_of(inputs, metadata.properties),
        outputs=_tensors(metadata.outputs),
        properties=dict(metadata.properties),
        server=f"{server.name} {server.version}",
        inputs=inputs,
        optional=tuple(own.name for own in config.input if own.optional),
        transport=transport,
        own_name=metadata.name,
    )


def read(data: bytes, model: ModelInfo) -> Answer:
    """Reads a serialised ModelInferResponse. Raises NoAnswer."""
    try:
        response = oip.ModelInferResponse.FromString(data)
    except DecodeError as error:
        raise NoAnswer(str(error)) from None
    parameters = response.parameters
    raws: Sequence[bytes | None] = response.raw_output_contents
    if not raws:
        raws = [None] * len(response.outputs)
    elif len(raws) != len(response.outputs):
        raise NoAnswer(f"{len(response.outputs)} outputs, and the contents of {len(raws)}")
    return Answer(
        [
            Output(out.name, out.datatype, tuple(out.shape), raw, _listed(out) if raw is None else ())
            for out, raw in zip(response.outputs, raws, strict=True)
        ],
        response.model_name,
        parameters["mode"].string_param if "mode" in parameters else "",
        stages_of({stage: parameters[stage].double_param for stage in STAGES if stage in parameters}),
    )


def size_of(inputs: Iterable[Tensor], properties: Mapping[str, str]) -> tuple[int, int] | None:
    """Returns the height and width of a model of one image size; None for any other."""
    pixels = [tensor for tensor in inputs if tensor.name == "pixels"]
    for tensor in pixels:
        layout = Layout.of(tensor.shape) or RGB
        sides = dict(zip(layout.axes, tensor.shape, strict=False))
        if len(tensor.shape) == len(layout.axes) and min(sides["H"], sides["W"]) > 0:
            return sides["H"], sides["W"]
    # Where metadata show `image` alone, the buckets of one size tell it.
    sizes = set(re.findall(r"x(\d+)x(\d+)(?=,|$)", properties.get("buckets", "")))
    if pixels or len(sizes) != 1:
        return None
    ((height, width),) = sizes
    return int(height), int(width)


def _tensors(declared: Iterable[oip.ModelMetadataResponse.TensorMetadata]) -> tuple[Tensor, ...]:
    return tuple(Tensor(own.name, own.datatype, tuple(own.shape)) for own in declared)


def _listed(output: oip.ModelInferResponse.InferOutputTensor) -> Sequence[Any]:
    """Returns the elements of an output that came as numbers instead of bytes."""
    held = [values for _, values in output.contents.ListFields()]
    return held[0] if len(held) == 1 else ()
