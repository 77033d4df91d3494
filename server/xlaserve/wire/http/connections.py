"""The connections of one server, and which of them gives way to a new one."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from email.utils import formatdate
from typing import TYPE_CHECKING, Any, Final

from uvicorn.server import ServerState

from xlaserve.admission.calls import CROWDED_TRANSFER_S

if TYPE_CHECKING:
    from xlaserve.wire.http.connection import Connection

CLOSE: Final = (b"connection", b"close")


class Connections(ServerState):
    """The connections of one server, at most `max_connections`, and `max_per_address` of each address.

    Those without a request give way to new ones; if there are none, the one that has waited for its client for longest.
    """

    connections: set[Connection]  # type: ignore[assignment]

    def __init__(
        self,
        max_connections: int,
        max_per_address: int,
        max_transfer_s: float,
        clock: Any = time.time,
        *,
        on_failed: Callable[[str, Exception], None] = lambda method, error: None,
    ) -> None:
        self.max_connections = max_connections
        self.max_per_address = max_per_address
        self.max_transfer_s = max_transfer_s
        self.on_failed = on_failed
        """Called with an error for each connection whose bytes are no request."""
        self.idle: dict[Connection, None] = {}
        """Connections whose next request has not begun, or not ended its head; the longest idle first."""
        self.waiting: dict[Connection, float] = {}
        """Connections whose clients send a body or read an answer, and since when; the longest first."""
        self._clock = clock
        self.is_leaving = False
        """Whether answers to requests that come now end their connections."""
        self.is_draining = False
        """Whether requests that begin now are not waited for."""
        self._date_s = -1
        self._of_address: Counter[str] = Counter()
        super().__init__()

    @property
    def default_headers(self) -> list[tuple[bytes, bytes]]:
        """Headers of every answer."""
        now_s = int(self._clock())
        if now_s != self._date_s:
            self._date_s, self._headers = now_s, [(b"date", formatdate(now_s, usegmt=True).encode())]
        return [*self._headers, CLOSE] if self.is_leaving else self._headers

    @default_headers.setter
    def default_headers(self, headers: object) -> None:
        """Called by ServerState alone, which begins with none."""

    def add(self, connection: Connection) -> bool:
        """Counts a connection, for which another may be closed. Returns False where there is no room for it."""
        address = connection.address
        if len(self.connections) >= self.max_connections and not self._make_room():
            return False
        if self._of_address[address] >= self.max_per_address and not self._make_room(address):
            return False
        self._of_address[address] += 1
        self.connections.add(connection)
        self.idle[connection] = None
        return True

    def discard(self, connection: Connection) -> None:
        """Counts a connection no more, if it was counted."""
        self.idle.pop(connection, None)
        self.waiting.pop(connection, None)
        if connection in self.connections:
            self.connections.discard(connection)
            self._of_address[connection.address] -= 1
            if not self._of_address[connection.address]:
                del self._of_address[connection.address]

    def _make_room(self, address: str | None = None) -> bool:
        """Closes the connection, of `address` where one is given, that gives way; False where none does."""

        def is_of_it(connection: Connection) -> bool:
            return address is None or connection.address == address

        gives_way = next(filter(is_of_it, self.idle), None)
        if gives_way is None:
            gives_way = next(filter(is_of_it, self.waiting), None)
            if gives_way is None or gives_way.loop.time() - self.waiting[gives_way] < CROWDED_TRANSFER_S:
                return False
        gives_way.close_at_once()
        return True
