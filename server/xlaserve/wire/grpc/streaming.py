"""Streaming methods: messages in as the stream has room for them, or answers out as they come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, Final

import grpc
from google.protobuf.message import Message

from xlaserve.admission.calls import current_call
from xlaserve.wire.grpc.context import Context, name_answer
from xlaserve.wire.grpc.reader import MessageReader
from xlaserve.wire.grpc.refused_call import refuse

STREAM_BYTES: Final = 8 * 1024 * 1024
"""Bytes that a stream may hold, of messages and of answers not read by its client, before its next message is read."""


def stream_in(
    method: Callable[[Messages, Context], Awaitable[None]], reader: MessageReader
) -> grpc.RpcMethodHandler[Any, Any]:
    """Returns a handler for `method`, which reads a stream of messages and writes its answers by itself."""

    async def answer(_: object, context: Context) -> None:
        messages = Messages(reader, context)
        request = name_answer(context)
        try:
            reader.check_client(context)
            await method(messages, context)
            if request is not None:
                request.succeed()
        except Exception as error:
            await refuse(context, error, reader.on_failed)
        finally:
            messages.close()

    return grpc.stream_stream_rpc_method_handler(answer, None, None)


def stream_out(
    method: Callable[[Any, Context], AsyncGenerator[Message]],
    reader: MessageReader,
    serialize: Callable[[Message], bytes],
) -> grpc.RpcMethodHandler[Any, Any]:
    """Returns a handler for `method`, which answers one message with a stream."""

    async def answer(_: object, context: Context) -> AsyncIterator[Message]:
        request = name_answer(context)
        try:
            reader.check_client(context)
            message, size_bytes = reader.parse_unary(await reader.receive_only(context))
            reader.message_memory.release(size_bytes)  # nobody watches anything with a large message
            reader.admission.idle(current_call())
            async with aclosing(method(message, context)) as responses:
                async for response in responses:
                    yield response
            if request is not None:
                request.succeed()
        except Exception as error:
            await refuse(context, error, reader.on_failed)

    return grpc.stream_stream_rpc_method_handler(answer, None, serialize)


class Messages:
    """A stream's messages, for `async for`. What it holds is released by `release`, or with `close` at the latest.

    A stream that holds nothing is idle.
    """

    def __init__(self, reader: MessageReader, context: Context) -> None:
        self._reader = reader
        self._context = context
        self._call = current_call()
        self._held_bytes = 0
        self._is_writing = False
        self._released = asyncio.Event()
        self._note()

    def __aiter__(self) -> Messages:
        return self

    async def __anext__(self) -> tuple[Any, int]:
        """Returns the next message and its bytes. Waits while more than `STREAM_BYTES` are held."""
        while self._held_bytes > STREAM_BYTES:
            self._released.clear()
            await self._released.wait()
        data = await self._reader.receive(self._context)
        if data is grpc.aio.EOF:
            raise StopAsyncIteration
        self._reader.guard.check_again(self._context)
        message, size_bytes = self._reader.admit(data)
        self._held_bytes += size_bytes
        self._note()
        return message, size_bytes

    async def write(self, data: bytes) -> None:
        """Returns once the client has room for an answer."""
        self._is_writing = True
        self._reader.admission.transfer(self._call)
        await self._context.write(data)
        self._is_writing = False
        self._note()

    def hold(self, size_bytes: int) -> None:
        """Counts an answer until its `release`."""
        self._held_bytes += size_bytes
        self._reader.message_memory.hold(size_bytes)
        self._note()

    def release(self, size_bytes: int) -> None:
        """Counts a message or an answer as no longer held."""
        self._held_bytes -= size_bytes
        self._reader.message_memory.release(size_bytes)
        self._released.set()
        self._note()

    def close(self) -> None:
        """Releases everything."""
        self.release(self._held_bytes)

    def _note(self) -> None:
        if self._is_writing:  # while a write is pending, only the client's reading counts
            return
        (self._reader.admission.work if self._held_bytes else self._reader.admission.idle)(self._call)
