"""The name service: the fleet's addresses over HTTP, for clients and proxies."""

from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import Callable, Coroutine
from threading import Thread
from typing import Any, Final, TypeVar

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from xlaserve.config.authority import authority
from xlaserve.errors import ConfigError
from xlaserve_fleet.addresses import Addresses, Entry

T = TypeVar("T")

PATH: Final = "/v1/servers"
EXPIRE_EVERY_S: Final = 0.5
MOST_WAIT_S: Final = 60.0
MAX_CONNECTIONS: Final = 10_000
"""Clients and proxies, each of which waits for news on a connection; all may come by one proxy."""


def application(addresses: Addresses) -> Starlette:
    """Returns the ASGI application that answers `GET /v1/servers?after=N&wait_s=S`."""

    async def servers(request: Request) -> Response:
        try:
            after = request.query_params.get("after")
            wait_s = float(request.query_params.get("wait_s", 0))
            if not 0 <= wait_s < math.inf:
                raise ValueError(wait_s)
            generation = None if after is None else int(after)
        except ValueError:
            return PlainTextResponse("expected after=GENERATION and wait_s=SECONDS\n", 400)
        body = await addresses.listing(generation, min(wait_s, MOST_WAIT_S))
        return Response(body, media_type="application/json")

    return Starlette(routes=[Route(PATH, servers)])


class NameService:
    """Listens on HOST:PORT, on a thread of its own. Its methods may be called from any other."""

    def __init__(self, host: str, port: int) -> None:
        """Raises ConfigError where the port can't be had."""
        try:
            listening = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        except OSError as error:
            raise ConfigError(f"port: expected a free port of {host}, got {port}: {error.strerror}") from None
        self.address = authority(host, port)
        self._loop = asyncio.new_event_loop()
        self._addresses = Addresses()
        config = uvicorn.Config(
            application(self._addresses),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            limit_concurrency=MAX_CONNECTIONS,
        )
        self._server = uvicorn.Server(config)
        self._thread = Thread(target=self._run, args=(listening,), name="name-service", daemon=True)
        self._thread.start()

    def renew(self, entry: Entry) -> None:
        """Adds, changes or keeps an entry."""
        self._do(lambda: self._addresses.renew(entry))

    def remove(self, key: str) -> None:
        """Removes an entry."""
        self._do(lambda: self._addresses.remove(key))

    def entries(self) -> list[Entry]:
        """Returns all entries, with what only people want to know."""
        return self._do(lambda: self._addresses.entries)

    def stop(self) -> None:
        """Closes the port."""
        self._server.should_exit = self._server.force_exit = True
        self._thread.join()

    def _run(self, listening: socket.socket) -> None:
        asyncio.set_event_loop(self._loop)
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve(listening))

    async def _serve(self, listening: socket.socket) -> None:
        expiring = asyncio.create_task(self._expire())
        try:
            await self._server.serve([listening])
        finally:
            expiring.cancel()

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(EXPIRE_EVERY_S)
            self._addresses.expire()

    def _do(self, action: Callable[[], T]) -> T:
        async def run() -> T:
            return action()

        coroutine: Coroutine[Any, Any, T] = run()
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()
