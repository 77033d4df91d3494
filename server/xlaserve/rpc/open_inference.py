"""The Open Inference Protocol: wire messages to `pipeline.Request` and `pipeline.Answer` to wire messages."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from operator import attrgetter
from typing import Final, NamedTuple

from xlaserve.config import Mode
from xlaserve.engine.program import Images
from xlaserve.errors import XlaserveError
from xlaserve.image import Encoded
from xlaserve.model.task import Classification, Task
from xlaserve.model.version import Served
from xlaserve.pipeline import Answer, Pending, Pipeline, Render, Rendering, Request
from xlaserve.protocol.call import Call, Calls
from xlaserve.protocol.inference import (
    Wanted,
    all_outputs,
    categories,
    check_outputs,
    check_parameters,
    fits_inline,
)
from xlaserve.protocol.models import SERVER_METADATA, Models
from xlaserve.rpc import parts, tensors
from xlaserve.rpc.context import Context, deadline
from xlaserve.rpc.infer_message import InferMessage
from xlaserve.rpc.open_streams import OpenStreams
from xlaserve.rpc.parts import Wire
from xlaserve.rpc.refusal import no_message
from xlaserve.rpc.streaming import Messages
from xlaserve.status import explain
from xlaserve.timings import STAGES, Timings
from xlaserve_proto import open_inference_pb2 as pb
from xlaserve_proto import open_inference_pb2_grpc as pb_grpc

MAX_INLINE_OUTPUT_VALUES: Final = 2**14
"""Values of typed outputs that are written on the event loop: integers take 0.1 us each, floats far less."""
STREAM_WINDOW: Final = 64
"""Requests of one stream that are worked on at a time."""

_ID: Final = pb.ModelInferResponse.ID_FIELD_NUMBER
_STREAMED: Final = pb.ModelStreamInferResponse.INFER_RESPONSE_FIELD_NUMBER


def _stamp_key(name: str) -> bytes:
    """Returns what stands on the wire before the number of a response's parameter."""
    response = pb.ModelInferResponse()
    response.parameters[name].double_param = 1.0
    data: bytes = response.SerializeToString()
    return data[:-8]


# Put in one by one, six parameters take as long as the rest of a response.
_STAMP_KEYS: Final = [*map(_stamp_key, STAGES)]
_STAMP_VALUES: Final = attrgetter(*STAGES)
_STAMP: Final = struct.Struct("<" + "".join(f"{len(key)}sd" for key in _STAMP_KEYS))


@dataclass(eq=False)
class OpenInference(pb_grpc.GRPCInferenceServiceServicer):
    """`inference.GRPCInferenceService`."""

    calls: Calls
    pipeline: Pipeline
    models: Models
    streams: OpenStreams

    def ModelInfer(  # type: ignore[override] # what rpc.server parses for it
        self, request: InferMessage, context: Context
    ) -> Awaitable[Wire]:
        """Answers one request with the outputs of a model."""
        return self._infer("ModelInfer", request, deadline(context, self.calls.clock))

    # Writes by itself instead of yielding: a generator may be left half-way, and its tasks with it.
    async def ModelStreamInfer(self, requests: Messages, context: Context) -> None:  # type: ignore[override]
        """Runs a model on each request of a stream; a window of them at a time, answered in their order."""
        until = deadline(context, self.calls.clock)
        answers: asyncio.Queue[asyncio.Task[tuple[Wire, int]] | None] = asyncio.Queue(STREAM_WINDOW)
        refusal: XlaserveError | None = None

        async def answer(request: InferMessage | None, size_bytes: int) -> tuple[Wire, int]:
            try:
                wire = await self._stream_infer(request, until)
            finally:
                requests.release(size_bytes)
            answer_bytes = parts.wire_bytes(wire)
            requests.hold(answer_bytes)
            return wire, answer_bytes

        async with self.streams.open(), asyncio.TaskGroup() as tasks:

            async def read() -> None:
                nonlocal refusal
                try:
                    async for request, size_bytes in requests:
                        await answers.put(tasks.create_task(answer(request, size_bytes)))
                except XlaserveError as error:
                    refusal = error
                await answers.put(None)

            tasks.create_task(read())
            while (answered := await answers.get()) is not None:
                wire, answer_bytes = await answered
                await requests.write(await parts.join(wire, answer_bytes))
                requests.release(answer_bytes)
        if refusal is not None:
            raise refusal

    async def ServerLive(self, request: pb.ServerLiveRequest, context: Context) -> pb.ServerLiveResponse:
        """Answers, which is the proof that the server is live."""
        return pb.ServerLiveResponse(live=True)

    async def ServerReady(self, request: pb.ServerReadyRequest, context: Context) -> pb.ServerReadyResponse:
        """Says whether start-up has finished and at least one model serves."""
        return pb.ServerReadyResponse(ready=self.models.repository.is_ready)

    async def ModelReady(self, request: pb.ModelReadyRequest, context: Context) -> pb.ModelReadyResponse:
        """Says whether one model is ready."""
        return pb.ModelReadyResponse(ready=self.models.is_ready(request.name, request.version))

    async def ServerMetadata(self, request: pb.ServerMetadataRequest, context: Context) -> pb.ServerMetadataResponse:
        """Says what this server is and speaks."""
        return pb.ServerMetadataResponse(**SERVER_METADATA)

    async def ModelMetadata(self, request: pb.ModelMetadataRequest, context: Context) -> pb.ModelMetadataResponse:
        """Describes a model."""
        return pb.ModelMetadataResponse(**self.models.metadata(request.name, request.version))

    async def ModelConfig(self, request: pb.ModelConfigRequest, context: Context) -> pb.ModelConfigResponse:
        """Describes a model in Triton's terms."""
        return pb.ModelConfigResponse(config=pb.ModelConfig(**self.models.config(request.name, request.version)))

    async def ModelStatistics(self, request: pb.ModelStatisticsRequest, context: Context) -> pb.ModelStatisticsResponse:
        """Counts what one model did, or all of them."""
        return pb.ModelStatisticsResponse(**self.models.statistics(request.name, request.version))

    async def RepositoryIndex(self, request: pb.RepositoryIndexRequest, context: Context) -> pb.RepositoryIndexResponse:
        """Lists the models."""
        models = self.models.index(request.repository_name, only_ready=request.ready)
        return pb.RepositoryIndexResponse(models=[pb.RepositoryIndexResponse.ModelIndex(**one) for one in models])

    async def RepositoryModelLoad(
        self, request: pb.RepositoryModelLoadRequest, context: Context
    ) -> pb.RepositoryModelLoadResponse:
        """Loads a model, or loads it again."""
        await self.models.load(request.repository_name, request.model_name, request.parameters)
        return pb.RepositoryModelLoadResponse()

    async def RepositoryModelUnload(
        self, request: pb.RepositoryModelUnloadRequest, context: Context
    ) -> pb.RepositoryModelUnloadResponse:
        """Drains and unloads a model."""
        await self.models.unload(request.repository_name, request.model_name, request.parameters)
        return pb.RepositoryModelUnloadResponse()

    async def _infer(self, method: str, message: InferMessage, until: float) -> Wire:
        with self.calls.enter(method, message.head.model, message.head.version, until) as call:
            request, wanted = _parse(message, call)
            call.request = request
            answer = await self.pipeline.run(call.served, request)
            wire = _respond(message, wanted, call.served, answer)
            wire.append(_stamp(call.end(answer)))
            return wire

    async def _stream_infer(self, message: InferMessage | None, until: float) -> Wire:
        try:
            if message is None:
                raise no_message()
            return parts.record(_STREAMED, *await self._infer("ModelStreamInfer", message, until))
        except Exception as error:
            status, text = explain(error)
            response = pb.ModelStreamInferResponse(
                error_message=f"{status.grpc}: {text}",
                infer_response=pb.ModelInferResponse(id=message.head.id if message else ""),
            )
            return [response.SerializeToString()]


def _parse(message: InferMessage, call: Call) -> tuple[Request, Wanted]:
    """Raises InvalidArgument or UnsupportedFeature."""
    head, served = message.head, call.served
    if (parameters := head.known_parameters) is None:
        head.known_parameters = parameters = check_parameters(_items(head.fields.parameters))
    task = served.model.task
    if head.has_outputs:
        wanted = check_outputs(((output.name, _items(output.parameters)) for output in head.fields.outputs), task)
    else:
        wanted = all_outputs(task)
    images = tensors.read_images(message, served.settings.pixel_range, parameters.pixel_range)
    until = min(call.deadline, call.began + parameters.timeout_s)
    return Request(parameters.mode, images, until, _rendering(message, wanted, served, images)), wanted


def _items(parameters: Mapping[str, pb.InferParameter]) -> Iterator[tuple[str, object]]:
    """Yields names and values, None for a parameter without one."""
    for key, value in parameters.items():
        yield key, getattr(value, kind) if (kind := value.WhichOneof("parameter_choice")) else None


class Classes(NamedTuple):
    """Renders an image's part of the `classification` extension's tensor."""

    k: int
    as_raw: bool

    def renderer(self, task: Classification) -> Render:
        """Returns what gives it as bytes."""
        return lambda outputs, frame: tensors.piece_of_bytes(categories(task, outputs, self.k)[0], self.as_raw)


class TypedValues(NamedTuple):
    """Renders an image's part of each of some outputs, by their indices."""

    outputs: Sequence[int]

    def renderer(self, task: Task) -> Render:
        """Returns what gives a list of bytes."""
        return lambda outputs, frame: [tensors.piece_of_values(outputs[index]) for index in self.outputs]


def _rendering(
    message: InferMessage, wanted: Wanted, served: Served, images: Images | Pending | Sequence[Encoded]
) -> Rendering | None:
    """Returns what renders each image's part of the response on a thread; None where the event loop can do it."""
    as_raw = bool(message.raw)
    if wanted.classes:
        ((_, scores),) = wanted.outputs
        return None if fits_inline(images, wanted.classes, scores.shape[1]) else Classes(wanted.classes, as_raw)
    if as_raw or wanted.count_values(served, images) <= MAX_INLINE_OUTPUT_VALUES:
        return None
    return TypedValues([index for index, _ in wanted.outputs])


def _respond(message: InferMessage, wanted: Wanted, served: Served, answer: Answer) -> Wire:
    """Returns the response without the parameters of `_stamp`."""
    head, task = message.head, served.model.task
    wire: Wire = [_opening(served.settings.name, served.settings.version, answer.mode)]
    if head.id:
        wire += parts.record(_ID, head.id.encode())
    as_raw = bool(message.raw)
    for place, (index, output) in enumerate(wanted.outputs):
        values = answer.outputs[index]
        if wanted.classes:
            assert isinstance(task, Classification)
            spec = (output.name, "BYTES", (answer.images, wanted.classes))
            pieces = answer.rendered or [
                tensors.piece_of_bytes(row, as_raw) for row in categories(task, answer.outputs, wanted.classes)
            ]
        elif as_raw:
            wire += tensors.raw_output_parts(output.name, values)
            continue
        else:
            spec = (output.name, tensors.OUTPUT_FIELDS[values.dtype][0], values.shape)
            pieces = [rendered[place] for rendered in answer.rendered] or [tensors.piece_of_values(values)]
        wire += tensors.output_parts(spec, pieces, as_raw)
    return wire


@lru_cache(maxsize=1024)
def _opening(model: str, version: str, mode: Mode) -> bytes:
    """Returns how a response begins."""
    response = pb.ModelInferResponse(model_name=model, model_version=version)
    response.parameters["mode"].string_param = mode
    data: bytes = response.SerializeToString()
    return data


def _stamp(timings: Timings) -> bytes:
    """Returns a response's parameters that say where the time went."""
    return _STAMP.pack(*chain.from_iterable(zip(_STAMP_KEYS, _STAMP_VALUES(timings), strict=True)))
