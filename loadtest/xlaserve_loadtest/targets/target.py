"""What requests are sent to."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import Any, Final, NamedTuple, Protocol

import grpc
import grpc.aio
import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from xlaserve_loadtest.printable import shortened
from xlaserve_loadtest.record.lines import NO_STAGES, STAGES, Status
from xlaserve_loadtest.schedule.payload import Request
from xlaserve_loadtest.schedule.tensors import ANY, DTYPES, Tensor
from xlaserve_loadtest.targets.channel import PLAIN, Transport, open_channel
from xlaserve_proto import open_inference_pb2 as oip
from xlaserve_proto import open_inference_pb2_grpc as oip_grpc

_METADATA_DEADLINE_S: Final = 10.0
_CONNECT_TIMEOUT_S: Final = 2.0
_ITEM_BYTES: Final = {name: np.dtype(dtype).itemsize for name, dtype in DTYPES.items()}

Array = NDArray[np.float64 | np.int64]
"""Integers are names, such as a map's classes: they are compared for equality only."""


class TargetError(Exception):
    """The target can't be measured; the message says why."""


@dataclass(frozen=True)
class ModelInfo:
    """The target's description of the model under test."""

    name: str
    size: tuple[int, int] | None
    """Height and width; None when the model takes several."""
    outputs: tuple[Tensor, ...]
    properties: dict[str, str]
    server: str
    """Name and version of the server."""
    inputs: tuple[Tensor, ...] = ()
    optional: tuple[str, ...] = ()
    """Names of the inputs that may be left out."""
    transport: Transport = PLAIN

    @property
    def modes(self) -> tuple[str, ...]:
        """The modes that the server names; empty where it names none, as those of others."""
        return tuple(filter(None, self.properties.get("modes", "").split(",")))

    @property
    def takes_images(self) -> bool:
        """Whether it has the inputs of xlaserve's models: `pixels`, or `image` for files."""
        known = {(own.name, own.datatype, len(own.shape)) for own in self.inputs}
        return bool(known & {("pixels", "UINT8", 4), ("image", "BYTES", 1)})


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

    async def outputs(self, request: Request) -> list[Array]:
        """Sends one request and returns the model's outputs, the images first. Raises TargetError."""


class Target(Protocol):
    """Something to measure."""

    def connect(self, models: Sequence[ModelInfo], addresses: Sequence[str]) -> AbstractAsyncContextManager[Connection]:
        """Opens a fresh connection for requests to `models`, against whose descriptions replies are checked."""


class GrpcTarget:
    """Servers of the Open Inference Protocol. `deadline_s` bounds every inference."""

    def __init__(self, *, deadline_s: float) -> None:
        self._deadline_s = deadline_s

    @asynccontextmanager
    async def connect(self, models: Sequence[ModelInfo], addresses: Sequence[str]) -> AsyncIterator[Connection]:
        """Opens a connection to each of `addresses` (HOST:PORT), which take requests in turn."""
        async with AsyncExitStack() as stack:
            channels = [
                await stack.enter_async_context(open_channel(address, models[0].transport)) for address in addresses
            ]
            # Connecting is not part of the first request; where it fails, the requests fail.
            with suppress(TimeoutError):
                async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                    await asyncio.gather(*(channel.channel_ready() for channel in channels))
            yield _GrpcConnection(channels, models, self._deadline_s)


async def describe(address: str, model: str, transport: Transport = PLAIN) -> ModelInfo:
    """Asks a server for its metadata and that of a model. Raises TargetError."""
    async with open_channel(address, transport) as channel:
        stub: Any = oip_grpc.GRPCInferenceServiceStub(channel)
        ask = partial(_ask, address, transport)
        server = await ask(stub.ServerMetadata, oip.ServerMetadataRequest())
        metadata = await ask(stub.ModelMetadata, oip.ModelMetadataRequest(name=model))
        try:
            config = (await ask(stub.ModelConfig, oip.ModelConfigRequest(name=model))).config
        except TargetError:  # an extension that not every server has
            config = oip.ModelConfig()
    return ModelInfo(
        name=model,
        size=_size(metadata),
        outputs=_tensors(metadata.outputs),
        properties=dict(metadata.properties),
        server=f"{server.name} {server.version}",
        inputs=_tensors(metadata.inputs),
        optional=tuple(own.name for own in config.input if own.optional),
        transport=transport,
    )


async def _ask(address: str, transport: Transport, method: Any, request: Any) -> Any:
    try:
        return await method(request, timeout=_METADATA_DEADLINE_S, metadata=transport.headers)
    except grpc.aio.AioRpcError as error:
        raise TargetError(f"{address}: {error.code().name}: {shortened(error.details() or '')}") from None


def _tensors(declared: Iterable[oip.ModelMetadataResponse.TensorMetadata]) -> tuple[Tensor, ...]:
    return tuple(Tensor(own.name, own.datatype, tuple(own.shape)) for own in declared)


class _GrpcConnection:
    """Distributes requests over several channels in turn."""

    def __init__(self, channels: Sequence[grpc.aio.Channel], models: Sequence[ModelInfo], deadline_s: float) -> None:
        # Without serialisers: bytes go out as they are and come back as they are.
        self._turns: Iterator[grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]] = cycle(
            [channel.unary_unary("/inference.GRPCInferenceService/ModelInfer") for channel in channels]
        )
        self._models = models
        self._headers = models[0].transport.headers
        self._deadline_s = deadline_s

    def _call(self, request: Request) -> Awaitable[bytes]:
        return next(self._turns)(request.data, timeout=self._deadline_s, metadata=self._headers)

    async def send(self, request: Request) -> Reply:
        try:
            data = await self._call(request)
        except grpc.aio.AioRpcError as error:
            return Reply(Status(error.code().value[0]), detail=error.details() or "")
        return read_reply(data, request, self._models[request.model])

    async def outputs(self, request: Request) -> list[Array]:
        try:
            data = await self._call(request)
        except grpc.aio.AioRpcError as error:
            raise TargetError(f"{error.code().name}: {error.details()}") from None
        reply = read_reply(data, request, self._models[request.model])
        if reply.status is not Status.OK:
            raise TargetError(f"{reply.status.name}: {reply.detail}")
        return read_outputs(data)


def read_reply(data: bytes, request: Request, model: ModelInfo) -> Reply:
    """Checks a serialised ModelInferResponse against the request and the model's metadata."""
    try:
        response = oip.ModelInferResponse.FromString(data)
    except DecodeError as error:
        return Reply(Status.INVALID_REPLY, detail=str(error))
    parameters = response.parameters
    if request.mode and "mode" in parameters and parameters["mode"].string_param != request.mode:
        ran = parameters["mode"].string_param
        return Reply(Status.INVALID_REPLY, detail=f"asked for mode {request.mode}, was run in {ran}")
    got = [(out.name, out.datatype, tuple(out.shape)) for out in response.outputs]
    promised = [
        (out.name, out.datatype, (request.images, *out.shape[1:]) if out.has_batch else out.shape)
        for out in model.outputs
    ]
    if got != promised and (len(got) != len(promised) or not all(map(_keeps, got, promised))):
        return Reply(Status.INVALID_REPLY, detail=f"expected outputs {promised}, got {got}")
    if fault := _contents_fault(response):
        return Reply(Status.INVALID_REPLY, detail=fault)
    return Reply(
        Status.OK,
        tuple(parameters[stage].double_param if stage in parameters else math.nan for stage in STAGES),
    )


def _contents_fault(response: oip.ModelInferResponse) -> str:
    """Returns what is wrong with the contents of the outputs, which are raw or typed for all of them; or ""."""
    raws = response.raw_output_contents
    if raws and len(raws) != len(response.outputs):
        return f"{len(response.outputs)} outputs, and the contents of {len(raws)}"
    for place, out in enumerate(response.outputs):
        size, where = math.prod(out.shape), f"output {out.name}, {out.datatype} {tuple(out.shape)}"
        if not raws:
            elements = sum(len(values) for _, values in out.contents.ListFields())
            if elements != size:
                return f"{where}, has {elements} elements"
        elif out.datatype in _ITEM_BYTES and len(raws[place]) != size * _ITEM_BYTES[out.datatype]:
            return f"{where}, has {len(raws[place])} bytes"
    return ""


def _keeps(got: tuple[str, str, tuple[int, ...]], promised: tuple[str, str, tuple[int, ...]]) -> bool:
    """Says whether an output is as promised; a side of -1 promises nothing."""
    return (
        got[:2] == promised[:2]
        and len(got[2]) == len(promised[2])
        and all(side in (has, ANY) for has, side in zip(got[2], promised[2], strict=True))
    )


def read_outputs(data: bytes) -> list[Array]:
    """Returns the outputs of a serialised ModelInferResponse that `read_reply` accepted, raw or typed."""
    response = oip.ModelInferResponse.FromString(data)
    raws: list[bytes | None] = [*response.raw_output_contents] or [None] * len(response.outputs)
    return [
        widened((_typed(out) if raw is None else np.frombuffer(raw, DTYPES[out.datatype])).reshape(tuple(out.shape)))
        for out, raw in zip(response.outputs, raws, strict=True)
        if out.datatype in DTYPES
    ]


def _typed(output: oip.ModelInferResponse.InferOutputTensor) -> NDArray[Any]:
    """Returns the elements of an output that came as numbers instead of bytes."""
    held = [values for _, values in output.contents.ListFields()]
    return np.array(held[0] if held else (), DTYPES[output.datatype])


def widened(output: NDArray[Any]) -> Array:
    """Returns an output in the type that it is compared in."""
    return output.astype(np.float64 if output.dtype.kind == "f" else np.int64)


def _size(metadata: oip.ModelMetadataResponse) -> tuple[int, int] | None:
    for tensor in metadata.inputs:
        if tensor.name == "pixels" and len(tensor.shape) == 4 and min(tensor.shape[1:3]) > 0:
            return tensor.shape[1], tensor.shape[2]
    return None
