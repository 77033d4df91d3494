"""The guard of the process's memory: closes connections that go on sending while it is above `max_resident_bytes`.

gRPC's core keeps the headers of a call without a bound until they are complete, and some 130 MiB of them for each
connection. It tells neither how much it keeps nor for whom.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread
from typing import Final, NamedTuple

import psutil

from xlaserve.engine.memory import trim_heap
from xlaserve.wire.grpc.port_closing import UNLISTED

LOOK_S: Final = 0.05
"""Seconds between looks at the process's memory: within this time one connection may take some 20 MiB."""
LOOKS: Final = 200
RISE_BYTES: Final = 128 * 2**20
"""Connections are closed only where the process takes so much more than at the least of the last `LOOKS` looks: else it
is not they that fill the memory."""
TRIM_LOOKS: Final = 20
TRIMS: Final = 5
"""After connections were closed, freed memory is given back so many times, so many looks apart: gRPC goes on to take in
what has arrived, and the C library would keep what it frees."""
RECEIVED_BYTES: Final = 64 * 1024
"""Least bytes between two looks from a connection that is taken to fill the memory."""
_RECEIVED: Final = struct.Struct("=Q")
_RECEIVED_AT: Final = 128
"""Offset of `tcpi_bytes_received` in Linux's `struct tcp_info`."""
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")

log = logging.getLogger(__name__)


class Client(NamedTuple):
    """A connection, by what no other one has at the same time."""

    inode: int
    descriptor: int
    port: int
    """The client's port."""


class MemoryGuard:
    """Looks at the process's memory, and closes connections to `port` that send much while it is above its bound.

    `max_bytes` returns the bound of the process's resident memory, `resident` the bytes that it takes now. `received`
    returns the bytes that each connection has sent, and `close` closes one.
    """

    def __init__(
        self,
        max_bytes: Callable[[], int],
        received: Callable[[], Mapping[Client, int]],
        close: Callable[[Client], object],
        resident: Callable[[], int] | None = None,
        trim: Callable[[], object] = trim_heap,
    ) -> None:
        self._max_bytes = max_bytes
        self._received = received
        self._close = close
        self._resident = resident or resident_bytes
        self._trim = trim
        self._last: Mapping[Client, int] | None = None
        """Bytes that each connection had sent at the last look; None while there is memory."""
        self._looks_with_trims = 0
        """Looks that are left in which freed memory is given back."""
        self._is_over = Event()
        self._taken: deque[int] = deque(maxlen=LOOKS)

    def follow(self) -> None:
        """Looks from now on, on a thread of its own: the event loop may be busy just then."""
        Thread(target=self._follow, name="memory guard", daemon=True).start()

    def stop(self) -> None:
        """Ends its thread soon."""
        self._is_over.set()

    def look(self) -> int:
        """Closes what fills the memory now, and returns how many connections that are."""
        if self._looks_with_trims:
            self._looks_with_trims -= 1
            if self._looks_with_trims % TRIM_LOOKS == 0:
                self._trim()
        taken = self._resident()
        self._taken.append(taken)
        if taken < max(self._max_bytes(), min(self._taken) + RISE_BYTES):
            self._last = None
            return 0
        last, self._last = self._last, self._received()
        if last is None:
            return 0
        filling = [one for one, sent in self._last.items() if sent - last.get(one, 0) >= RECEIVED_BYTES]
        for one in filling:
            self._close(one)
        if filling:
            log.warning(
                "closed %d connections that sent much while the process took %d MiB, more than max_resident_bytes",
                len(filling),
                taken >> 20,
            )
            self._looks_with_trims = TRIMS * TRIM_LOOKS
        return len(filling)

    def _follow(self) -> None:
        while not self._is_over.wait(LOOK_S):
            try:
                self.look()
            except UNLISTED as error:
                log.debug("connections can't be counted: %s", error)
            except Exception:
                log.exception("a look at the memory failed")


def resident_bytes() -> int:
    """Returns the process's resident size. Takes some microseconds. Raises OSError off Linux."""
    return int(Path("/proc/self/statm").read_bytes().split()[1]) * _PAGE_BYTES


def received_by(port: int) -> Mapping[Client, int]:
    """Returns the bytes that each connection to `port` has sent. Raises one of UNLISTED."""
    found = {}
    for each in psutil.Process().net_connections("tcp"):
        if each.laddr.port == port and each.status == psutil.CONN_ESTABLISHED:
            with suppress(OSError), socket.fromfd(each.fd, socket.AF_INET, socket.SOCK_STREAM) as connection:
                told = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                (sent,) = _RECEIVED.unpack_from(told, _RECEIVED_AT)
                found[Client(os.fstat(each.fd).st_ino, each.fd, each.raddr.port)] = sent
    return found
