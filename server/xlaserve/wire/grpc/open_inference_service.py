"""The Open Inference Protocol: wire messages to `pipeline.Request` and `pipeline.Answer` to wire messages."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from operator import attrgetter
from typing import Final, NamedTuple

import numpy as np

from xlaserve.config import Mode
from xlaserve.engine.program import Images
from xlaserve.engine.timings import STAGES, Timings
from xlaserve.errors import XlaserveError, explain, retry_after_s
from xlaserve.images.decoder import Encoded
from xlaserve.models.task import Classification, Task
from xlaserve.models.version import Served
from xlaserve.pipeline import Answer, Pending, Render, Rendering, Request
from xlaserve.telemetry import request_context
from xlaserve.wire.grpc import open_inference_tensors, wire_format
from xlaserve.wire.grpc.context import Context, deadline
from xlaserve.wire.grpc.infer_message import InferMessage, parameter_items
from xlaserve.wire.grpc.open_inference_models import OpenInferenceModels
from xlaserve.wire.grpc.open_streams import OpenStreams
from xlaserve.wire.grpc.refused_call import no_message
from xlaserve.wire.grpc.shared_memory_tensors import SharedTensors, for_peer
from xlaserve.wire.grpc.streaming import Messages
from xlaserve.wire.grpc.wire_format import Wire
from xlaserve.wire.shared.call import Call, Calls
from xlaserve.wire.shared.inference import Wanted, all_outputs, categories, check_outputs, check_parameters, fits_inline
from xlaserve.wire.shared.models import Models
from xlaserve.wire.shared.shared_memory import SharedMemory
from xlaserve_proto import open_inference_pb2 as pb

MAX_INLINE_OUTPUT_VALUES: Final = 2**14
"""Values of typed outputs that are written on the event loop: integers take 0.1 us each, floats far less."""
STREAM_WINDOW: Final = 64
"""Requests of one stream that are worked on at a time."""

_ID: Final = pb.ModelInferResponse.ID_FIELD_NUMBER
_STREAMED: Final = pb.ModelStreamInferResponse.INFER_RESPONSE_FIELD_NUMBER


def _final_response() -> bytes:
    """Returns the parameter by which Triton's clients know the last response to a request, as it stands in one."""
    response = pb.ModelInferResponse()
    response.parameters["triton_final_response"].bool_param = True
    data: bytes = response.SerializeToString()
    return data


_FINAL_RESPONSE: Final = _final_response()


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
class OpenInference(OpenInferenceModels):
    """`inference.GRPCInferenceService`."""

    calls: Calls
    models: Models
    streams: OpenStreams
    shared_memory: SharedMemory | None = None
    is_live: Callable[[], bool] = lambda: True

    def ModelInfer(  # type: ignore[override] # what rpc.server parses for it
        self, request: InferMessage, context: Context
    ) -> Awaitable[Wire]:
        """Answers one request with the outputs of a model."""
        return self._infer("ModelInfer", request, deadline(context, self.calls.clock), context)

    # Writes by itself instead of yielding: a generator may be left half-way, and its tasks with it.
    async def ModelStreamInfer(self, requests: Messages, context: Context) -> None:  # type: ignore[override]
        """Runs a model on each request of a stream; a window of them at a time, answered in their order."""
        until = deadline(context, self.calls.clock)
        answers: asyncio.Queue[asyncio.Task[tuple[Wire, int]] | None] = asyncio.Queue(STREAM_WINDOW)
        refusal: XlaserveError | None = None

        async def answer(request: InferMessage | None, size_bytes: int) -> tuple[Wire, int]:
            try:
                wire = await self._stream_infer(request, until, context)
            finally:
                requests.release(size_bytes)
            answer_bytes = wire_format.wire_bytes(wire)
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
                await requests.write(await wire_format.join(wire, answer_bytes))
                requests.release(answer_bytes)
        if refusal is not None:
            raise refusal

    async def _infer(self, method: str, message: InferMessage, until: float, context: Context) -> Wire:
        head = message.head
        with self.calls.enter(method, head.model, head.version, until, head.id) as call:
            shared = None
            if message.head.has_shared:
                shared = SharedTensors(for_peer(self.shared_memory, context), message)
                message = await shared.fill(message)
            request, wanted = _parse(message, call)
            answer = await call.run(request)
            wire = _respond(message, wanted, call.served, answer, shared)
            if shared is not None:
                await shared.write()
            wire.append(_stamp(call.end(answer)))
            return wire

    async def _stream_infer(self, message: InferMessage | None, until: float, context: Context) -> Wire:
        request = request_context.begin_message(message.head.id if message else "")
        try:
            if message is None:
                raise no_message()
            wire = await self._infer("ModelStreamInfer", message, until, context)
            if request is not None:
                request.succeed()
            return wire_format.record(_STREAMED, *wire, _FINAL_RESPONSE)
        except Exception as error:
            self.calls.note_failure("ModelStreamInfer", error)
            status, text = explain(error)
            failed = pb.ModelInferResponse.FromString(_FINAL_RESPONSE)
            failed.id = message.head.id if message else ""
            if (wait_s := retry_after_s(error)) is not None:
                failed.parameters["retry_after_s"].double_param = wait_s
            response = pb.ModelStreamInferResponse(error_message=f"{status.grpc}: {text}", infer_response=failed)
            return [response.SerializeToString()]


def _parse(message: InferMessage, call: Call) -> tuple[Request, Wanted]:
    """Raises InvalidArgument or UnsupportedFeature."""
    head, served = message.head, call.served
    if (parameters := head.known_parameters) is None:
        head.known_parameters = parameters = check_parameters(parameter_items(head.fields.parameters))
    task, settings = served.model.task, served.settings
    is_strict = settings.strict_parameters
    parameters.check_unknown(is_strict=is_strict)
    if head.has_outputs:
        outputs = ((output.name, parameter_items(output.parameters)) for output in head.fields.outputs)
        wanted = check_outputs(outputs, task, settings.output_name, is_strict=is_strict)
    else:
        wanted = all_outputs(task, settings.output_name)
    ranges = settings.pixel_range, parameters.pixel_range
    images = open_inference_tensors.read_images(message, *ranges, input_name=settings.input_name, is_strict=is_strict)
    until = min(call.deadline, call.began + parameters.timeout_s)
    rendering = _rendering(message, wanted, served, images)
    return Request(parameters.mode, images, until, rendering, parameters.priority), wanted


class Classes(NamedTuple):
    """Renders an image's part of the `classification` extension's tensor."""

    k: int
    as_raw: bool

    def renderer(self, task: Classification) -> Render:
        """Returns what gives it as bytes."""
        return lambda outputs, frame: open_inference_tensors.piece_of_bytes(
            categories(task, outputs, self.k)[0], self.as_raw
        )


class TypedValues(NamedTuple):
    """Renders an image's part of each of some outputs, by their indices."""

    outputs: Sequence[int]

    def renderer(self, task: Task) -> Render:
        """Returns what gives a list of bytes."""
        return lambda outputs, frame: [open_inference_tensors.piece_of_values(outputs[index]) for index in self.outputs]


def _rendering(
    message: InferMessage, wanted: Wanted, served: Served, images: Images | Pending | Sequence[Encoded]
) -> Rendering | None:
    """Returns what renders each image's part of the response on a thread; None where the event loop can do it."""
    as_raw = message.wants_raw
    if wanted.classes:
        ((_, scores),) = wanted.outputs
        return None if fits_inline(images, wanted.classes, scores.shape[1]) else Classes(wanted.classes, as_raw)
    if as_raw or wanted.count_values(served, images) <= MAX_INLINE_OUTPUT_VALUES:
        return None
    return TypedValues([index for index, _ in wanted.outputs])


def _respond(
    message: InferMessage, wanted: Wanted, served: Served, answer: Answer, shared: SharedTensors | None = None
) -> Wire:
    """Returns the response without the parameters of `_stamp`, and without what `shared` keeps of the outputs."""
    head, task = message.head, served.model.task
    wire: Wire = [_opening(served.settings.name, served.settings.version, answer.mode, answer.warning)]
    if head.id:
        wire += wire_format.record(_ID, head.id.encode())
    as_raw = message.wants_raw
    for place, (index, output) in enumerate(wanted.outputs):
        values = answer.outputs[index]
        if wanted.classes:
            assert isinstance(task, Classification)
            spec = (output.name, "BYTES", (answer.images, wanted.classes))
            pieces = answer.rendered or [
                open_inference_tensors.piece_of_bytes(row, as_raw)
                for row in categories(task, answer.outputs, wanted.classes)
            ]
        elif as_raw and shared is None:
            wire += open_inference_tensors.raw_output_parts(output.name, values)
            continue
        elif as_raw:
            spec = (output.name, open_inference_tensors.OUTPUT_FIELDS[values.dtype][0], values.shape)
            pieces = [np.ascontiguousarray(values).data.cast("B")]
        else:
            spec = (output.name, open_inference_tensors.OUTPUT_FIELDS[values.dtype][0], values.shape)
            pieces = [rendered[place] for rendered in answer.rendered] or [
                open_inference_tensors.piece_of_values(values)
            ]
        if shared is not None and (slot := shared.keep(output.name, pieces, wire_format.wire_bytes(pieces))):
            wire += open_inference_tensors.shared_output_parts(spec, slot)
        else:
            wire += open_inference_tensors.output_parts(spec, pieces, as_raw)
    return wire


@lru_cache(maxsize=1024)
def _opening(model: str, version: str, mode: Mode, warning: str) -> bytes:
    """Returns how a response begins."""
    response = pb.ModelInferResponse(model_name=model, model_version=version)
    response.parameters["mode"].string_param = mode
    if warning:
        response.parameters["warning"].string_param = warning
    data: bytes = response.SerializeToString()
    return data


def _stamp(timings: Timings) -> bytes:
    """Returns a response's parameters that say where the time went."""
    return _STAMP.pack(*chain.from_iterable(zip(_STAMP_KEYS, _STAMP_VALUES(timings), strict=True)))
