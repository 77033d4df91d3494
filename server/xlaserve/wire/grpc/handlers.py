"""Servicers to gRPC handlers.

Like the generated code, except that
- a method may raise any error, which is answered with its status, and may return its message as it stands on the wire;
- bytes that are no message of a unary method are an InvalidArgument: inside grpc they would become a traceback in the
  log and, at the client, UNKNOWN with the name of a Python class;
- messages are counted for as long as they are held (see `admission.message_memory`). While few arrive, gRPC receives
  those of unary methods by itself, which takes less of the processor. While many do, methods are declared to grpcio as
  taking a stream, so that a message arrives when it is asked for;
- calls are counted, and end where their clients keep them waiting (see `admission.calls`). Probes are counted by
  themselves, so that they are answered however many other calls there are.

A call goes from here to its method in `unary` or `streaming`, which get their messages from a `reader`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Final, NamedTuple

import grpc
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message_factory import GetMessageClass

from xlaserve.admission.authenticator import OPEN, Authenticator
from xlaserve.admission.caller import ADMIN
from xlaserve.admission.calls import Admissions
from xlaserve.admission.message_memory import MessageMemory
from xlaserve.errors import XlaserveError, status_of
from xlaserve.telemetry import request_context
from xlaserve.telemetry.tracing import Endpoint, Tracer
from xlaserve.wire.grpc.context import Context
from xlaserve.wire.grpc.ending import Ending
from xlaserve.wire.grpc.method_guard import ROLES, MethodGuard
from xlaserve.wire.grpc.reader import MessageReader, Parser, parser_of
from xlaserve.wire.grpc.refused_call import refuse
from xlaserve.wire.grpc.streaming import stream_in, stream_out
from xlaserve.wire.grpc.unary import Answer, ReceivedCall, UnaryMethod

GENERATED: Final = "_pb2_grpc"
"""How modules of generated code end, whose methods only raise NotImplementedError: gRPC's core answers UNIMPLEMENTED in
their place."""
PROBES: Final = frozenset(
    f"/{method}"
    for method in (
        "grpc.health.v1.Health/Check",
        "inference.GRPCInferenceService/ServerLive",
        "inference.GRPCInferenceService/ServerReady",
    )
)
"""Methods by which others learn whether the server is well: small, and answered at once."""


def add(
    servicer: object,
    service: ServiceDescriptor,
    server: grpc.aio.Server,
    message_memory: MessageMemory,
    admissions: Admissions,
    *,
    authenticator: Authenticator = OPEN,
    parsers: Mapping[str, Parser] | None = None,
    on_refused: Callable[[str, str], None] = lambda method, status: None,
    on_failed: Callable[[str, Exception], None] = lambda method, error: None,
    on_unreceived: Callable[[str], None] = lambda method: None,
    tracer: Tracer | None = None,
    headers: Iterable[tuple[str, str]] = (),
) -> None:
    """Makes `server` answer the methods of `service` with those of `servicer` that have their names.

    `parsers` replace protobuf's for the input messages that they are named for. `on_refused` is called with the method
    and the status of each message that is refused, `on_failed` with the method and the error of every call that is
    answered with one, `on_unreceived` with the method of each unary call whose message does not arrive. `tracer`
    records the calls of all methods but probes. Answers carry `headers`, read for each.
    """
    parsers = parsers or {}
    roles = ROLES.get(service.full_name, {})
    methods = {}
    for method in service.methods:
        answer = getattr(servicer, method.name)
        if getattr(answer, "__module__", "").endswith(GENERATED):
            continue
        path = f"/{service.full_name}/{method.name}"
        reader = MessageReader(
            message_memory,
            admissions.probes if path in PROBES else admissions.calls,
            MethodGuard(authenticator, roles.get(method.name, ADMIN), method.name),
            parsers.get(method.input_type.name) or parser_of(GetMessageClass(method.input_type)),
            partial(on_refused, method.name),
            partial(on_failed, method.name),
            partial(on_unreceived, method.name),
        )
        endpoint = Endpoint(path[1:], {"rpc.system.name": "grpc", "rpc.method": path[1:]}, headers=headers)
        handling = _method(answer, method, reader, endpoint)
        methods[path] = handling._replace(tracer=None if path in PROBES else tracer)
    server.add_generic_rpc_handlers((_Service(service.full_name, methods, message_memory),))


class _Method(NamedTuple):
    endpoint: Endpoint
    reader: MessageReader
    handler: grpc.RpcMethodHandler[Any, Any]
    """The handler that asks for its messages."""
    answer: Answer | None = None
    """Answers a unary method's message that gRPC has received by itself."""
    tracer: Tracer | None = None


def _method(
    method: Callable[..., Any], descriptor: MethodDescriptor, reader: MessageReader, endpoint: Endpoint
) -> _Method:
    if descriptor.client_streaming:
        return _Method(endpoint, reader, stream_in(method, reader))
    if descriptor.server_streaming:
        serialize = GetMessageClass(descriptor.output_type).SerializeToString
        return _Method(endpoint, reader, stream_out(method, reader, serialize))
    unary = UnaryMethod(method, reader)
    return _Method(endpoint, reader, unary.asking(), unary.answer)


class _Service(grpc.ServiceRpcHandler):
    """Chooses the handler of each call."""

    def __init__(self, name: str, methods: Mapping[str, _Method], message_memory: MessageMemory) -> None:
        self._name = name
        self._methods = methods
        self._message_memory = message_memory
        self._end = Ending()

    def service_name(self) -> str:
        return self._name

    def service(
        self, handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler[Any, Any] | ReceivedCall | None:
        method = self._methods.get(handler_call_details.method)
        if method is None:
            return None
        request_context.begin(method.endpoint, handler_call_details.invocation_metadata or (), method.tracer)
        try:
            method.reader.guard.check_details(handler_call_details)
            method.reader.admission.enter(self._end)
        except XlaserveError as error:
            method.reader.on_refused(status_of(error)[0].grpc)
            method.reader.on_failed(error)
            return _refusal(error)
        if method.answer is None or self._message_memory.is_crowded:
            return method.handler
        return ReceivedCall(method.answer, self._message_memory, method.reader.on_unreceived)


def _refusal(error: XlaserveError) -> grpc.RpcMethodHandler[Any, Any]:
    async def answer(_: object, context: Context) -> None:
        await refuse(context, error)

    return grpc.stream_stream_rpc_method_handler(answer, None, None)
