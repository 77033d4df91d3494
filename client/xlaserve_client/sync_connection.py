"""How the synchronous client reaches its server, or the servers of a fleet."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, Final, Protocol

import grpc
from google.protobuf.message import Message

from xlaserve_client import fleet
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
from xlaserve_client.fleet import Fleet, error_of
from xlaserve_client.name_service import NameService, follow, in_words
from xlaserve_client.paths import Paths

_STOP_TIMEOUT_S: Final = 5.0

Server = fleet.Server[Paths[grpc.Channel]]
Tried = set[Server]
"""The servers that one call was sent to."""


class Connection(Protocol):
    """Sends calls."""

    def invoke(self, call: Call[Any], timeout_s: float, tried: Tried, *, wait_for_ready: bool = False) -> Any:
        """Returns the response message. Raises ServerError."""

    def close(self) -> None:
        """Cancels what is under way."""


class ServerConnection:
    """One server, or those that gRPC finds by the name."""

    def __init__(self, target: str, credentials: grpc.ChannelCredentials | None, metadata: Metadata) -> None:
        self._target = target
        self._metadata = metadata
        self._paths = _paths(credentials, channel_options(target), target)

    def invoke(self, call: Call[Any], timeout_s: float, tried: Tried, *, wait_for_ready: bool = False) -> Any:
        """Does what `Connection` says."""
        try:
            return _ask(self._paths, call, timeout_s, self._metadata, wait_for_ready=wait_for_ready)
        except grpc.RpcError as error:
            raise from_call(self._target, error) from None

    def close(self) -> None:
        """Does what `Connection` says."""
        self._paths.close()


class FleetConnection:
    """The servers that a name service lists, which a thread asks until `close`."""

    def __init__(
        self,
        service: NameService,
        credentials: grpc.ChannelCredentials | None,
        metadata: Metadata,
        hedge_after_s: float | None,
    ) -> None:
        self._metadata = metadata
        self._hedge_after_s = hedge_after_s
        self._has_news = threading.Event()
        self._fleet = Fleet(
            service,
            lambda address: _paths(credentials, member_options(address), address),
            lambda paths: paths.close(),
            on_news=self._has_news.set,
        )
        self._follower = _Follower(service, self._fleet)

    def invoke(self, call: Call[Any], timeout_s: float, tried: Tried, *, wait_for_ready: bool = False) -> Any:
        """Does what `Connection` says, and adds the servers that were asked to `tried`.

        Nothing waits for a server to be ready, as another one may be.
        """
        check_for_fleet(call)
        give_up_at = time.monotonic() + timeout_s
        self._has_news.wait(timeout_s)

        def start(server: Server) -> Any:
            tried.add(server)
            return _start(server.channel, call, give_up_at - time.monotonic(), self._metadata)

        server = self._fleet.take(tried)
        if self._hedge_after_s is not None and call.method in IDEMPOTENT:
            return self._ask_hedged(server, start, self._hedge_after_s)
        tried.add(server)
        status = grpc.StatusCode.CANCELLED
        try:
            response = _ask(server.channel, call, give_up_at - time.monotonic(), self._metadata)
            status = grpc.StatusCode.OK
            return response
        except grpc.RpcError as error:
            failure = error_of(server, error)
            status = failure.status
            raise failure from None
        finally:
            self._fleet.release(server, status)

    def _ask_hedged(self, first: Server, start: Callable[[Server], Any], hedge_after_s: float) -> Any:
        """Sends a call, and a copy of it to another server if there is no answer after `hedge_after_s`.

        The first answer counts; where there is none, the last error.
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
        """Does what `Connection` says, and ends the thread."""
        self._follower.stop()
        self._fleet.close()
        self._has_news.set()


class _Follower:
    """A thread that follows a name service until `stop`."""

    def __init__(self, service: NameService, fleet: Fleet[Paths[grpc.Channel]]) -> None:
        self._has_begun = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        """None where the thread could not get one."""
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
        except OSError as error:  # no files left for a loop
            fleet.miss(in_words(error))
        finally:
            self._has_begun.set()

    async def _follow(self, service: NameService, fleet: Fleet[Paths[grpc.Channel]]) -> None:
        self._task = asyncio.ensure_future(follow(service, fleet))
        self._loop = asyncio.get_running_loop()
        self._has_begun.set()
        await self._task


def _paths(credentials: grpc.ChannelCredentials | None, options: Options, address: str) -> Paths[grpc.Channel]:
    return Paths(
        lambda is_own: _open(credentials, [*options, *OWN_CONNECTION] if is_own else options, address),
        lambda channel: channel.close(),
    )


def _ask(
    paths: Paths[grpc.Channel], call: Call[Any], timeout_s: float, metadata: Metadata, *, wait_for_ready: bool = False
) -> Any:
    """Returns the response message. Raises grpc.RpcError."""
    after: Any = None
    path = paths.take()
    try:
        response, ended = _method(path.channel, call).with_call(
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
    """Returns the call, which is under way."""
    path = paths.take()
    started: Any
    try:
        started = _method(path.channel, call).future(call.request, timeout=timeout_s, metadata=metadata)
    except BaseException:
        paths.release(path, None)
        raise
    started.add_done_callback(lambda ended: paths.release(path, ended.trailing_metadata()))
    return started


def _open(credentials: grpc.ChannelCredentials | None, options: Options, address: str) -> grpc.Channel:
    if credentials is None:
        return grpc.insecure_channel(address, options=options)
    return grpc.secure_channel(address, credentials, options=options)


def _method(channel: grpc.Channel, call: Call[Any]) -> grpc.UnaryUnaryMultiCallable[Message, Any]:
    return channel.unary_unary(
        call.method.path,
        request_serializer=type(call.request).SerializeToString,
        response_deserializer=call.method.response.FromString,
    )
