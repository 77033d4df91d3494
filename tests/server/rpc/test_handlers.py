from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from xlaserve.rpc import handlers
from xlaserve_proto import open_inference_pb2 as oip_pb2
from xlaserve_proto import vision_pb2

SERVICES = [
    oip_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"],
    vision_pb2.DESCRIPTOR.services_by_name["Vision"],
]


class Servicer:
    """Has every method that it is asked for."""

    def __getattr__(self, name: str) -> str:
        return f"the method {name}"


class Server:
    def __init__(self) -> None:
        self.generic: list[Any] = []

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        self.generic += handlers

    def found(self, service: Any) -> dict[str, Any]:
        """Returns the handlers of the methods of `service` as grpcio looks them up."""
        (handler,) = self.generic
        paths = {method.name: f"/{service.full_name}/{method.name}" for method in service.methods}
        return {name: handler.service(SimpleNamespace(method=path)) for name, path in paths.items()}


@pytest.mark.parametrize("service", SERVICES)
def test_every_method_of_a_service_is_answered_by_the_one_of_its_name(service: Any) -> None:
    server = Server()
    handlers.add(Servicer(), service, server)
    found = server.found(service)
    assert [handler.service_name() for handler in server.generic] == [service.full_name]
    for method in service.methods:
        handler = found[method.name]
        assert (handler.request_streaming, handler.response_streaming) == (
            method.client_streaming,
            method.server_streaming,
        )
        assert (handler.stream_stream or handler.unary_unary) == f"the method {method.name}"


@pytest.mark.parametrize("service", SERVICES)
def test_messages_are_parsed_and_what_is_none_becomes_none(service: Any) -> None:
    server = Server()
    handlers.add(Servicer(), service, server)
    for handler in server.found(service).values():
        assert handler.request_deserializer(b"") is not None
        for data in (b"\xff\xff\xff", b"\x0a\xff"):
            assert handler.request_deserializer(data) is None
    if classify := server.found(service).get("Classify"):
        request = vision_pb2.ClassifyRequest(model="digits", images=[b"png"])
        assert classify.request_deserializer(request.SerializeToString()) == request
        assert classify.request_deserializer(b"\x0a\x02\xff\xfe") is None  # a name that is not UTF-8
        response = vision_pb2.ClassifyResponse(model="digits")
        assert classify.response_serializer(response) == response.SerializeToString()
