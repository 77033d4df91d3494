"""HTTP/1.1 as a load generator needs it: a request costs it less than one over gRPC.

httptools parses; this keeps connections, one for each request that is under way. Nothing is sent twice, as a repeated
request would be measured as one.
"""

from __future__ import annotations

import asyncio
import resource
import ssl
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple, cast

import httptools

from xlaserve_loadtest.addresses import SECURE, Address
from xlaserve_loadtest.targets.channel import Transport

_OK: Final = 200
_CLOSED: Final = "the server closed the connection"


class HttpError(Exception):
    """There is no answer; the message says why."""


class HttpAnswer(NamedTuple):
    """An answer that has arrived."""

    status: int
    headers: dict[str, str]
    """By name in lower case; of several with one name the last."""
    body: bytes


class HttpConnections:
    """Connections to one server. A request takes one that is idle, or a new one."""

    def __init__(self, address: Address, tls: ssl.SSLContext | None, server_name: str | None) -> None:
        self._address = address
        self._tls = tls
        self._server_name = (server_name or address.host) if tls else None
        self._idle: list[_Exchange] = []
        self._open: set[_Exchange] = set()

    async def request(self, *parts: bytes) -> HttpAnswer:
        """Sends a request, its head and its body, and returns the answer. Raises HttpError.

        A request that is cancelled closes its connection: HTTP/1.1 has no other way to call it off.
        """
        exchange = await self._take()
        try:
            answer = await exchange.send(parts)
        except BaseException:
            exchange.abort()
            raise
        if exchange.is_reusable:
            self._idle.append(exchange)
        else:
            exchange.abort()
        return answer

    def close(self) -> None:
        """Closes all connections."""
        for exchange in [*self._open]:
            exchange.abort()

    async def open(self) -> None:
        """Opens a connection for the first request. Raises HttpError."""
        self._idle.append(await self._take())

    async def _take(self) -> _Exchange:
        while self._idle:
            exchange = self._idle.pop()
            if exchange.is_open:
                return exchange
        exchange = _Exchange(self._open)
        try:
            await asyncio.get_running_loop().create_connection(
                lambda: exchange,
                self._address.host,
                self._address.port,
                ssl=self._tls,
                server_hostname=self._server_name,
            )
        except OSError as error:  # those of TLS and of names are such
            raise HttpError(str(error)) from None
        return exchange


class _Exchange(asyncio.Protocol):
    """A connection, with the request that is under way on it."""

    def __init__(self, all_open: set[_Exchange]) -> None:
        self.is_open = False
        self.is_reusable = True
        """Whether another request may follow."""
        self._all_open = all_open
        self._transport: asyncio.Transport
        self._answer: asyncio.Future[HttpAnswer] | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._headers: dict[str, str] = {}
        self._body: list[bytes] = []
        self._has_head = False
        """Whether the head of an answer has arrived, and not yet all of its body."""

    async def send(self, parts: tuple[bytes, ...]) -> HttpAnswer:
        """Sends a request and returns the answer. Raises HttpError."""
        if not self.is_open:
            raise HttpError(_CLOSED)
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.writelines(parts)
        return await self._answer

    def abort(self) -> None:
        """Closes the connection at once."""
        self.is_open = False
        self._transport.abort()

    # What asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # which uvloop's do not derive from
        self.is_open = True
        self._all_open.add(self)

    def data_received(self, data: bytes) -> None:
        if self._answer is None:  # nobody asked: a server says so before it hangs up
            self.abort()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._fail("the server switched to another protocol")
        except httptools.HttpParserError as error:
            self._fail(f"not HTTP: {error}")

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        self._all_open.discard(self)
        if self._has_head and not {"content-length", "transfer-encoding"} & self._headers.keys():
            self._end()  # the body ends where the connection does
        elif self._has_head:
            self._fail("the connection was closed in the middle of an answer")
        else:
            self._fail(f"{_CLOSED}: {error}" if error else _CLOSED)

    # What the parser calls.

    def on_message_begin(self) -> None:
        if self._answer is None:  # a second answer to one request
            self.is_reusable = False

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._has_head = True

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        if self._parser.get_status_code() < _OK:
            self._headers, self._has_head = {}, False  # the answer itself follows
            return
        # Where the request is still being sent, its rest would be read as the next one.
        if not self._parser.should_keep_alive() or self._transport.get_write_buffer_size():
            self.is_reusable = False
        self._end()

    def _end(self) -> None:
        answer, self._answer = self._answer, None
        if answer and not answer.done():
            answer.set_result(HttpAnswer(self._parser.get_status_code(), self._headers, b"".join(self._body)))
        self._headers, self._body, self._has_head = {}, [], False

    def _fail(self, why: str) -> None:
        answer, self._answer = self._answer, None
        if answer and not answer.done():
            answer.set_exception(HttpError(why))


def secured(address: Address, transport: Transport) -> ssl.SSLContext | None:
    """Returns what TLS needs; None for a protocol without. Blocks."""
    if address.protocol not in SECURE:
        return None
    trusted = transport.authorities.decode("latin-1") if transport.authorities else None
    context = ssl.create_default_context(cadata=trusted)
    if transport.certificate and transport.key:
        with tempfile.TemporaryDirectory() as folder:  # this module reads files alone
            certificate, key = Path(folder, "certificate"), Path(folder, "key")
            certificate.write_bytes(transport.certificate)
            key.write_bytes(transport.key)
            context.load_cert_chain(certificate, key, password="")
    return context


def allow_connections() -> None:
    """Lets this process have as many connections as its administrator does."""
    with suppress(ValueError, OSError):
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
