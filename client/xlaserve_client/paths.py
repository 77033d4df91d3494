"""The connections to one server, which may be several processes that share a port."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, Final, Generic, TypeVar

ChannelT = TypeVar("ChannelT")

FRONT: Final = "xlaserve-front"
"""The key in the trailing metadata of such a server's answers: number of the process that answered, and of all,
`1/2`."""
TRIES_PER_FRONT: Final = 4
"""Connections that are opened in a row, for each process of the server, to reach a process without a connection."""
FIRST_PAUSE_S: Final = 1.0
MAX_PAUSE_S: Final = 30.0
"""Longest pause after such a row of connections; pauses begin with FIRST_PAUSE_S and double until a process is
reached."""
PROXY_S: Final = 1.0
"""Seconds within which answers of one connection come from another process twice if a proxy distributes the calls."""


class Path(Generic[ChannelT]):
    """A connection to one process of the server."""

    __slots__ = ("changed_at", "channel", "front", "is_leaving", "outstanding")

    def __init__(self, channel: ChannelT) -> None:
        self.channel = channel
        self.outstanding = 0
        """Number of calls that are not answered yet."""
        self.front: int | None = None
        """Number of the process at its other end; None before its first answer."""
        self.changed_at = -float("inf")
        """Time at which the process at its other end last changed."""
        self.is_leaving = False
        """Whether it gets no further calls, and is closed after its last call."""


class Paths(Generic[ChannelT]):
    """Gives each call a connection: the open one with the fewest outstanding calls.

    At first there is one connection. Where answers show that the server has several processes, calls that find all
    connections busy open further ones, until there is one to each process. The kernel chooses the process of a
    connection at random, so a connection to a process that has one already is closed again. `open_channel` is called
    with whether the channel must have a connection of its own, `close_channel` with channels that are no longer needed;
    neither may block. Safe to use from several threads.
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
        """Number of the server's processes."""
        self._tries = 0
        """Connections since the last pause that did not reach a new process."""
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
        """Ends a call that `take` began; `trailing_metadata` is None where there was no answer."""
        front = None if trailing_metadata is None else _front(trailing_metadata)
        with self._lock:
            path.outstanding -= 1
            if front is not None:
                number, self._fronts = front
                if number != path.front and not path.is_leaving:
                    self._reach(path, number)
            ended = path.is_leaving and not path.outstanding and path in self._leaving
            if ended:
                self._leaving.remove(path)
        if ended:
            self._close_channel(path.channel)

    def close(self) -> None:
        """Closes all connections and cancels their calls."""
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

    def _reach(self, path: Path[ChannelT], number: int) -> None:
        """Records that a connection reaches another process than before, or its first one."""
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
    """Returns the number of the process that answered, and of all processes; None where the metadata lacks them."""
    for key, value in trailing_metadata:
        if key == FRONT:
            with suppress(TypeError, ValueError):
                number, fronts = map(int, value.split("/"))
                return number, fronts
    return None
