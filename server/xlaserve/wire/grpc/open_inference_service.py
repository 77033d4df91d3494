"""The Open Inference Protocol: wire messages to `pipeline.Request` and `pipeline.Answer` to wire messages."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from operator import attrgetter
from typing import Final

from xlaserve.config import Mode
from xlaserve.engine.timings import STAGES, Timings
from xlaserve.errors import XlaserveError, explain, retry_after_s
from xlaserve.models.version import Served
from xlaserve.pipeline.pipeline import Answer
from xlaserve.telemetry import request_context
from xlaserve.wire.grpc import wire_format
from xlaserve.wire.grpc.context import Context, deadline
from xlaserve.wire.grpc.infer_message import InferMessage
from xlaserve.wire.grpc.open_inference_models import OpenInferenceModels
from xlaserve.wire.grpc.open_inference_tensors import (
    LISTING,
    infer_request,
    learn_shape,
    output_parts,
    shared_output_parts,
)
from xlaserve.wire.grpc.open_streams import OpenStreams
from xlaserve.wire.grpc.refused_call import no_message
from xlaserve.wire.grpc.shared_memory_tensors import SharedTensors, for_peer
from xlaserve.wire.grpc.streaming import Messages
from xlaserve.wire.grpc.wire_format import Wire
from xlaserve.wire.shared import inference
from xlaserve.wire.shared.call import Calls
from xlaserve.wire.shared.models import Models
from xlaserve.wire.shared.output_tensors import OutputTensor, output_tensors
from xlaserve.wire.shared.shared_memory import SharedMemory
from xlaserve_proto import open_inference_pb2 as pb

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
            model = call.served.model
            image = model.image if model.is_of_one_image else None
            plain = infer_request(message, image)
            request, wanted = inference.parse(plain, call, LISTING)
            if plain.known_images is None:
                learn_shape(message, request.images, image)
            answer = await call.run(request)
            tensors = output_tensors(wanted, call.served, answer, LISTING)
            wire = _respond(head.id, tensors, call.served, answer, shared)
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


def _respond(
    id_: str, tensors: Iterable[OutputTensor], served: Served, answer: Answer, shared: SharedTensors | None = None
) -> Wire:
    """Returns the response without the parameters of `_stamp`, and without what `shared` keeps of the outputs."""
    wire: Wire = [_opening(served.settings.name, served.settings.version, answer.mode, answer.warning)]
    if id_:
        wire += wire_format.record(_ID, id_.encode())
    for tensor in tensors:
        if shared is not None and (slot := shared.keep(tensor)):
            wire += shared_output_parts(tensor, slot)
        else:
            wire += output_parts(tensor)
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
