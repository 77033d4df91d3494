"""The servers of a fleet, and the choice of a server for each call."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, Generic, TypeVar

import grpc

from xlaserve_client.errors import ServerError, Unavailable, from_call
from xlaserve_client.name_service import Listing, NameService

ChannelT = TypeVar("ChannelT")

FIRST_BAN_S: Final = 0.25
MAX_BAN_S: Final = 10.0
"""Largest time in seconds for which a server that was UNAVAILABLE is left out; it doubles until the server answers."""
CALLS_PER_HEDGE: Final = 20
"""Calls for each one that may be sent to a second server as well. Without a limit, every call would be where all
servers are slow, which would double the load on overloaded servers."""
MAX_HEDGES_SAVED: Final = 10
"""Unused second copies of calls that may be made up for later."""

_NO_ANSWER: Final = (grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED)
"""Statuses that tell nothing about the server, since the caller ended the call."""


def error_of(server: Server[Any], call: Any) -> ServerError:
    """Returns the error for a call of gRPC that the server ended, not the caller.

    A server that stops at once cancels its calls: its CANCELLED is an UNAVAILABLE.
    """
    error = from_call(server.address, call)
    if error.status is grpc.StatusCode.CANCELLED:
        return Unavailable(server.address, grpc.StatusCode.UNAVAILABLE, "the server has ended the call")
    return error


class Server(Generic[ChannelT]):
    """A server that is listed as ready, or that was listed when its calls began."""

    __slots__ = ("address", "banned_until", "failures", "is_listed", "opened", "outstanding")

    def __init__(self, address: str) -> None:
        self.address = address
        self.opened: ChannelT | None = None
        self.outstanding = 0
        """Calls of this client that the server has not answered yet."""
        self.failures = 0
        """Number of times that it was UNAVAILABLE since its last answer."""
        self.banned_until = 0.0
        self.is_listed = True

    @property
    def channel(self) -> ChannelT:
        """The channel for a call that was given this server."""
        assert self.opened is not None
        return self.opened


class Fleet(Generic[ChannelT]):
    """Gives each call a server: of those that are ready, the one with the fewest outstanding calls of this client.

    Several such servers are chosen in turn. A server that was UNAVAILABLE is left out for a while, and then tried with
    one call; where all servers are left out, all are chosen from. A server that is no longer listed as ready gets no
    further calls, and its channel is closed when its last call has ended. A list without a ready server does not
    replace the last list with one: a name service that was restarted, or cut off from the servers, may list none.

    Safe to use from several threads. `close_channel` is called with channels that are no longer needed, and `on_update`
    after each answer and each failure of the name service; neither may block.
    """

    def __init__(
        self,
        service: NameService,
        open_channel: Callable[[str], ChannelT],
        close_channel: Callable[[ChannelT], object],
        *,
        on_update: Callable[[], object] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._service = service
        self._open_channel = open_channel
        self._close_channel = close_channel
        self._on_update = on_update
        self._clock = clock
        self._lock = threading.Lock()
        self._servers: dict[tuple[str, str], Server[ChannelT]] = {}
        """Servers that are listed as ready, by id and address."""
        self._leaving: set[Server[ChannelT]] = set()
        """Servers that are no longer listed as ready and have outstanding calls."""
        self._in_order: Sequence[Server[ChannelT]] = ()
        self._next = 0
        """Index at which the search for the next server begins."""
        self._hedge_credit = CALLS_PER_HEDGE
        self._listed = 0
        self._updated_at: float | None = None
        self._problem = ""
        """Why the last request to the name service failed; empty where it succeeded."""
        self._failed_at = 0.0
        self._is_closed = False

    def update(self, listing: Listing) -> None:
        """Replaces the list of servers; see `name_service.Listener`."""
        with self._lock:
            if self._is_closed:
                return
            before = self._servers
            ready = {
                key: before.get(key) or Server(each.address)
                for each in listing.servers
                if each.is_ready and (key := (each.id, each.address))
            }
            self._servers = ready or before
            self._in_order = list(self._servers.values())
            self._listed, self._updated_at, self._problem = len(listing.servers), self._clock(), ""
            unneeded = []
            for key in before.keys() - self._servers.keys():
                server = before[key]
                server.is_listed = False
                self._leaving.add(server)
                unneeded += self._without_calls(server)
        self._close_all(unneeded)
        self._on_update()

    def service_failed(self, problem: str) -> None:
        """Records why the name service did not answer; the last list stays in force."""
        with self._lock:
            self._problem, self._failed_at = problem, self._clock()
        self._on_update()

    def take(self, tried: Collection[Server[ChannelT]] = ()) -> Server[ChannelT]:
        """Chooses a server for a call, which counts as outstanding until `release`; if possible one that is not in
        `tried`.

        Raises Unavailable where no server is ready, and ValueError after `close`.
        """
        with self._lock:
            if self._is_closed:
                raise ValueError("the client is closed")
            self._hedge_credit = min(self._hedge_credit + 1, CALLS_PER_HEDGE * MAX_HEDGES_SAVED)
            found = self._choose(tried)
            if found is None:
                raise self._none_ready()
            return self._begin(found)

    def take_spare(self, busy: Collection[Server[ChannelT]]) -> Server[ChannelT] | None:
        """Chooses a server for a second copy of a call that the servers in `busy` have not answered.

        None where no other server is available, or where CALLS_PER_HEDGE forbids it.
        """
        with self._lock:
            found = self._choose(busy)
            is_usable = found is not None and found not in busy and not self._is_banned(found, self._clock())
            if found is None or not is_usable or self._hedge_credit < CALLS_PER_HEDGE:
                return None
            self._hedge_credit -= CALLS_PER_HEDGE
            return self._begin(found)

    def release(self, server: Server[ChannelT], status: grpc.StatusCode) -> None:
        """Ends a call that `take` began; `status` is the call's."""
        with self._lock:
            server.outstanding -= 1
            now = self._clock()
            if status is grpc.StatusCode.UNAVAILABLE:
                if now >= server.banned_until:  # calls that fail together are one failure
                    server.banned_until = now + min(FIRST_BAN_S * 2**server.failures, MAX_BAN_S)
                    server.failures = min(server.failures + 1, 10)
            elif status not in _NO_ANSWER:
                server.failures, server.banned_until = 0, 0.0
            unneeded = self._without_calls(server)
        self._close_all(unneeded)

    @contextmanager
    def calling(self, server: Server[ChannelT]) -> Iterator[None]:
        """A call to a server that was taken for it: releases the server at the end, with the call's status.

        Raises gRPC's error as ServerError.
        """
        status = grpc.StatusCode.CANCELLED
        try:
            yield
            status = grpc.StatusCode.OK
        except grpc.RpcError as error:
            failure = error_of(server, error)
            status = failure.status
            raise failure from None
        finally:
            self.release(server, status)

    def close(self) -> None:
        """Closes all channels and cancels their calls."""
        with self._lock:
            self._is_closed = True
            opened = [server.opened for server in (*self._servers.values(), *self._leaving) if server.opened]
            self._servers, self._in_order, self._leaving = {}, (), set()
        self._close_all(opened)

    def _begin(self, server: Server[ChannelT]) -> Server[ChannelT]:
        if server.opened is None:
            server.opened = self._open_channel(server.address)
        server.outstanding += 1
        return server

    def _choose(self, tried: Collection[Server[ChannelT]]) -> Server[ChannelT] | None:
        now, count = self._clock(), len(self._in_order)
        found: Server[ChannelT] | None = None
        least, place = (True, True, 1 << 62), 0
        for step in range(count):
            index = (self._next + step) % count
            server = self._in_order[index]
            rank = (self._is_banned(server, now), server in tried, server.outstanding)
            if found is None or rank < least:
                found, least, place = server, rank, index
                if rank == (False, False, 0):
                    break
        self._next = place + 1
        return found

    @staticmethod
    def _is_banned(server: Server[ChannelT], now: float) -> bool:
        return server.failures > 0 and (now < server.banned_until or server.outstanding > 0)

    def _without_calls(self, server: Server[ChannelT]) -> list[ChannelT]:
        """Removes a server that is no longer listed once it has no more calls, and returns its channel for closing."""
        if server not in self._leaving or server.outstanding:
            return []
        self._leaving.remove(server)
        return [server.opened] if server.opened is not None else []

    def _close_all(self, channels: Sequence[ChannelT]) -> None:
        for channel in channels:
            self._close_channel(channel)

    def _none_ready(self) -> Unavailable:
        """Returns the error where no server is ready, with the last answers of the name service and their age."""
        now, answers = self._clock(), []
        if self._updated_at is not None:
            answers.append(f"listed {self._listed} servers, none of them ready, {now - self._updated_at:.1f} s ago")
        if self._problem:
            answers.append(f"could not be asked {now - self._failed_at:.1f} s ago: {self._problem}")
        message = f"no server is ready: {self._service.url} {', and '.join(answers) or 'has not answered yet'}"
        return Unavailable(self._service.target, grpc.StatusCode.UNAVAILABLE, message)
