"""Servicers to gRPC handlers.

As the generated code does it, save that bytes which are no message of their method reach it as None: inside grpc they
would become a traceback in the log and, at the client, UNKNOWN with the name of a Python class.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import grpc
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

Parser = Callable[[bytes], object | None]
"""Bytes to what a method takes, None for bytes that are no message of it."""

MAKE: Final = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}


def add(
    servicer: object, service: ServiceDescriptor, server: grpc.aio.Server, parsers: Mapping[str, Parser] | None = None
) -> None:
    """Makes `server` answer the methods of `service` with those of `servicer` that have their names.

    `parsers` replace protobuf's for the input messages that they are named for.
    """
    parsers = parsers or {}
    handlers = {
        method.name: _handler(
            getattr(servicer, method.name),
            method,
            parsers.get(method.input_type.name) or _parser(GetMessageClass(method.input_type)),
        )
        for method in service.methods
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service.full_name, handlers),))


def _handler(
    method: Callable[..., object], descriptor: MethodDescriptor, parser: Parser
) -> grpc.RpcMethodHandler[Message, Message]:
    make = MAKE[descriptor.client_streaming, descriptor.server_streaming]
    response = GetMessageClass(descriptor.output_type)
    return make(method, parser, response.SerializeToString)  # type: ignore[arg-type]


def _parser(message: type[Message]) -> Parser:
    parse = message.FromString

    def parse_or_none(data: bytes) -> Message | None:
        try:
            return parse(data)
        except DecodeError:
            return None

    return parse_or_none
