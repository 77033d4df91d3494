"""The answer to bytes that are no request: written to the connection itself, as no call begins for them."""

from __future__ import annotations

import json
from contextvars import copy_context
from typing import Final

from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from xlaserve.errors import InvalidArgument, MessageTooLarge
from xlaserve.telemetry import request_context
from xlaserve.telemetry.tracing import Endpoint
from xlaserve.wire.http.connections import CLOSE, Connections
from xlaserve.wire.http.request_head import Ambiguous, TooMuch

NO_REQUEST: Final = Endpoint("unknown", {}, is_http=True)


def refusal(error: BaseException, connections: Connections) -> bytes:
    """Returns the answer that says why bytes are refused and ends the connection, and has the log tell of it."""
    status, said = 400, "not HTTP/1.1"
    if isinstance(error, TooMuch):
        status, said = 431, "the request's head is too large, or its body in too many parts"
    elif isinstance(error, Ambiguous):
        said = str(error)
    reason = MessageTooLarge(said) if status == 431 else InvalidArgument("request", "HTTP/1.1", said)
    body = json.dumps({"error": said}).encode()
    headers = [
        *connections.default_headers,
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        CLOSE,
        *copy_context().run(_noted, reason, connections),
    ]
    lines = [name + b": " + value + b"\r\n" for name, value in headers]
    return b"".join((STATUS_LINE[status], *lines, b"\r\n", body))


def _noted(reason: Exception, connections: Connections) -> list[tuple[bytes, bytes]]:
    """Has the log tell of what is refused; returns the headers that name it."""
    request = request_context.begin(NO_REQUEST, ())
    connections.on_failed(NO_REQUEST.name, reason)
    return [(name.encode(), value.encode()) for name, value in request.headers]
