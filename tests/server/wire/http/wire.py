"""A server of HTTP without sockets: its connections, and clients that send bytes and read answers when tests say so."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Mapping
from http.client import HTTPResponse
from types import SimpleNamespace
from typing import Any, NamedTuple

import uvicorn
from starlette.types import ASGIApp

from xlaserve.admission.calls import Admissions, CallAdmission
from xlaserve.admission.message_memory import MessageMemory
from xlaserve.wire.http.connection import Connection
from xlaserve.wire.http.connections import Connections
from xlaserve.wire.http.http_calls import CallsIn
from xlaserve.wire.http.message import HttpAnswer, HttpRequest, json_answer

HIGH_WATER_BYTES = 64 * 1024
MAX_BODY_BYTES = 2**20
MAX_TRANSFER_S = 64.0
CROWDED_S = 4.0
KEEP_ALIVE_S = 75


class Reply(NamedTuple):
    status: int
    headers: Mapping[str, str]
    """By name in lower case."""
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


class Client(asyncio.Transport):
    """A connection, seen from its client."""

    def __init__(self, connect: Any, address: str = "127.0.0.1") -> None:
        super().__init__({"peername": (address, 9), "sockname": ("127.0.0.1", 8)})
        self.loop = asyncio.get_running_loop()
        self.received = b""
        self.unread = 0
        self.reads = True
        self.is_open = True
        self.may_send = True
        self.was_aborted = False
        self._is_closing = False
        self._is_paused = False
        self.connection: Connection = connect()
        self.connection.connection_made(self)

    # As the client.

    def send(self, *parts: bytes) -> None:
        for part in parts:
            self.connection.data_received(part)

    def close(self, error: Exception | None = None) -> None:  # also as asyncio.Transport
        self._is_closing = True
        if not self.unread:
            self._lose(error)

    def hang_up(self) -> None:
        self._is_closing = True
        self._lose(None)

    def read_on(self) -> None:
        """Reads all that was sent, and what will be."""
        self.reads, self.unread = True, 0
        if self._is_paused:
            self._is_paused = False
            self.connection.resume_writing()
        if self._is_closing:
            self._lose(None)

    def replies(self, *methods: str) -> list[Reply]:
        """Returns the answers so far, whose requests had these methods."""
        stream = io.BytesIO(self.received)
        stream.close = lambda: None  # type: ignore[method-assign]
        found: list[Reply] = []
        while stream.tell() < len(self.received):
            method = methods[len(found)] if methods else "GET"
            response = HTTPResponse(SimpleNamespace(makefile=lambda mode: stream), method=method)  # type: ignore[arg-type]
            response.begin()
            headers = {name.lower(): value for name, value in response.getheaders()}
            found.append(Reply(response.status, headers, response.read()))
        return found

    # As asyncio's transport.

    def write(self, data: bytes | bytearray | memoryview) -> None:
        assert self.is_open and not self._is_closing
        self.received += bytes(data)
        if not self.reads:
            self.unread += len(data)
            if self.unread > HIGH_WATER_BYTES and not self._is_paused:
                self._is_paused = True
                self.connection.pause_writing()

    def is_closing(self) -> bool:
        return self._is_closing

    def abort(self) -> None:
        self.was_aborted = self._is_closing = True
        self._lose(None)

    def pause_reading(self) -> None:
        self.may_send = False

    def resume_reading(self) -> None:
        self.may_send = True

    def _lose(self, error: Exception | None) -> None:
        if self.is_open:
            self.is_open = False
            self.loop.call_soon(self.connection.connection_lost, error)


class Method:
    """Answers with the request; holds calls while `hold` is set."""

    def __init__(self) -> None:
        self.requests: list[HttpRequest] = []
        self.cancelled = 0
        self.answer: HttpAnswer | None = None
        self.error: Exception | None = None
        self.go = asyncio.Event()
        self.go.set()

    async def __call__(self, request: HttpRequest) -> HttpAnswer:
        self.requests.append(request)
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.error:
            raise self.error
        return self.answer or json_answer({"number": len(self.requests), "body": bytes(request.body).decode("latin-1")})


class Host:
    """A server whose only method is `method`."""

    def __init__(
        self,
        *,
        max_connections: int = 4,
        max_per_address: int = 4,
        max_calls: int = 4,
        app: ASGIApp | None = None,
    ) -> None:
        self.method = Method()
        self.now = 0.0
        clock = asyncio.get_running_loop().time
        self.message_memory = MessageMemory(8 * MAX_BODY_BYTES, MAX_BODY_BYTES, 2**60, lambda: 0)
        self.admissions = Admissions(
            CallAdmission(max_calls, MAX_TRANSFER_S, CROWDED_S, clock),
            CallAdmission(max_calls, MAX_TRANSFER_S, 0.0, clock, limit="probes"),
        )
        self.refused: list[tuple[str, str]] = []
        self.calls = CallsIn(
            self.admissions,
            self.message_memory,
            MAX_BODY_BYTES,
            lambda name, status: self.refused.append((name, status)),
        )
        self.connections = Connections(max_connections, max_per_address, MAX_TRANSFER_S, clock)
        self._config = uvicorn.Config(
            app or self.calls.application("method", self.method, ()),
            ws="none",
            timeout_keep_alive=KEEP_ALIVE_S,
            lifespan="off",
            log_config=None,
            log_level="error",
            reset_contextvars=True,
        )
        self._config.load()

    def connect(self, address: str = "127.0.0.1") -> Client:
        return Client(lambda: Connection(self._config, self.connections, {}), address)


def request(method: str = "GET", path: str = "/", body: bytes | None = None, **headers: str) -> bytes:
    fields = {"host": "h", **{name.replace("_", "-"): value for name, value in headers.items()}}
    if body is not None:
        fields.setdefault("content-length", str(len(body)))
    lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"{method} {path} HTTP/1.1\r\n{lines}\r\n".encode("latin-1") + (body or b"")


async def settle() -> None:
    """Returns once everything that can happen now has happened."""
    for _ in range(20):
        await asyncio.sleep(0)
