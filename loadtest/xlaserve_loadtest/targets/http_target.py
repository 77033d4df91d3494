"""Servers over HTTP/1.1, whatever the protocol of their bodies."""

from __future__ import annotations

import asyncio
import json
import time
import zlib
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from http import HTTPStatus
from itertools import cycle
from typing import Any, Final, Self
from urllib.parse import quote

from xlaserve_loadtest.addresses import Address
from xlaserve_loadtest.printable import shortened
from xlaserve_loadtest.record.requests import Status
from xlaserve_loadtest.schedule.payload import STAMP_BYTES, PayloadError, Request
from xlaserve_loadtest.targets.answers import Checker, NoAnswer, Reader
from xlaserve_loadtest.targets.channel import Transport
from xlaserve_loadtest.targets.http_client import HttpAnswer, HttpConnections, HttpError, allow_connections, secured
from xlaserve_loadtest.targets.references import NONE, References
from xlaserve_loadtest.targets.target import Array, Connection, ModelInfo, Reply, RequestError, TargetError

STATUS: Final[Mapping[int, Status]] = {
    400: Status.INVALID_ARGUMENT,
    401: Status.UNAUTHENTICATED,
    403: Status.PERMISSION_DENIED,
    404: Status.NOT_FOUND,
    405: Status.UNIMPLEMENTED,
    408: Status.DEADLINE_EXCEEDED,
    409: Status.ABORTED,
    412: Status.FAILED_PRECONDITION,
    413: Status.INVALID_ARGUMENT,
    415: Status.INVALID_ARGUMENT,
    422: Status.INVALID_ARGUMENT,
    429: Status.RESOURCE_EXHAUSTED,
    499: Status.CANCELLED,
    500: Status.INTERNAL,
    501: Status.UNIMPLEMENTED,
    502: Status.UNAVAILABLE,
    503: Status.UNAVAILABLE,
    504: Status.DEADLINE_EXCEEDED,
}
"""Statuses of HTTP's failures: google.rpc.Code's table, read from right to left. Any other is UNKNOWN."""

_METADATA_DEADLINE_S: Final = 10.0
_CONNECT_TIMEOUT_S: Final = 2.0
_MAX_REASON_BYTES: Final = 2048
_SHOWN_BYTES: Final = 64
_COMPRESS: Final[Mapping[str, int]] = {"gzip": 31, "deflate": 15}
"""Window bits of zlib, which choose its format."""


class HttpTarget:
    """Servers that answer POST to a model's `path`, which `read` reads. `deadline_s` bounds every inference.

    HTTP has no deadlines: the server is not told, and notices that the connection is closed.
    """

    def __init__(self, path: Callable[[str], str], read: Reader[HttpAnswer], deadline_s: float) -> None:
        self._path = path
        self._read = read
        self._deadline_s = deadline_s

    @asynccontextmanager
    async def connect(
        self, models: Sequence[ModelInfo], addresses: Sequence[str], references: References = NONE
    ) -> AsyncIterator[Connection]:
        """Opens a connection to each of `addresses`, which take requests in turn; more as requests overlap."""
        allow_connections()
        transport = models[0].transport
        parsed = [Address.parse(address) for address in addresses]
        tls = await asyncio.to_thread(secured, parsed[0], transport)
        servers = [
            _Server(
                HttpConnections(address, tls, transport.server_name),
                [_head("POST", self._path(model.name), address, transport) for model in models],
            )
            for address in parsed
        ]
        try:
            # As with gRPC; where it fails, the requests fail.
            with suppress(TimeoutError, HttpError):
                async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                    for server in servers:
                        await server.connections.open()
            yield _HttpConnection(servers, Checker(models, self._read, references), self._deadline_s)
        finally:
            for server in servers:
                server.connections.close()


class _Server:
    """A server, and how a request to each model begins."""

    def __init__(self, connections: HttpConnections, heads: Sequence[bytes]) -> None:
        self.connections = connections
        self.heads = heads


class _HttpConnection:
    """Distributes requests over several servers in turn."""

    def __init__(self, servers: Sequence[_Server], checker: Checker[HttpAnswer], deadline_s: float) -> None:
        self._turns: Iterator[tuple[int, _Server]] = cycle(enumerate(servers))
        self._checker = checker
        self._deadline_s = deadline_s

    async def send(self, request: Request) -> Reply:
        reply, _ = await self._exchange(request)
        return reply

    async def outputs(self, request: Request) -> list[Array]:
        reply, answer = await self._exchange(request)
        if answer is None or reply.status is not Status.OK:
            raise RequestError(reply.status, reply.detail)
        return self._checker.outputs(answer, request)

    async def _exchange(self, request: Request) -> tuple[Reply, HttpAnswer | None]:
        target, server = next(self._turns)
        try:
            async with asyncio.timeout(self._deadline_s):
                answer = await server.connections.request(server.heads[request.model], request.data)
                arrived_ns = time.monotonic_ns()
        except TimeoutError:
            return Reply(Status.DEADLINE_EXCEEDED, detail="the client's deadline", target=target), None
        except HttpError as error:
            return Reply(Status.UNAVAILABLE, detail=str(error), target=target), None
        if answer.status != HTTPStatus.OK:
            return Reply(STATUS.get(answer.status, Status.UNKNOWN), detail=_reason(answer), target=target), None
        return self._checker.reply(answer, request)._replace(target=target, arrived_ns=arrived_ns), answer


def encoded(
    request: Request,
    body: Sequence[bytes],
    transport: Transport,
    headers: Mapping[str, str] = {},
    *,
    ends_with_image: bool = False,
) -> Request:
    """Returns a request with a body and headers, to be sent after a head.

    Raises PayloadError where no part of it can be changed so that no request is like another.
    """
    whole, more = b"".join(body), dict(headers)
    if request.stamp_at is not None and (transport.compression or not ends_with_image):
        raise PayloadError("--distinct: over HTTP expected binary tensors, without --compression")
    if transport.compression:
        compressor = zlib.compressobj(wbits=_COMPRESS[transport.compression])
        whole = compressor.compress(whole) + compressor.flush()
        more["content-encoding"] = transport.compression
    more["content-length"] = str(len(whole))
    data = _lines(more) + b"\r\n" + whole
    return replace(request, data=data, stamp_at=None if request.stamp_at is None else len(data) - STAMP_BYTES)


def model_path(prefix: str, model: str, rest: str = "") -> str:
    """Returns the path of a model, whatever its name holds."""
    return f"{prefix}{quote(model, safe='')}{rest}"


class Asked:
    """A server that is asked for what it says of itself, over a connection of its own."""

    def __init__(self, address: str, transport: Transport) -> None:
        self._name = address
        self._address = Address.parse(address)
        self._transport = transport

    async def __aenter__(self) -> Self:
        tls = await asyncio.to_thread(secured, self._address, self._transport)
        self._connections = HttpConnections(self._address, tls, self._transport.server_name)
        return self

    async def __aexit__(self, *error: object) -> None:
        self._connections.close()

    async def get(self, path: str) -> dict[str, Any]:
        """Returns the JSON object at a path. Raises TargetError."""
        try:
            async with asyncio.timeout(_METADATA_DEADLINE_S):
                answer = await self._connections.request(_head("GET", path, self._address, self._transport), b"\r\n")
        except TimeoutError:
            raise TargetError(f"{self._name}: DEADLINE_EXCEEDED: no answer within {_METADATA_DEADLINE_S:g} s") from None
        except HttpError as error:
            raise TargetError(f"{self._name}: UNAVAILABLE: {shortened(str(error))}") from None
        if answer.status != HTTPStatus.OK:
            status = STATUS.get(answer.status, Status.UNKNOWN)
            raise TargetError(f"{self._name}: {status.name}: {shortened(_reason(answer))}")
        try:
            return json_object(answer.body)
        except NoAnswer as error:
            raise TargetError(f"{self._name}: GET {path}: {error}") from None


def said_by(text: bytes) -> dict[str, Any]:
    """Returns the JSON object of an answer. Raises NoAnswer where it names an error, whatever the status said."""
    said = json_object(text)
    if said.get("error"):
        raise NoAnswer(f"HTTP 200 with an error: {shortened(str(said['error']))}")
    return said


def json_object(text: bytes) -> dict[str, Any]:
    """Returns a JSON object. Raises NoAnswer."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise NoAnswer(f"expected JSON, got {text[:_SHOWN_BYTES]!r}: {error}") from None
    if not isinstance(value, dict):
        raise NoAnswer(f"expected an object in JSON, got {text[:_SHOWN_BYTES]!r}")
    return value


def _head(verb: str, path: str, address: Address, transport: Transport) -> bytes:
    """Returns a request up to the headers that its body needs."""
    headers = {"host": address.authority, "accept-encoding": "identity", **dict(transport.headers)}
    return f"{verb} {path} HTTP/1.1\r\n".encode() + _lines(headers)


def _lines(headers: Mapping[str, str]) -> bytes:
    return "".join(f"{name}: {value}\r\n" for name, value in headers.items()).encode("latin-1")


def _reason(answer: HttpAnswer) -> str:
    """Returns why a server refused a request, in its own words where it has some."""
    text = answer.body[:_MAX_REASON_BYTES].decode(errors="replace").strip()
    with suppress(ValueError, RecursionError):
        said = json.loads(answer.body)
        text = str(said.get("error", text)) if isinstance(said, dict) else text
    retry = answer.headers.get("retry-after")
    return f"HTTP {answer.status}: {text}" + (f" (retry after {retry})" if retry else "")
