"""Connections of the asyncio client, to a server or to the servers of a fleet. `connection` has their common part."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

import grpc
import grpc.aio

from xlaserve_client import fleet
from xlaserve_client.aio_fleet import AsyncFleet
from xlaserve_client.call import Call
from xlaserve_client.calls import IDEMPOTENT
from xlaserve_client.connection import (
    Metadata,
    Options,
    callable_of,
    channel_opener,
    channel_options,
    check_for_fleet,
    member_options,
)
from xlaserve_client.errors import from_call
from xlaserve_client.name_service import NameService
from xlaserve_client.paths import Paths
from xlaserve_client.settings import ClientSettings

Server = fleet.Server["_AsyncPaths"]
Tried = set[Server]
"""The servers that one call was sent to."""

_Start = Callable[[Server], Coroutine[Any, Any, Any]]


class Connection(Protocol):
    """A connection of a client, over which it sends calls."""

    async def invoke(self, call: Call[Any], timeout_s: float, tried: Tried, *, wait_for_ready: bool = False) -> Any:
        """Returns the response message. Raises ServerError."""

    async def close(self) -> None:
        """Closes all channels and cancels their calls."""


class ServerConnection:
    """A connection to one server, or to the servers that gRPC finds by the target's name."""

    def __init__(self, settings: ClientSettings) -> None:
        self._target = settings.target
        self._metadata = settings.metadata
        self._paths = _AsyncPaths(settings, channel_options(settings.target), settings.target)

    async def invoke(self, call: Call[Any], timeout_s: float, tried: Tried, *, wait_for_ready: bool = False) -> Any:
        """Returns the response message; see `Connection`."""
        try:
            return await _ask(self._paths, call, timeout_s, self._metadata, wait_for_ready=wait_for_ready)
        except grpc.aio.AioRpcError as error:
            raise from_call(self._target, error) from None

    async def close(self) -> None:
        """Closes all channels and cancels their calls."""
        await self._paths.close_all()


class FleetConnection:
    """A connection to the servers of a fleet. A task follows the name service until `close`."""

    def __init__(self, settings: ClientSettings, service: NameService) -> None:
        self._metadata = settings.metadata
        self._hedge_after_s = settings.hedge_after_s
        self._fleet = AsyncFleet(
            service,
            lambda address: _AsyncPaths(settings, member_options(address), address),
            lambda paths: paths.close_all(),
        )

    async def invoke(self, call: Call[Any], timeout_s: float, tried: Tried, *, wait_for_ready: bool = False) -> Any:
        """Sends a call to one server, or two with hedging, and adds them to `tried`; see `Connection`.

        `wait_for_ready` is ignored, since another server may be ready.
        """
        check_for_fleet(call)
        give_up_at = time.monotonic() + timeout_s
        await self._fleet.wait_for_update(timeout_s)

        def start(server: Server) -> Coroutine[Any, Any, Any]:
            tried.add(server)
            return _ask(server.channel, call, give_up_at - time.monotonic(), self._metadata)

        server = self._fleet.members.take(tried)
        if self._hedge_after_s is not None and call.method in IDEMPOTENT:
            return await self._ask_hedged(server, start, self._hedge_after_s)
        return await self._ask(server, start)

    async def _ask(self, server: Server, start: _Start) -> Any:
        """Sends a call to a server that was taken for it."""
        with self._fleet.members.calling(server):
            return await start(server)

    async def _ask_hedged(self, first: Server, start: _Start, hedge_after_s: float) -> Any:
        """Sends a call, and a copy of it to another server if there is no answer after `hedge_after_s`.

        Returns the first answer; raises the last error where both fail.
        """
        running = {asyncio.create_task(self._ask(first, start)): first}
        wait_s: float | None = hedge_after_s
        try:
            while True:
                done, _ = await asyncio.wait(running, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
                if not done:
                    wait_s = None
                    if (spare := self._fleet.members.take_spare(running.values())) is not None:
                        running[asyncio.create_task(self._ask(spare, start))] = spare
                    continue
                for task in done:
                    del running[task]
                answered = [task for task in done if task.exception() is None]
                if answered or not running:
                    return (answered or [*done])[0].result()
        finally:
            for task in running:
                task.cancel()
                # It may have failed meanwhile.
                task.add_done_callback(lambda task: task.cancelled() or task.exception())

    async def close(self) -> None:
        """Cancels the calls under way, and ends the task."""
        await self._fleet.close()


def connect(settings: ClientSettings) -> Connection:
    """Returns the connection of a client to its server or fleet. It belongs to the running event loop."""
    return ServerConnection(settings) if settings.service is None else FleetConnection(settings, settings.service)


class _AsyncPaths(Paths[grpc.aio.Channel]):
    """Paths of asyncio's channels. They belong to the event loop that runs when they are made."""

    def __init__(self, settings: ClientSettings, options: Options, address: str) -> None:
        aio = grpc.aio
        opener = channel_opener(aio.insecure_channel, aio.secure_channel, settings.credentials, options, address)
        super().__init__(opener, self._begin_to_close)
        self._closing: set[asyncio.Task[None]] = set()

    async def close_all(self) -> None:
        """Returns once all connections are closed; calls in progress are cancelled."""
        self.close()
        if self._closing:
            await asyncio.wait(self._closing)

    def _begin_to_close(self, channel: grpc.aio.Channel) -> None:
        closing = asyncio.create_task(channel.close(None))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)


async def _ask(
    paths: Paths[grpc.aio.Channel],
    call: Call[Any],
    timeout_s: float,
    metadata: Metadata,
    *,
    wait_for_ready: bool = False,
) -> Any:
    """Returns the response message. Raises grpc.aio.AioRpcError."""
    after: Any = None
    path = paths.take()
    try:
        started = callable_of(path.channel, call)(
            call.request, timeout=timeout_s, wait_for_ready=wait_for_ready, metadata=metadata
        )
        response = await started
        after = await started.trailing_metadata()
        return response
    except grpc.aio.AioRpcError as error:
        after = error.trailing_metadata()
        raise
    finally:
        paths.release(path, after)
