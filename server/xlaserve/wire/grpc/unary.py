"""Unary methods: one message in, one answer out."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import Message

from xlaserve.admission.calls import current_call
from xlaserve.admission.message_memory import MessageMemory
from xlaserve.errors import XlaserveError
from xlaserve.wire.grpc import wire_format
from xlaserve.wire.grpc.context import Context, name_answer
from xlaserve.wire.grpc.reader import MessageReader
from xlaserve.wire.grpc.refused_call import refuse
from xlaserve.wire.grpc.wire_format import LARGE_BYTES, Wire

Answer = Callable[[bytes, Context], Awaitable[bytes]]
"""Answers a message that has arrived."""


class ReceivedCall(grpc.RpcMethodHandler):  # type: ignore[type-arg] # generic for mypy alone
    """Handles the current task's call, whose message gRPC receives by itself, before it calls this; `message_memory`
    expects it.

    Where the client goes first, or the message is too large, the task ends without that: `on_unreceived` is called.
    """

    request_streaming = response_streaming = False
    request_deserializer = response_serializer = None

    def __init__(self, answer: Answer, message_memory: MessageMemory, on_unreceived: Callable[[], None]) -> None:
        self._answer = answer
        self._on_unreceived = on_unreceived
        self._message_memory = message_memory
        self._has_arrived = False
        message_memory.expect()
        current_call().add_done_callback(self._end)

    async def unary_unary(  # type: ignore[override] # as grpc.aio calls it
        self, data: bytes, context: Context
    ) -> bytes:
        """Answers the call."""
        self._has_arrived = True
        self._message_memory.end_expecting()
        answered = self._answer(data, context)
        del data  # abort's traceback holds this frame
        return await answered

    def _end(self, _: object) -> None:
        if not self._has_arrived:
            self._message_memory.end_expecting()
            self._on_unreceived()


class UnaryMethod:
    """Answers the calls of `method`. What it was called with is released once the answer is ready.

    Abort's traceback and the frame that it was raised in form a cycle, which would keep the message until the garbage
    collector comes by. So each frame lets go of its message before it waits.
    """

    __slots__ = ("_admission", "_message_memory", "_method", "_reader")

    def __init__(self, method: Callable[[Any, Context], Awaitable[Message | Wire]], reader: MessageReader) -> None:
        self._method = method
        self._reader = reader
        self._message_memory = reader.message_memory
        self._admission = reader.admission

    def asking(self) -> grpc.RpcMethodHandler[Any, Any]:
        """Returns a handler for calls whose message arrives when it is asked for."""
        return grpc.stream_unary_rpc_method_handler(self._ask)

    async def _ask(self, _: object, context: Context) -> bytes:
        try:
            self._reader.check_client(context)
            data = await self._reader.receive_only(context)
        except XlaserveError as error:
            await refuse(context, error, self._reader.on_failed)
        answered = self.answer(data, context)
        del data
        return await answered

    async def answer(self, data: bytes, context: Context) -> bytes:
        """Answers a call whose message has arrived."""
        self._admission.work(current_call())
        try:
            self._reader.check_client(context)
            message, size_bytes = self._reader.parse_unary(data)
        except XlaserveError as error:
            del data
            await refuse(context, error, self._reader.on_failed)
        del data
        answered = self._answer_message(message, size_bytes, context)
        del message
        return await answered

    async def _answer_message(self, message: Any, size_bytes: int, context: Context) -> bytes:
        message_memory = self._message_memory
        try:
            answered = self._method(message, context)
            del message
            response = await answered
            wire: Wire = response if isinstance(response, list) else [response.SerializeToString()]
            answer_bytes = wire_format.wire_bytes(wire)
            if answer_bytes >= LARGE_BYTES:  # counted from now on: a thread may have to come free first
                message_memory.hold(answer_bytes)
                current_call().add_done_callback(lambda _: message_memory.release(answer_bytes))
            joined = await wire_format.join(wire, answer_bytes)
            if (request := name_answer(context)) is not None:
                request.succeed()
            self._admission.transfer(current_call())
            return joined
        except Exception as error:
            await refuse(context, error, self._reader.on_failed)
        finally:
            message_memory.release(size_bytes)
