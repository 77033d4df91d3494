"""What requests are sent to."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from xlaserve_loadtest.payload import Request
from xlaserve_loadtest.record import NO_STAGES, STAGES, Status
from xlaserve_proto import open_inference_pb2 as oip
from xlaserve_proto import open_inference_pb2_grpc as oip_grpc

_METADATA_DEADLINE_S: Final = 10.0
_ITEM_BYTES: Final = {"FP64": 8, "INT64": 8, "FP32": 4, "INT32": 4, "FP16": 2, "UINT8": 1, "BOOL": 1}


class TargetError(Exception):
    """The target can't be measured; the text says why, for people."""


class Tensor(NamedTuple):
    """An output as the model's metadata promises it."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    """Without the batch."""


@dataclass(frozen=True)
class ModelInfo:
    """What the target says of the model under test."""

    name: str
    size: tuple[int, int] | None
    """Height and width; None when the model takes several."""
    outputs: tuple[Tensor, ...]
    properties: dict[str, str]
    server: str
    """Name and version of the server."""


class Reply(NamedTuple):
    """How one request ended."""

    status: Status
    stages: tuple[float, ...] = NO_STAGES
    """Seconds by stage, in the order of `record.STAGES`."""
    detail: str = ""
    """Why it failed."""


class Connection(Protocol):
    """A way to send requests, several at the same time."""

    async def send(self, request: Request) -> Reply:
        """Sends one request and waits for its end. Failures of the target are replies, not exceptions."""


class Target(Protocol):
    """Something to measure."""

    async def describe(self, model: str) -> ModelInfo:
        """Asks for the model's metadata. Raises TargetError."""

    def connect(self, model: ModelInfo) -> AbstractAsyncContextManager[Connection]:
        """Opens a fresh connection, on which replies are held against what `model` promises."""


class GrpcTarget:
    """A server of the Open Inference Protocol at HOST:PORT. `deadline_s` bounds every inference."""

    def __init__(self, address: str, *, deadline_s: float) -> None:
        self.address = address
        self._deadline_s = deadline_s

    async def describe(self, model: str) -> ModelInfo:
        """Asks for the metadata of the server and the model. Raises TargetError."""
        async with self._channel() as channel:
            stub: Any = oip_grpc.GRPCInferenceServiceStub(channel)
            try:
                server = await stub.ServerMetadata(oip.ServerMetadataRequest(), timeout=_METADATA_DEADLINE_S)
                metadata = await stub.ModelMetadata(oip.ModelMetadataRequest(name=model), timeout=_METADATA_DEADLINE_S)
            except grpc.aio.AioRpcError as error:
                raise TargetError(f"{self.address}: {error.code().name}: {error.details()}") from None
        return ModelInfo(
            name=model,
            size=_size(metadata),
            outputs=tuple(Tensor(out.name, out.datatype, tuple(out.shape)[1:]) for out in metadata.outputs),
            properties=dict(metadata.properties),
            server=f"{server.name} {server.version}",
        )

    @asynccontextmanager
    async def connect(self, model: ModelInfo) -> AsyncIterator[Connection]:
        """Opens a connection of its own."""
        async with self._channel() as channel:
            yield _GrpcConnection(channel, model, self._deadline_s)

    def _channel(self) -> grpc.aio.Channel:
        options = [
            ("grpc.max_send_message_length", -1),
            ("grpc.max_receive_message_length", -1),
            ("grpc.enable_retries", 0),
            ("grpc.enable_http_proxy", 0),
            # Without this, channels to the same address share one connection.
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 1_000),
        ]
        return grpc.aio.insecure_channel(self.address, options=options)


class _GrpcConnection:
    def __init__(self, channel: grpc.aio.Channel, model: ModelInfo, deadline_s: float) -> None:
        # Without serialisers: bytes go out as they are and come back as they are.
        self._infer: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(
            "/inference.GRPCInferenceService/ModelInfer"
        )
        self._model = model
        self._deadline_s = deadline_s

    async def send(self, request: Request) -> Reply:
        try:
            data = await self._infer(request.data, timeout=self._deadline_s)
        except grpc.aio.AioRpcError as error:
            return Reply(Status(error.code().value[0]), detail=error.details() or "")
        return read_reply(data, request, self._model)


def read_reply(data: bytes, request: Request, model: ModelInfo) -> Reply:
    """Holds a serialised ModelInferResponse against what was asked for and what the model promises."""
    try:
        response = oip.ModelInferResponse.FromString(data)
    except DecodeError as error:
        return Reply(Status.INVALID_REPLY, detail=str(error))
    parameters = response.parameters
    if "mode" in parameters and parameters["mode"].string_param != request.mode:
        ran = parameters["mode"].string_param
        return Reply(Status.INVALID_REPLY, detail=f"asked for mode {request.mode}, was run in {ran}")
    got = [(out.name, out.datatype, tuple(out.shape)) for out in response.outputs]
    promised = [(out.name, out.datatype, (request.images, *out.shape)) for out in model.outputs]
    if got != promised:
        return Reply(Status.INVALID_REPLY, detail=f"expected outputs {promised}, got {got}")
    for (name, datatype, shape), raw in zip(got, response.raw_output_contents, strict=False):
        if datatype in _ITEM_BYTES and len(raw) != math.prod(shape) * _ITEM_BYTES[datatype]:
            return Reply(Status.INVALID_REPLY, detail=f"output {name}, {datatype} {shape}, has {len(raw)} bytes")
    return Reply(
        Status.OK,
        tuple(parameters[stage].double_param if stage in parameters else math.nan for stage in STAGES),
    )


def _size(metadata: oip.ModelMetadataResponse) -> tuple[int, int] | None:
    for tensor in metadata.inputs:
        if tensor.name == "pixels" and len(tensor.shape) == 4 and min(tensor.shape[1:3]) > 0:
            return tensor.shape[1], tensor.shape[2]
    return None
