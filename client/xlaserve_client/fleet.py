"""The servers of a fleet, and which of them takes the next call."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, Final, Generic, TypeVar

import grpc

from xlaserve_client.errors import ServerError, Unavailable, from_call
from xlaserve_client.name_service import Listing, NameService

ChannelT = TypeVar("ChannelT")

FIRST_BAN_S: Final = 0.25
MAX_BAN_S: Final = 10.0
"""How long a server that was UNAVAILABLE is left out; it doubles from one to the other until the server answers."""
CALLS_PER_HEDGE: Final = 20
"""One call in so many may be sent to a second server as well. Where all servers are slow every call would be, which
would double the load on servers that already have too much of it."""
MAX_HEDGES_SAVED: Final = 10

_NO_ANSWER: Final = (grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED)
"""Ends of a call that say nothing about its server: the caller made them."""


def error_of(server: Server[Any], call: Any) -> ServerError:
    """Returns the error for a call of gRPC that a server has ended, and not its caller.

    A server that ends at once cancels its calls: that it is no longer available.
    """
    error = from_call(server.address, call)
    if error.status is grpc.StatusCode.CANCELLED:
        return Unavailable(server.address, grpc.StatusCode.UNAVAILABLE, "the server has ended the call")
    return error


class Server(Generic[ChannelT]):
    """A server that is listed as ready, or was when its calls began."""

    __slots__ = ("address", "banned_until", "failures", "is_listed", "opened", "outstanding")

    def __init__(self, address: str) -> None:
        self.address = address
        self.opened: ChannelT | None = None
        self.outstanding = 0
        """Calls of this client that it has not yet answered."""
        self.failures = 0
        """How often it was UNAVAILABLE since it last answered."""
        self.banned_until = 0.0
        self.is_listed = True

    @property
    def channel(self) -> ChannelT:
        """The channel for a call that was given this server."""
        assert self.opened is not None
        return self.opened


class Fleet(Generic[ChannelT]):
    """Gives each call a server: of those that are ready, the one with the fewest outstanding calls of this client.

    Of several such servers, each is chosen in turn. One that was UNAVAILABLE is left out for a while, and then tried
    with one call; where all are left out, they are chosen all the same. A server that is no longer listed as ready gets
    no further calls, and its channel is closed when the last of its calls has ended. The last list with a ready server
    holds until there is another: a name service that was restarted, or cut off from the servers, may list none.

    Safe to use from several threads. `close_channel` is called with channels that are needed no more, and `on_news`
    whenever the name service was heard or missed; neither may block.
    """

    def __init__(
        self,
        service: NameService,
        open_channel: Callable[[str], ChannelT],
        close_channel: Callable[[ChannelT], object],
        *,
        on_news: Callable[[], object] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._service = service
        self._open_channel = open_channel
        self._close_channel = close_channel
        self._on_news = on_news
        self._clock = clock
        self._lock = threading.Lock()
        self._servers: dict[tuple[str, str], Server[ChannelT]] = {}
        """Those that are ready, by id and address."""
        self._leaving: set[Server[ChannelT]] = set()
        """Those that are not, and have calls."""
        self._in_order: Sequence[Server[ChannelT]] = ()
        self._next = 0
        """Where the search for the next server begins."""
        self._hedge_credit = CALLS_PER_HEDGE
        self._listed = 0
        self._heard_at: float | None = None
        self._problem = ""
        """Why the name service could not be asked the last time."""
        self._missed_at = 0.0
        self._is_closed = False

    def hear(self, listing: Listing) -> None:
        """Takes a list of servers. Does what `name_service.Listener` says."""
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
            self._listed, self._heard_at, self._problem = len(listing.servers), self._clock(), ""
            unneeded = []
            for key in before.keys() - self._servers.keys():
                server = before[key]
                server.is_listed = False
                self._leaving.add(server)
                unneeded += self._without_calls(server)
        self._close_all(unneeded)
        self._on_news()

    def miss(self, problem: str) -> None:
        """Notes why there was no answer; the last list holds."""
        with self._lock:
            self._problem, self._missed_at = problem, self._clock()
        self._on_news()

    def take(self, tried: Collection[Server[ChannelT]] = ()) -> Server[ChannelT]:
        """Chooses a server for a call, which counts as outstanding until `release`; one that is not in `tried` if it
        can be.

        Raises Unavailable where no server is ready, and ValueError after `close`.
        """
        with self._lock:
            if self._is_closed:
                raise ValueError("the client is closed")
            self._hedge_credit = min(self._hedge_credit + 1, CALLS_PER_HEDGE * MAX_HEDGES_SAVED)
            found = self._choose(tried)
            if found is None:
                raise self._nobody()
            return self._begin(found)

    def take_spare(self, busy: Collection[Server[ChannelT]]) -> Server[ChannelT] | None:
        """Chooses a server for a second copy of a call that those in `busy` have not answered.

        None where no other server is known to be well, or where CALLS_PER_HEDGE forbids it.
        """
        with self._lock:
            found = self._choose(busy)
            is_well = found is not None and found not in busy and not self._is_banned(found, self._clock())
            if found is None or not is_well or self._hedge_credit < CALLS_PER_HEDGE:
                return None
            self._hedge_credit -= CALLS_PER_HEDGE
            return self._begin(found)

    def release(self, server: Server[ChannelT], status: grpc.StatusCode) -> None:
        """Ends a call that `take` began, with the status that it ended with."""
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

    def close(self) -> None:
        """Closes all channels, and with them what is under way."""
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
        """Forgets a server that is leaving once it has no more calls, and returns its channel for closing."""
        if server not in self._leaving or server.outstanding:
            return []
        self._leaving.remove(server)
        return [server.opened] if server.opened is not None else []

    def _close_all(self, channels: Sequence[ChannelT]) -> None:
        for channel in channels:
            self._close_channel(channel)

    def _nobody(self) -> Unavailable:
        """Says what was asked, and when."""
        now, said = self._clock(), []
        if self._heard_at is not None:
            said.append(f"listed {self._listed} servers, none of them ready, {now - self._heard_at:.1f} s ago")
        if self._problem:
            said.append(f"could not be asked {now - self._missed_at:.1f} s ago: {self._problem}")
        message = f"no server is ready: {self._service.url} {', and '.join(said) or 'has not answered yet'}"
        return Unavailable(self._service.target, grpc.StatusCode.UNAVAILABLE, message)
