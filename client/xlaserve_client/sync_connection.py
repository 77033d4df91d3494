"""Connections of the synchronous client, to a server or to the servers of a fleet. `connection` has their common
part."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, Final, Protocol

import grpc

from xlaserve_client import fleet
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
from xlaserve_client.fleet import Fleet, error_of
from xlaserve_client.name_service import NameService, failure_reason, follow
from xlaserve_client.paths import Paths
from xlaserve_client.settings import ClientSettings

_STOP_TIMEOUT_S: Final = 5.0

Server = fleet.Server[Paths[grpc.Channel]]
Tried = set[Server]
"""The servers that one call was sent to."""


class Connection(Protocol):
    """A connection of a client, over which it sends calls."""

    def invoke(self, call: Call[Any], timeout_s: float, tried: Tried, *, wait_for_ready: bool = False) -> Any:
        """Returns the response message. Raises ServerError."""

    def close(self) -> None:
        """Closes all channels and cancels their calls."""


class ServerConnection:
    """A connection to one server, or to the servers that gRPC finds by the target's name."""

    def __init__(self, settings: ClientSettings) -> None:
        self._target = settings.target
        self._metadata = settings.metadata
        self._paths = _paths(settings, channel_options(settings.target), settings.target)

    def invoke(self, call: Call[Any], timeout_s: float, tried: Tried, *, wait_for_ready: bool = False) -> Any:
        """Returns the response message; see `Connection`."""
        try:
            return _ask(self._paths, call, timeout_s, self._metadata, wait_for_ready=wait_for_ready)
        except grpc.RpcError as error:
            raise from_call(self._target, error) from None

    def close(self) -> None:
        """Closes all channels and cancels their calls."""
        self._paths.close()


class FleetConnection:
    """A connection to the servers of a fleet. A thread follows the name service until `close`."""

    def __init__(self, settings: ClientSettings, service: NameService) -> None:
        self._metadata = settings.metadata
        self._hedge_after_s = settings.hedge_after_s
        self._has_update = threading.Event()
        self._fleet = Fleet(
            service,
            lambda address: _paths(settings, member_options(address), address),
            lambda paths: paths.close(),
            on_update=self._has_update.set,
        )
        self._follower = _Follower(service, self._fleet)

    def invoke(self, call: Call[Any], timeout_s: float, tried: Tried, *, wait_for_ready: bool = False) -> Any:
        """Sends a call to one server, or two with hedging, and adds them to `tried`; see `Connection`.

        `wait_for_ready` is ignored, since another server may be ready.
        """
        check_for_fleet(call)
        give_up_at = time.monotonic() + timeout_s
        self._has_update.wait(timeout_s)

        def start(server: Server) -> Any:
            tried.add(server)
            return _start(server.channel, call, give_up_at - time.monotonic(), self._metadata)

        server = self._fleet.take(tried)
        if self._hedge_after_s is not None and call.method in IDEMPOTENT:
            return self._ask_hedged(server, start, self._hedge_after_s)
        tried.add(server)
        with self._fleet.calling(server):
            return _ask(server.channel, call, give_up_at - time.monotonic(), self._metadata)

    def _ask_hedged(self, first: Server, start: Callable[[Server], Any], hedge_after_s: float) -> Any:
        """Sends a call, and a copy of it to another server if there is no answer after `hedge_after_s`.

        Returns the first answer; raises the last error where both fail.
        """
        ended: SimpleQueue[Server] = SimpleQueue()
        running: dict[Server, Any] = {}

        def begin(server: Server) -> None:
            running[server] = None
            running[server] = call = start(server)
            call.add_done_callback(lambda _: ended.put(server))

        wait_s: float | None = hedge_after_s
        try:
            begin(first)
            while True:
                try:
                    server = ended.get(timeout=wait_s)
                except Empty:
                    wait_s = None
                    if (spare := self._fleet.take_spare(running)) is not None:
                        begin(spare)
                    continue
                call = running.pop(server)
                if call.code() is grpc.StatusCode.OK:
                    self._fleet.release(server, grpc.StatusCode.OK)
                    return call.result()
                failure = error_of(server, call)
                self._fleet.release(server, failure.status)
                if not running:
                    raise failure
        finally:
            for server, call in running.items():
                if call is not None:
                    call.cancel()
                self._fleet.release(server, grpc.StatusCode.CANCELLED)

    def close(self) -> None:
        """Cancels the calls under way, and ends the thread."""
        self._follower.stop()
        self._fleet.close()
        self._has_update.set()


class _Follower:
    """A thread that follows a name service until `stop`."""

    def __init__(self, service: NameService, fleet: Fleet[Paths[grpc.Channel]]) -> None:
        self._has_begun = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        """The thread's event loop; None where it could not be made."""
        self._thread = threading.Thread(target=self._run, args=(service, fleet), name=service.target, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread."""
        self._has_begun.wait()
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join(_STOP_TIMEOUT_S)

    def _run(self, service: NameService, fleet: Fleet[Paths[grpc.Channel]]) -> None:
        try:
            with asyncio.Runner() as runner:
                runner.run(self._follow(service, fleet))
        except asyncio.CancelledError:
            pass
        except OSError as error:  # no file descriptors left for an event loop
            fleet.service_failed(failure_reason(error))
        finally:
            self._has_begun.set()

    async def _follow(self, service: NameService, fleet: Fleet[Paths[grpc.Channel]]) -> None:
        self._task = asyncio.ensure_future(follow(service, fleet))
        self._loop = asyncio.get_running_loop()
        self._has_begun.set()
        await self._task


def connect(settings: ClientSettings) -> Connection:
    """Returns the connection of a client to its server or fleet."""
    return ServerConnection(settings) if settings.service is None else FleetConnection(settings, settings.service)


def _paths(settings: ClientSettings, options: Options, address: str) -> Paths[grpc.Channel]:
    opener = channel_opener(grpc.insecure_channel, grpc.secure_channel, settings.credentials, options, address)
    return Paths(opener, lambda channel: channel.close())


def _ask(
    paths: Paths[grpc.Channel], call: Call[Any], timeout_s: float, metadata: Metadata, *, wait_for_ready: bool = False
) -> Any:
    """Returns the response message. Raises grpc.RpcError."""
    after: Any = None
    path = paths.take()
    try:
        response, ended = callable_of(path.channel, call).with_call(
            call.request, timeout=timeout_s, wait_for_ready=wait_for_ready, metadata=metadata
        )
        after = ended.trailing_metadata()
        return response
    except grpc.RpcError as error:
        after = error.trailing_metadata()
        raise
    finally:
        paths.release(path, after)


def _start(paths: Paths[grpc.Channel], call: Call[Any], timeout_s: float, metadata: Metadata) -> Any:
    """Begins a call and returns it as gRPC's future."""
    path = paths.take()
    started: Any
    try:
        started = callable_of(path.channel, call).future(call.request, timeout=timeout_s, metadata=metadata)
    except BaseException:
        paths.release(path, None)
        raise
    started.add_done_callback(lambda ended: paths.release(path, ended.trailing_metadata()))
    return started
