"""How a method's messages come in: received, counted by the message memory, parsed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError, Message

from xlaserve.admission.calls import CallAdmission
from xlaserve.admission.message_memory import MessageMemory
from xlaserve.errors import XlaserveError, status_of
from xlaserve.wire.grpc import wire_format
from xlaserve.wire.grpc.context import Context, address
from xlaserve.wire.grpc.method_guard import MethodGuard
from xlaserve.wire.grpc.refused_call import no_message
from xlaserve.wire.grpc.wire_format import LARGE_BYTES

Parser = Callable[[bytes], object | None]
"""Returns a method's message, None for bytes that can't be parsed.

Raises InvalidArgument beyond a bound of `wire_format`.
"""


def parser_of(message: type[Message]) -> Parser:
    """Returns a parser that takes large messages apart, so that protobuf sees no unknown field of theirs."""
    parse = message.FromString

    def parse_or_none(data: bytes) -> Message | None:
        try:
            return parse(data if len(data) < LARGE_BYTES else wire_format.split(message, data, {}).rest)
        except DecodeError:
            return None

    return parse_or_none


@dataclass(frozen=True, slots=True)
class MessageReader:
    """Reads the messages of one method."""

    message_memory: MessageMemory
    admission: CallAdmission
    guard: MethodGuard
    parse: Parser
    on_refused: Callable[[str], None]
    """Called with the status of each message that is refused."""
    on_failed: Callable[[Exception], None]
    """Called with the error of each call that is answered with one."""
    on_unreceived: Callable[[], None] = lambda: None
    """Called for each call of a unary method whose message does not arrive."""

    def check_client(self, context: Context) -> None:
        """Checks what the headers of a call did not tell. Raises Unauthenticated, PermissionDenied or QueueFull."""
        self.guard.check_connection(context)
        if self.admission.bounds_addresses:
            try:
                self.admission.locate(address(context))
            except XlaserveError as error:
                self._note_refusal(error)
                raise

    async def receive(self, context: Context) -> Any:
        """Returns the call's next message as bytes, `grpc.aio.EOF` at the end. Raises QueueFull."""
        try:
            return await self.message_memory.receive(context.read)
        except XlaserveError as error:
            self._note_refusal(error)
            raise

    async def receive_only(self, context: Context) -> Any:
        """Returns a call's only message as bytes. Raises QueueFull, and CancelledError where none will come."""
        data = await self.receive(context)
        if data is grpc.aio.EOF:  # the client has gone, or sent too large a message, which gRPC has answered
            self.on_unreceived()
            raise asyncio.CancelledError
        return data

    def admit(self, data: bytes) -> tuple[Any, int]:
        """Returns what `parse` does, and the message's size, which the message memory counts until its `release`.

        Raises QueueFull and what `parse` raises.
        """
        counted_bytes = 0
        try:
            self.message_memory.take(len(data))
            counted_bytes = len(data)
            return self.parse(data), counted_bytes
        except BaseException as error:
            self.message_memory.release(counted_bytes)
            self._note_refusal(error)
            raise

    def parse_unary(self, data: bytes) -> tuple[Any, int]:
        """Returns a unary call's message as `admit` does; raises InvalidArgument for bytes that can't be parsed."""
        message, size_bytes = self.admit(data)
        if message is None:
            self.message_memory.release(size_bytes)
            raise no_message()
        return message, size_bytes

    def _note_refusal(self, error: BaseException) -> None:
        if isinstance(error, XlaserveError):
            self.on_refused(status_of(error)[0].grpc)
