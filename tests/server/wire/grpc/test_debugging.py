from __future__ import annotations

import logging
from typing import Any
from unittest.mock import Mock

import pytest
from google.protobuf import json_format
from grpc import StatusCode
from grpc_channelz.v1 import channelz_pb2

from xlaserve.errors import INTERNAL, NotFound, XlaserveError, explain
from xlaserve.wire.grpc.debugging import REFLECTIONS, Channelz


class Context:
    """Keeps what grpcio's servicer sets."""

    def set_code(self, code: StatusCode) -> None:
        self._code = code

    def code(self) -> StatusCode:
        return self._code

    def set_details(self, details: str) -> None:
        self._details = details

    def details(self) -> str:
        return self._details


async def error_of(method: str, request: Any) -> Exception:
    with pytest.raises(Exception) as raised:
        await getattr(Channelz(), method)(request, Context())
    return raised.value


async def test_what_channelz_does_not_know_is_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpc._cython.cygrpc.channelz_get_socket", Mock(side_effect=ValueError("no such socket")))
    assert isinstance(await error_of("GetSocket", channelz_pb2.GetSocketRequest()), NotFound)


@pytest.mark.parametrize(
    ("method", "error"),
    [("GetSocket", json_format.ParseError("no such field")), ("GetServers", ValueError("no servers"))],
)
async def test_what_channelz_fails_to_describe_is_an_internal_error_that_is_logged(
    method: str, error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    function = {"GetSocket": "channelz_get_socket", "GetServers": "channelz_get_servers"}[method]
    monkeypatch.setattr(f"grpc._cython.cygrpc.{function}", Mock(side_effect=error))
    raised = await error_of(method, getattr(channelz_pb2, f"{method}Request")())
    assert not isinstance(raised, XlaserveError)
    assert explain(raised)[0] is INTERNAL
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert str(error) in caplog.text


def test_both_versions_of_reflection_have_the_same_fields() -> None:
    v1, v1alpha = REFLECTIONS
    assert [v1.full_name, v1alpha.full_name] == [
        "grpc.reflection.v1.ServerReflection",
        "grpc.reflection.v1alpha.ServerReflection",
    ]
    for one, other in zip(v1.methods, v1alpha.methods, strict=True):
        assert (one.name, one.client_streaming, one.server_streaming) == (other.name, True, True)
        for message, alpha in ((one.input_type, other.input_type), (one.output_type, other.output_type)):
            fields = [(field.name, field.number, field.type) for field in message.fields]
            assert fields == [(field.name, field.number, field.type) for field in alpha.fields]
