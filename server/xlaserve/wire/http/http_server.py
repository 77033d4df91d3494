"""Listens for HTTP and stops, on the event loop that gRPC runs on."""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Final

import uvicorn
from starlette.types import ASGIApp

from xlaserve.admission.address import network_of
from xlaserve.admission.certificates import Certificates
from xlaserve.config import Settings
from xlaserve.config.authority import authority
from xlaserve.telemetry.http import taken_port
from xlaserve.wire.http.connection import Connection
from xlaserve.wire.http.connections import Connections

ACCEPT_RETRY_S: Final = 0.1
BACKLOG: Final = 2048
HANDSHAKE_TIMEOUT_S: Final = 10.0
KEEP_ALIVE_S: Final = 75
"""How long a connection without a request stays open."""
POLL_S: Final = 0.02

log = logging.getLogger(__name__)


class HttpServer:
    """Serves `application`, whose requests have their `Connection` in their scope."""

    def __init__(
        self,
        settings: Settings,
        application: ASGIApp,
        certificates: Certificates | None,
        on_failed: Callable[[str, Exception], None] = lambda method, error: None,
    ) -> None:
        self._settings = settings
        self._certificates = certificates
        self._connections = Connections(
            settings.max_connections,
            settings.effective_max_connections_per_address,
            settings.max_transfer_s,
            on_failed=on_failed,
        )
        self._config = uvicorn.Config(
            application,
            http=Connection,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            date_header=False,
            reset_contextvars=True,
            timeout_keep_alive=min(KEEP_ALIVE_S, int(settings.max_connection_idle_s)),
        )
        self._config.load()
        self._listening: list[socket.socket] = []
        self._servers: list[asyncio.Server] = []
        self._accepting: list[asyncio.Task[None]] = []
        self._handshakes: dict[asyncio.Task[None], str] = {}
        """By task, the oldest first, the address that it is for."""
        self.address = ""
        """HOST:PORT, once it is started."""

    async def start(self) -> None:
        """Listens. Raises ConfigError where the port can't be had."""
        settings = self._settings
        loop = asyncio.get_running_loop()
        try:
            self._listening = await _listen(settings.host, settings.http_port, is_shared=settings.front_processes > 0)
        except OSError as error:
            raise taken_port("http_port", settings.host, settings.http_port, error) from error
        host, port, *_ = self._listening[0].getsockname()
        for one in self._listening:
            if self._certificates is None:
                self._servers.append(await loop.create_server(self._connect, sock=one, backlog=BACKLOG))
            else:
                self._accepting.append(asyncio.create_task(self._accept(one, self._certificates)))
        self.address = authority(host, port)

    async def stop(self, grace_s: float) -> None:
        """Closes the port and idle connections; calls have `grace_s` for their answers to leave."""
        self._close_listeners()
        open_ = self._connections.connections
        self.close_connections()
        for _ in range(math.ceil(grace_s / POLL_S)):
            if not open_:
                break
            await asyncio.sleep(POLL_S)
        for connection in tuple(open_):
            connection.transport.abort()

    def drain(self) -> None:
        """Tells requests that begin from now on from those that have begun."""
        self._connections.is_draining = True

    @property
    def has_begun(self) -> bool:
        """Whether a request that began before `drain` is to be waited for."""
        return any(one.has_begun and one.is_awaited for one in self._connections.connections)

    async def leave(self) -> None:
        """Takes no new connections but those that wait to be accepted, and has each one end with an answer."""
        self._connections.is_leaving = True
        waiting = [client for one in self._listening for client in _accepted(one)]
        self._close_listeners()
        for client, peer in waiting:
            if self._certificates is None:
                await asyncio.get_running_loop().connect_accepted_socket(self._connect, client)
            else:
                self._take(client, peer, self._certificates)

    def _close_listeners(self) -> None:
        for server in self._servers:
            server.close()
        for accepting in self._accepting:
            accepting.cancel()

    @property
    def connections(self) -> int:
        """How many there are."""
        return len(self._connections.connections)

    def close_connections(self) -> None:
        """Closes each connection with the answer to its request, or at once where it has none."""
        for connection in tuple(self._connections.connections):
            connection.shutdown()

    async def _accept(self, listening: socket.socket, certificates: Certificates) -> None:
        """Accepts clients that speak TLS. asyncio's own server would shake hands with any number of them at a time."""
        loop = asyncio.get_running_loop()
        with listening:
            while True:
                try:
                    client, peer = await loop.sock_accept(listening)
                except OSError as error:  # out of file descriptors, say
                    log.debug("HTTP: %r", error)
                    await asyncio.sleep(ACCEPT_RETRY_S)
                    continue
                self._take(client, peer, certificates)

    def _take(self, client: socket.socket, peer: tuple[str, int], certificates: Certificates) -> None:
        address = network_of(peer[0])
        self._make_room(address)
        task = asyncio.create_task(self._shake_hands(client, certificates))
        self._handshakes[task] = address
        task.add_done_callback(lambda task: self._handshakes.pop(task, None))

    def _make_room(self, address: str) -> None:
        """Ends the oldest handshake where there are too many, of the address or of all."""
        settings, under_way = self._settings, self._handshakes
        of_address = [task for task, other in under_way.items() if other == address]
        if len(of_address) >= settings.effective_max_connections_per_address:
            oldest = of_address[0]
        elif len(under_way) >= settings.max_connections:
            oldest = next(iter(under_way))
        else:
            return
        del under_way[oldest]
        oldest.cancel()

    async def _shake_hands(self, client: socket.socket, certificates: Certificates) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                self._connect, client, ssl=certificates.server_context(), ssl_handshake_timeout=HANDSHAKE_TIMEOUT_S
            )
        except OSError as error:
            log.debug("HTTP: %s: no TLS: %s", self.address, error)

    def _connect(self) -> Connection:
        return Connection(self._config, self._connections, {})


def _accepted(listening: socket.socket) -> Iterator[tuple[socket.socket, tuple[str, int]]]:
    """Yields the clients that wait, and their addresses: closing the socket would reset their connections."""
    with suppress(OSError):  # nobody waits, or no file descriptors are left
        while True:
            client, peer = listening.accept()
            client.setblocking(False)
            yield client, peer


async def _listen(host: str, port: int, *, is_shared: bool) -> list[socket.socket]:
    """Returns sockets that listen on all addresses of `host`, on one port. Raises OSError.

    Other processes may listen there too where it `is_shared`.
    """
    loop = asyncio.get_running_loop()
    addresses = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    listening: list[socket.socket] = []
    missing: OSError | None = None
    for family, _, _, _, (address, _, *rest) in dict.fromkeys(addresses):
        port = port or (listening[0].getsockname()[1] if listening else 0)
        try:
            one = socket.create_server((address, port, *rest), family=family, backlog=BACKLOG, reuse_port=is_shared)
        except OSError as error:
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                for one in listening:
                    one.close()
                raise
            missing = error  # `localhost` may have an address that the machine has not
        else:
            one.setblocking(False)
            listening.append(one)
    if missing is not None and not listening:
        raise missing
    return listening
