"""The Open Inference Protocol: wire messages to `pipeline.Request` and `pipeline.Answer` to wire messages."""

from __future__ import annotations

import asyncio
import math
import struct
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from operator import attrgetter
from typing import Final, NamedTuple

import numpy as np

from xlaserve import __version__
from xlaserve.call import Call, Calls
from xlaserve.config import Mode, PixelRange
from xlaserve.engine.program import Images, Outputs
from xlaserve.errors import InvalidArgument, UnsupportedFeature, XlaserveError
from xlaserve.image import Encoded
from xlaserve.model.repository import Repository
from xlaserve.model.task import Classification, Task, TensorSpec
from xlaserve.model.version import Served, State
from xlaserve.pipeline import Answer, Pending, Pipeline, Render, Rendering, Request
from xlaserve.rpc import describe, parts, tensors
from xlaserve.rpc.context import Context, deadline
from xlaserve.rpc.infer_message import InferMessage, Parameters
from xlaserve.rpc.open_streams import OpenStreams
from xlaserve.rpc.parts import Wire
from xlaserve.rpc.refusal import explain, no_message
from xlaserve.rpc.streaming import Messages
from xlaserve.rpc.vision_messages import fits_inline
from xlaserve.runtimes.tf.device import Device
from xlaserve.timings import STAGES, Timings
from xlaserve_proto import open_inference_pb2 as pb
from xlaserve_proto import open_inference_pb2_grpc as pb_grpc

EXTENSIONS: Final = (
    "binary_tensor_data",
    "classification",
    "model_configuration",
    "model_repository",
    "parameters",
    "statistics",
)


MAX_INLINE_OUTPUT_VALUES: Final = 2**14
"""Values of typed outputs that are written on the event loop: integers take 0.1 us each, floats far less."""
STREAM_WINDOW: Final = 64
"""Requests of one stream that are worked on at a time."""
CLASSIFICATION: Final = "classification"
PARAMETERS: Final = "mode, pixel_range, timeout or priority"

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
    repository: Repository
    streams: OpenStreams
    device: Device
    has_model_control: bool

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
        return pb.ServerReadyResponse(ready=self.repository.is_ready)

    async def ModelReady(self, request: pb.ModelReadyRequest, context: Context) -> pb.ModelReadyResponse:
        """Says whether one model is ready."""
        version = self.repository.find(request.name, request.version)
        return pb.ModelReadyResponse(ready=version.state is State.READY)

    async def ServerMetadata(self, request: pb.ServerMetadataRequest, context: Context) -> pb.ServerMetadataResponse:
        """Says what this server is and speaks."""
        return pb.ServerMetadataResponse(name="xlaserve", version=__version__, extensions=EXTENSIONS)

    async def ModelMetadata(self, request: pb.ModelMetadataRequest, context: Context) -> pb.ModelMetadataResponse:
        """Describes a model."""
        return describe.metadata(self.repository.get(request.name, request.version))

    async def ModelConfig(self, request: pb.ModelConfigRequest, context: Context) -> pb.ModelConfigResponse:
        """Describes a model in Triton's terms."""
        served = self.repository.get(request.name, request.version)
        return pb.ModelConfigResponse(config=describe.config(served, self.device))

    async def ModelStatistics(self, request: pb.ModelStatisticsRequest, context: Context) -> pb.ModelStatisticsResponse:
        """Counts what one model did, or all of them."""
        if request.name:
            versions = [self.repository.find(request.name, request.version)]
        else:
            versions = [version for version in self.repository.index() if version.state is State.READY]
        return pb.ModelStatisticsResponse(model_stats=map(describe.statistics, versions))

    async def RepositoryIndex(self, request: pb.RepositoryIndexRequest, context: Context) -> pb.RepositoryIndexResponse:
        """Lists the models."""
        _check_repository(request.repository_name)
        versions = [v for v in self.repository.index() if v.state is State.READY or not request.ready]
        return pb.RepositoryIndexResponse(models=map(describe.index, versions))

    async def RepositoryModelLoad(
        self, request: pb.RepositoryModelLoadRequest, context: Context
    ) -> pb.RepositoryModelLoadResponse:
        """Loads a model, or loads it again."""
        self._check_control(request.repository_name)
        if request.parameters:
            raise UnsupportedFeature("parameters: models are configured in the server's file, not by clients")
        await self.repository.load(request.model_name)
        return pb.RepositoryModelLoadResponse()

    async def RepositoryModelUnload(
        self, request: pb.RepositoryModelUnloadRequest, context: Context
    ) -> pb.RepositoryModelUnloadResponse:
        """Drains and unloads a model."""
        self._check_control(request.repository_name)
        for key in request.parameters:
            if key != "unload_dependents":
                raise InvalidArgument("parameters", "unload_dependents at most", repr(key[:64]))
        await self.repository.unload(request.model_name)
        return pb.RepositoryModelUnloadResponse()

    async def _infer(self, method: str, message: InferMessage, until: float) -> Wire:
        with self.calls.enter(method, message.head.model, message.head.version, until) as call:
            call.request = request = _parse(message, call)
            answer = await self.pipeline.run(call.served, request)
            wire = _respond(message, call.served, answer)
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
                error_message=f"{status.name}: {text}",
                infer_response=pb.ModelInferResponse(id=message.head.id if message else ""),
            )
            return [response.SerializeToString()]

    def _check_control(self, repository_name: str) -> None:
        _check_repository(repository_name)
        if not self.has_model_control:
            raise UnsupportedFeature("this server does not let clients load or unload models (see model_control)")


def _check_repository(name: str) -> None:
    if name:
        raise InvalidArgument("repository_name", "nothing, as there is one repository", repr(name[:64]))


def _parse(message: InferMessage, call: Call) -> Request:
    """Raises InvalidArgument or UnsupportedFeature."""
    head, served = message.head, call.served
    if (parameters := head.known_parameters) is None:
        parameters = _parameters(head.fields)
        head.remember_parameters(parameters)
    mode, timeout_s, pixel_range = parameters
    if head.has_outputs:
        _check_outputs(head.fields, served)
    images = tensors.images_of(message, served.settings.pixel_range, pixel_range)
    return Request(mode, images, min(call.deadline, call.began + timeout_s), _rendering(message, served, images))


def _parameters(fields: pb.ModelInferRequest) -> Parameters:
    parameters = Parameters()
    for key, value in fields.parameters.items():
        kind = value.WhichOneof("parameter_choice")
        if key == "mode":
            if kind != "string_param":
                raise InvalidArgument("parameters.mode", "a string", kind)
            parameters = parameters._replace(mode=value.string_param)
        elif key == "pixel_range":
            parameters = parameters._replace(pixel_range=_pixel_range(value))
        elif key == "timeout":
            if kind != "int64_param" or value.int64_param < 1:
                raise InvalidArgument("parameters.timeout", "an int64 of at least 1, in microseconds", _text(value))
            parameters = parameters._replace(timeout_s=value.int64_param / 1e6)
        elif key == "priority":
            if value.int64_param or value.uint64_param or kind not in ("int64_param", "uint64_param"):
                raise UnsupportedFeature("parameters.priority: only 0 is supported, all requests are alike")
        elif key.startswith("sequence_"):
            raise UnsupportedFeature(f"parameters.{key[:64]}: sequences are not supported, no model keeps state")
        elif key.startswith("triton_"):
            raise UnsupportedFeature(f"parameters.{key[:64]}: not supported; expected {PARAMETERS}")
        else:
            raise InvalidArgument("parameters", PARAMETERS, repr(key[:64]))
    return parameters


def _pixel_range(value: pb.InferParameter) -> PixelRange:
    try:
        return PixelRange(value.string_param)
    except ValueError:
        expected = f"a string, {' or '.join(PixelRange)}"
        raise InvalidArgument("parameters.pixel_range", expected, _text(value)) from None


def _check_outputs(request: pb.ModelInferRequest, served: Served) -> None:
    is_classifier = isinstance(served.model.task, Classification)
    names = [output.name for output in served.model.task.outputs]
    wanted = [output.name for output in request.outputs[: len(names) + 1]]
    for name in wanted:
        if name not in names or wanted.count(name) > 1:
            raise InvalidArgument("outputs", f"each of {', '.join(names)} once at most", repr(name[:64]))
    for output in request.outputs:
        others = {key: value for key, value in output.parameters.items() if key != CLASSIFICATION}
        tensors.reject_parameters(others, f"outputs.{output.name}")
        if CLASSIFICATION in output.parameters and not is_classifier:
            raise UnsupportedFeature(
                f"outputs.{output.name}.{CLASSIFICATION}: the model's task is {served.model.task.name}"
            )
        if CLASSIFICATION in output.parameters and output.parameters[CLASSIFICATION].int64_param < 1:
            got = _text(output.parameters[CLASSIFICATION])
            raise InvalidArgument(f"outputs.{output.name}.{CLASSIFICATION}", "an int64 of at least 1", got)


def _text(value: pb.InferParameter) -> str:
    return str(value).strip()[:64] or "nothing"


class Classes(NamedTuple):
    """Renders an image's part of the `classification` extension's tensor."""

    k: int
    as_raw: bool

    def renderer(self, task: Classification) -> Render:
        """Returns what gives it as bytes."""
        return lambda outputs, frame: tensors.piece_of_bytes(_categories(task, outputs, self.k)[0], self.as_raw)


class TypedValues(NamedTuple):
    """Renders an image's part of each of some outputs, by their indices."""

    outputs: Sequence[int]

    def renderer(self, task: Task) -> Render:
        """Returns what gives a list of bytes."""
        return lambda outputs, frame: [tensors.piece_of_values(outputs[index]) for index in self.outputs]


def _rendering(request: InferMessage, served: Served, images: Images | Pending | Sequence[Encoded]) -> Rendering | None:
    """Returns what renders each image's part of the response on a thread; None where the event loop can do it."""
    as_raw = bool(request.raw)
    if classes := _classes_wanted(request, served.model.task):
        task, k = classes
        return None if fits_inline(images, k, task.classes) else Classes(k, as_raw)
    if as_raw:
        return None
    wanted = _wanted(request, served.model.task)
    pixels = max(height * width for height, width in served.inputs)
    if isinstance(images, (np.ndarray, Pending)):
        pixels = images.shape[1] * images.shape[2]
    values = sum(pixels if -1 in spec.shape[1:] else math.prod(spec.shape[1:]) for _, spec in wanted)
    if len(images) * values <= MAX_INLINE_OUTPUT_VALUES:
        return None
    return TypedValues([index for index, _ in wanted])


def _categories(task: Classification, outputs: Outputs, k: int) -> list[list[bytes]]:
    return [
        [f"{category.score:f}:{category.index}:{category.label}".encode() for category in row]
        for row in task.top(outputs, k)
    ]


def _classes_wanted(request: InferMessage, task: Task) -> tuple[Classification, int] | None:
    """Returns the task, and how many classes an image is to be answered with; None where plain outputs are wanted."""
    if not request.head.has_outputs or not isinstance(task, Classification):
        return None
    (output,) = request.fields.outputs  # a classifier has no other
    if CLASSIFICATION not in output.parameters:
        return None
    return task, min(output.parameters[CLASSIFICATION].int64_param, task.classes)


def _wanted(request: InferMessage, task: Task) -> list[tuple[int, TensorSpec]]:
    """Returns the outputs to answer, each with its index."""
    if not request.head.has_outputs:
        return list(enumerate(task.outputs))
    names = {output.name for output in request.fields.outputs}
    return [(index, spec) for index, spec in enumerate(task.outputs) if spec.name in names]


def _respond(message: InferMessage, served: Served, answer: Answer) -> Wire:
    """Returns the response without the parameters of `_stamp`."""
    head = message.head
    wire: Wire = [_opening(served.settings.name, served.settings.version, answer.mode)]
    if head.id:
        wire += parts.record(_ID, head.id.encode())
    as_raw = bool(message.raw)
    if classes := _classes_wanted(message, served.model.task):
        task, k = classes
        spec = (task.outputs[0].name, "BYTES", (answer.images, k))
        pieces = answer.rendered or [
            tensors.piece_of_bytes(row, as_raw) for row in _categories(task, answer.outputs, k)
        ]
        return wire + tensors.output_parts(spec, pieces, as_raw)
    for place, (index, output) in enumerate(_wanted(message, served.model.task)):
        values = answer.outputs[index]
        if as_raw:
            wire += tensors.raw_output_parts(output.name, values)
            continue
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
