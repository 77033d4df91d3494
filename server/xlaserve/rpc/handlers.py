"""Servicers to gRPC handlers.

Like the generated code, except that
- a method may raise any error, which is answered with its status, and may return its message as it stands on the wire;
- bytes that are no message of a unary method are an InvalidArgument: inside grpc they would become a traceback in the
  log and, at the client, UNKNOWN with the name of a Python class;
- messages are counted for as long as they are held (see `intake`). While few arrive, gRPC receives those of unary
  methods by itself, which takes less of the processor. While many do, methods are declared to grpcio as taking
  a stream, so that a message arrives when it is asked for;
- calls are counted, and end where their clients keep them waiting (see `admission`). Probes are counted by themselves,
  so that they are answered however many other calls there are.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple

import grpc
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from xlaserve.errors import QueueFull, XlaserveError
from xlaserve.rpc import parts
from xlaserve.rpc.admission import Admission, current_call
from xlaserve.rpc.context import Context
from xlaserve.rpc.intake import Intake
from xlaserve.rpc.parts import LARGE_BYTES, Wire
from xlaserve.rpc.refusal import no_message, refuse
from xlaserve.status import status_of

STREAM_BYTES: Final = 8 * 1024 * 1024
"""Bytes that a stream may hold, of messages and of answers not read by its client, before its next message is read."""

PROBES: Final = frozenset(
    f"/{method}"
    for method in (
        "grpc.health.v1.Health/Check",
        "inference.GRPCInferenceService/ServerLive",
        "inference.GRPCInferenceService/ServerReady",
    )
)
"""Methods by which others learn whether the server is well: small, and answered at once."""

Parser = Callable[[bytes], object | None]
"""Parses a method's message, or returns None for bytes that are none. Raises InvalidArgument beyond all bounds."""


class Admissions(NamedTuple):
    """What admits the calls of PROBES, and all others."""

    calls: Admission
    probes: Admission


def add(
    servicer: object,
    service: ServiceDescriptor,
    server: grpc.aio.Server,
    intake: Intake,
    admissions: Admissions,
    *,
    parsers: Mapping[str, Parser] | None = None,
    on_refused: Callable[[str, str], None] = lambda method, status: None,
) -> None:
    """Makes `server` answer the methods of `service` with those of `servicer` that have their names.

    `parsers` replace protobuf's for the input messages that they are named for. `on_refused` is called with the method
    and the status of each message that is not taken in.
    """
    parsers = parsers or {}
    methods = {}
    for method in service.methods:
        path = f"/{service.full_name}/{method.name}"
        reader = Reader(
            intake,
            admissions.probes if path in PROBES else admissions.calls,
            parsers.get(method.input_type.name) or _parser(GetMessageClass(method.input_type)),
            partial(on_refused, method.name),
        )
        methods[path] = _method(getattr(servicer, method.name), method, reader)
    server.add_generic_rpc_handlers((_Service(service.full_name, methods, intake),))


@dataclass(frozen=True, slots=True)
class Reader:
    """Reads messages of one type."""

    intake: Intake
    admission: Admission
    parse: Parser
    on_refused: Callable[[str], None]
    """Called with the status."""

    def take_in(self, data: bytes) -> tuple[Any, int]:
        """Returns a message that has arrived, and its bytes, which are counted by the intake.

        Raises QueueFull, and InvalidArgument for a message that is beyond all bounds.
        """
        taken_bytes = 0
        try:
            self.intake.take(len(data))
            taken_bytes = len(data)
            return self.parse(data), taken_bytes
        except BaseException as error:
            self.intake.release(taken_bytes)
            self.count(error)
            raise

    async def read(self, context: Context) -> tuple[Any, int]:
        """Returns the call's next message once it has arrived, as `take_in` does; EOF at the end."""
        data = await self._receive(context)
        return (data, 0) if data is grpc.aio.EOF else self.take_in(data)

    def accept(self, data: bytes) -> tuple[Any, int]:
        """Returns a unary call's message, as `take_in` does; raises InvalidArgument for bytes that are none."""
        message, size_bytes = self.take_in(data)
        if message is None:
            self.intake.release(size_bytes)
            raise no_message()
        return message, size_bytes

    async def read_only(self, context: Context) -> tuple[Any, int]:
        """Returns the call's one message once it has arrived, as `accept` does."""
        data = await self._receive(context)
        if data is grpc.aio.EOF:  # the client has gone, or sent too large a message, which gRPC has answered
            raise asyncio.CancelledError
        self.admission.work(current_call())
        return self.accept(data)

    async def _receive(self, context: Context) -> Any:
        try:
            return await self.intake.receive(context)
        except XlaserveError as error:
            self.count(error)
            raise

    def count(self, error: BaseException) -> None:
        """Counts a message that was not taken in; for lack of room, others are to make some."""
        if isinstance(error, QueueFull):
            self.admission.make_room()
        if isinstance(error, XlaserveError):
            self.on_refused(status_of(error)[0].grpc)


class Messages:
    """A stream's messages, for `async for`. What it holds is released by `release`, or with `close` at the latest.

    A stream that holds nothing is idle.
    """

    def __init__(self, reader: Reader, context: Context) -> None:
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
        message, size_bytes = await self._reader.read(self._context)
        if message is grpc.aio.EOF:
            raise StopAsyncIteration
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
        self._reader.intake.hold(size_bytes)
        self._note()

    def release(self, size_bytes: int) -> None:
        """Counts a message or an answer as no longer held."""
        self._held_bytes -= size_bytes
        self._reader.intake.release(size_bytes)
        self._released.set()
        self._note()

    def close(self) -> None:
        """Releases everything."""
        self.release(self._held_bytes)

    def _note(self) -> None:
        if not self._is_writing:  # whatever else it sends, the client does not read
            (self._reader.admission.work if self._held_bytes else self._reader.admission.idle)(self._call)


class _Method(NamedTuple):
    handler: grpc.RpcMethodHandler[Any, Any]
    """The handler that asks for its messages."""
    answer: Callable[[bytes, Context], Awaitable[bytes]] | None
    """Answers a unary method's message that has arrived already."""
    reader: Reader


class _Service(grpc.ServiceRpcHandler):
    """Chooses the handler of each call."""

    def __init__(self, name: str, methods: Mapping[str, _Method], intake: Intake) -> None:
        self._name = name
        self._methods = methods
        self._intake = intake

    def service_name(self) -> str:
        return self._name

    def service(
        self, handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler[Any, Any] | _ReceivedCall | None:
        method = self._methods.get(handler_call_details.method)
        if method is None:
            return None
        try:
            method.reader.admission.enter()
        except QueueFull as error:
            method.reader.on_refused(status_of(error)[0].grpc)
            return _refusal(error)
        if method.answer is None or self._intake.is_crowded:
            return method.handler
        return _ReceivedCall(method.answer, self._intake)


class _ReceivedCall(grpc.RpcMethodHandler):  # type: ignore[type-arg] # generic for mypy alone
    """The handler of one unary call, whose message gRPC receives before it calls it."""

    request_streaming = response_streaming = False
    request_deserializer = response_serializer = None

    def __init__(self, answer: Callable[[bytes, Context], Awaitable[bytes]], intake: Intake) -> None:
        self._answer = answer
        self._intake: Intake | None = intake
        intake.expected += 1

    async def unary_unary(  # type: ignore[override] # as grpc.aio calls it
        self, data: bytes, context: Context
    ) -> bytes:
        self._arrive()
        answered = self._answer(data, context)
        del data  # no frame that is left when the call is aborted may hold it
        return await answered

    def _arrive(self) -> None:
        if self._intake is not None:
            self._intake.expected -= 1
            self._intake = None

    __del__ = _arrive  # it never will: the client has gone


def _refusal(error: QueueFull) -> grpc.RpcMethodHandler[Any, Any]:
    async def answer(_: object, context: Context) -> None:
        await refuse(context, error)

    return grpc.stream_stream_rpc_method_handler(answer, None, None)


def _method(method: Callable[..., Any], descriptor: MethodDescriptor, reader: Reader) -> _Method:
    if descriptor.client_streaming:
        return _streams_in(method, reader)
    if descriptor.server_streaming:
        return _streams_out(method, reader, GetMessageClass(descriptor.output_type).SerializeToString)
    return _unary(method, reader)


def _unary(method: Callable[[Any, Context], Awaitable[Message | Wire]], reader: Reader) -> _Method:
    intake, admission = reader.intake, reader.admission

    async def answer_message(message: Any, size_bytes: int, context: Context) -> bytes:
        try:
            answered = method(message, context)
            del message  # what abort raises and this frame hold each other
            response = await answered
            wire: Wire = response if isinstance(response, list) else [response.SerializeToString()]
            answer_bytes = parts.wire_bytes(wire)
            if answer_bytes >= LARGE_BYTES:  # counted from now on: a thread may have to come free first
                intake.hold(answer_bytes)
                current_call().add_done_callback(lambda _: intake.release(answer_bytes))
            joined = await parts.join(wire, answer_bytes)
            admission.transfer(current_call())
            return joined
        except Exception as error:
            await refuse(context, error)
        finally:
            intake.release(size_bytes)

    async def answer(_: object, context: Context) -> bytes:
        try:
            message, size_bytes = await reader.read_only(context)
        except XlaserveError as error:
            await refuse(context, error)
        answered = answer_message(message, size_bytes, context)
        del message
        return await answered

    async def answer_received(data: bytes, context: Context) -> bytes:
        admission.work(current_call())
        try:
            message, size_bytes = reader.accept(data)
        except XlaserveError as error:
            del data
            await refuse(context, error)
        del data
        answered = answer_message(message, size_bytes, context)
        del message
        return await answered

    return _Method(grpc.stream_unary_rpc_method_handler(answer), answer_received, reader)


def _streams_in(method: Callable[[Messages, Context], Awaitable[None]], reader: Reader) -> _Method:
    async def answer(_: object, context: Context) -> None:
        messages = Messages(reader, context)
        try:
            await method(messages, context)
        except Exception as error:
            await refuse(context, error)
        finally:
            messages.close()

    return _Method(grpc.stream_stream_rpc_method_handler(answer, None, None), None, reader)


def _streams_out(
    method: Callable[[Any, Context], AsyncGenerator[Message]], reader: Reader, serialize: Callable[[Message], bytes]
) -> _Method:
    async def answer(_: object, context: Context) -> AsyncIterator[Message]:
        try:
            message, size_bytes = await reader.read_only(context)
            reader.intake.release(size_bytes)  # nobody watches anything with a large message
            reader.admission.idle(current_call())
            async with aclosing(method(message, context)) as responses:
                async for response in responses:
                    yield response
        except Exception as error:
            await refuse(context, error)

    return _Method(grpc.stream_stream_rpc_method_handler(answer, None, serialize), None, reader)


def _parser(message: type[Message]) -> Parser:
    parse = message.FromString

    def parse_or_none(data: bytes) -> Message | None:
        try:
            return parse(data if len(data) < LARGE_BYTES else parts.split(message, data, {}).rest)
        except DecodeError:
            return None

    return parse_or_none
