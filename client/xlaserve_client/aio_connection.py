"""How the asyncio client reaches its server, or the servers of a fleet."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

import grpc
import grpc.aio
from google.protobuf.message import Message

from xlaserve_client import fleet
from xlaserve_client.aio_fleet import AsyncFleet
from xlaserve_client.call import Call
from xlaserve_client.calls import IDEMPOTENT
from xlaserve_client.connection import (
    OWN_CONNECTION,
    Metadata,
    Options,
    channel_options,
    check_for_fleet,
    member_options,
)
from xlaserve_client.errors import from_call
from xlaserve_client.fleet import error_of
from xlaserve_client.name_service import NameService
from xlaserve_client.paths import Paths

Server = fleet.Server["_Paths"]
Tried = set[Server]
"""The servers that one call was sent to."""

_Start = Callable[[Server], Coroutine[Any, Any, Any]]


class Connection(Protocol):
    """Sends calls."""

    async def invoke(self, call: Call[Any], timeout_s: float, tried: Tried, *, wait_for_ready: bool = False) -> Any:
        """Returns the response message. Raises ServerError."""

    async def close(self) -> None:
        """Cancels what is under way."""


class ServerConnection:
    """One server, or those that gRPC finds by the name."""

    def __init__(self, target: str, credentials: grpc.ChannelCredentials | None, metadata: Metadata) -> None:
        self._target = target
        self._metadata = metadata
        self._paths = _Paths(credentials, channel_options(target), target)

    async def invoke(self, call: Call[Any], timeout_s: float, tried: Tried, *, wait_for_ready: bool = False) -> Any:
        """Does what `Connection` says."""
        try:
            return await _ask(self._paths, call, timeout_s, self._metadata, wait_for_ready=wait_for_ready)
        except grpc.aio.AioRpcError as error:
            raise from_call(self._target, error) from None

    async def close(self) -> None:
        """Does what `Connection` says."""
        await self._paths.close_all()


class FleetConnection:
    """The servers that a name service lists, which a task asks until `close`."""

    def __init__(
        self,
        service: NameService,
        credentials: grpc.ChannelCredentials | None,
        metadata: Metadata,
        hedge_after_s: float | None,
    ) -> None:
        self._metadata = metadata
        self._hedge_after_s = hedge_after_s
        self._fleet = AsyncFleet(
            service,
            lambda address: _Paths(credentials, member_options(address), address),
            lambda paths: paths.close_all(),
        )

    async def invoke(self, call: Call[Any], timeout_s: float, tried: Tried, *, wait_for_ready: bool = False) -> Any:
        """Does what `Connection` says, and adds the servers that were asked to `tried`.

        Nothing waits for a server to be ready, as another one may be.
        """
        check_for_fleet(call)
        give_up_at = time.monotonic() + timeout_s
        await self._fleet.wait_for_news(timeout_s)

        def start(server: Server) -> Coroutine[Any, Any, Any]:
            tried.add(server)
            return _ask(server.channel, call, give_up_at - time.monotonic(), self._metadata)

        server = self._fleet.members.take(tried)
        if self._hedge_after_s is not None and call.method in IDEMPOTENT:
            return await self._ask_hedged(server, start, self._hedge_after_s)
        return await self._ask(server, start)

    async def _ask(self, server: Server, start: _Start) -> Any:
        """Sends a call to a server that was taken for it, and releases that."""
        status = grpc.StatusCode.CANCELLED
        try:
            response = await start(server)
            status = grpc.StatusCode.OK
            return response
        except grpc.aio.AioRpcError as error:
            failure = error_of(server, error)
            status = failure.status
            raise failure from None
        finally:
            self._fleet.members.release(server, status)

    async def _ask_hedged(self, first: Server, start: _Start, hedge_after_s: float) -> Any:
        """Sends a call, and a copy of it to another server if there is no answer after `hedge_after_s`.

        The first answer counts; where there is none, the last error.
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
                # It may have failed just now.
                task.add_done_callback(lambda task: task.cancelled() or task.exception())

    async def close(self) -> None:
        """Does what `Connection` says, and ends the task."""
        await self._fleet.close()


class _Paths(Paths[grpc.aio.Channel]):
    """Belongs to the event loop that runs when it is made."""

    def __init__(self, credentials: grpc.ChannelCredentials | None, options: Options, address: str) -> None:
        super().__init__(
            lambda is_own: _open(credentials, [*options, *OWN_CONNECTION] if is_own else options, address),
            self._begin_to_close,
        )
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
        started = _method(path.channel, call)(
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


def _open(credentials: grpc.ChannelCredentials | None, options: Options, address: str) -> grpc.aio.Channel:
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, credentials, options=options)


def _method(channel: grpc.aio.Channel, call: Call[Any]) -> grpc.aio.UnaryUnaryMultiCallable[Message, Any]:
    return channel.unary_unary(
        call.method.path,
        request_serializer=type(call.request).SerializeToString,
        response_deserializer=call.method.response.FromString,
    )
