"""The connections to one server, which may be several processes that share a port."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, Final, Generic, TypeVar

ChannelT = TypeVar("ChannelT")

FRONT: Final = "xlaserve-front"
"""In the trailing metadata of each answer of such a server: which process answered, and how many there are, `1/2`."""
TRIES_PER_FRONT: Final = 4
"""Connections that are opened in a row, for each process there is, to meet one that none meets yet."""
FIRST_PAUSE_S: Final = 1.0
MAX_PAUSE_S: Final = 30.0
"""How long after these the next ones are; it doubles from one to the other until a process is met."""
PROXY_S: Final = 1.0
"""Where a connection's answers come from other processes twice within this time, a proxy is between, which spreads."""


class Path(Generic[ChannelT]):
    """A connection."""

    __slots__ = ("changed_at", "channel", "front", "is_leaving", "outstanding")

    def __init__(self, channel: ChannelT) -> None:
        self.channel = channel
        self.outstanding = 0
        """Calls that are not yet answered."""
        self.front: int | None = None
        """The process that it meets, once that has answered."""
        self.changed_at = -float("inf")
        """When it was another one before."""
        self.is_leaving = False
        """Whether it gets no more calls, and is closed after those it has."""


class Paths(Generic[ChannelT]):
    """Gives each call a connection: of those there are, the one with the fewest outstanding calls.

    There is one at first. Where answers say that the server is several processes, further connections are opened, by
    calls that find all others busy, until there is one to each process: which of them a connection meets is chance, so
    those that meet one that another meets already are closed again. `open_channel` is called with whether the channel
    must have a connection of its own, `close_channel` with channels that are needed no more; neither may block. Safe to
    use from several threads.
    """

    def __init__(
        self,
        open_channel: Callable[[bool], ChannelT],
        close_channel: Callable[[ChannelT], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._open_channel = open_channel
        self._close_channel = close_channel
        self._clock = clock
        self._lock = threading.Lock()
        self._paths = [Path(open_channel(False))]
        self._leaving: set[Path[ChannelT]] = set()
        self._fronts = 1
        """Processes of the server."""
        self._tries = 0
        """Connections since the last pause that met no further process."""
        self._pause_s = FIRST_PAUSE_S
        self._next_try_at = -float("inf")
        self._proxied_until = -float("inf")
        self._is_closed = False

    def take(self) -> Path[ChannelT]:
        """Chooses the connection for a call, which counts as outstanding until `release`."""
        with self._lock:
            path = min(self._paths, key=lambda path: path.outstanding)
            if path.outstanding and self._may_open():
                path = Path(self._open_channel(True))
                self._paths.append(path)
            path.outstanding += 1
            return path

    def release(self, path: Path[ChannelT], trailing_metadata: Iterable[tuple[str, Any]] | None) -> None:
        """Ends a call that `take` began, with what its answer had after it; None where there was no answer."""
        front = None if trailing_metadata is None else _front(trailing_metadata)
        with self._lock:
            path.outstanding -= 1
            if front is not None:
                number, self._fronts = front
                if number != path.front and not path.is_leaving:
                    self._meet(path, number)
            ended = path.is_leaving and not path.outstanding and path in self._leaving
            if ended:
                self._leaving.remove(path)
        if ended:
            self._close_channel(path.channel)

    def close(self) -> None:
        """Closes all connections, and with them what is under way."""
        with self._lock:
            opened = () if self._is_closed else (*self._paths, *self._leaving)
            self._is_closed = True
            self._leaving = set()
        for path in opened:
            self._close_channel(path.channel)

    def _may_open(self) -> bool:
        if len(self._paths) >= self._fronts or self._is_closed:
            return False
        return self._clock() >= max(self._next_try_at, self._proxied_until)

    def _meet(self, path: Path[ChannelT], number: int) -> None:
        """A connection meets another process than before, or the first one."""
        now = self._clock()
        if path.front is not None:
            if now - path.changed_at < PROXY_S:
                self._proxied_until = now + MAX_PAUSE_S
            path.changed_at = now
        if number not in (other.front for other in self._paths):
            self._tries, self._pause_s = 0, FIRST_PAUSE_S
        elif now >= self._proxied_until:
            path.is_leaving = True
            self._paths.remove(path)
            self._leaving.add(path)
            self._tries += 1
            if self._tries >= TRIES_PER_FRONT * self._fronts:
                self._tries, self._next_try_at = 0, now + self._pause_s
                self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)
        path.front = number


def _front(trailing_metadata: Iterable[tuple[str, Any]]) -> tuple[int, int] | None:
    """Returns which process of how many has answered, where that is said."""
    for key, value in trailing_metadata:
        if key == FRONT:
            with suppress(TypeError, ValueError):
                number, fronts = map(int, value.split("/"))
                return number, fronts
    return None
