"""Closes a port and the connections that were made to it, without gRPC's part.

A gRPC server that stops answers CANCELLED to calls that it has received but not handed over, and to those that arrive
before a client sees that it stops. A client whose connection closes gets UNAVAILABLE for each call that has no answer.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import math
import os
import socket
import struct
import termios
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Final

import psutil

from xlaserve.wire.grpc import reuseport

log = logging.getLogger(__name__)

POLL_S: Final = 0.02
PASSED_ON_S: Final = 0.2
"""How long a port is left to others before it is closed: handshakes that have begun end meanwhile."""
MAX_PASSED_ON_S: Final = 2.0
"""How long those that were given to this process may wait for it to accept them."""
UNLISTED: Final = (psutil.Error, OSError)
"""Errors where the system doesn't say which sockets there are."""


async def hang_up(port: int, flush_s: float) -> None:
    """Closes the sockets of this process that listen on `port`, then the connections that were made to it.

    A client that reads slowly has `flush_s` for what was written to it. Where the system doesn't say which sockets
    there are, nothing is closed.
    """
    try:
        close_listeners(port)
        for _ in range(math.ceil(flush_s / POLL_S)):
            if not any(map(_has_unsent, _fds(port, listening=False))):
                break
            await asyncio.sleep(POLL_S)
        close_connections(port)
    except UNLISTED as error:
        log.warning("port %d could not be closed before the server stops: %s", port, error)


async def pass_on(port: int, place: int) -> None:
    """Has the socket at `place` of those that listen on `port` be given its new connections (`reuseport`), and
    returns once none waits to be accepted here. Does nothing where the system can't do that."""
    try:
        with listeners(port) as listening:
            for each in listening:
                reuseport.steer(each, place)
            await asyncio.sleep(PASSED_ON_S)
            for _ in range(math.ceil(MAX_PASSED_ON_S / POLL_S)):
                if not any(map(reuseport.waiting, listening)):
                    break
                await asyncio.sleep(POLL_S)
    except UNLISTED as error:
        log.info("connections that port %d has not accepted may be reset: %s", port, error)


def spread(port: int) -> None:
    """Has connections to `port` be spread over all that listen there again."""
    with suppress(*UNLISTED), listeners(port) as listening:
        for each in listening:
            reuseport.spread(each)


@contextmanager
def listeners(port: int) -> Iterator[list[socket.socket]]:
    """Yields the sockets of this process that listen on `port`. Raises one of UNLISTED."""
    with ExitStack() as stack:
        found = (socket.fromfd(fd, socket.AF_INET, socket.SOCK_STREAM) for fd in _fds(port, listening=True))
        yield [stack.enter_context(each) for each in found]


def close_listeners(port: int) -> None:
    """Closes the sockets of this process that listen on `port`. Raises one of UNLISTED."""
    for fd in _fds(port, listening=True):
        _close_listener(fd, port)


def connections(port: int) -> int:
    """Returns how many connections this process has that were made to `port`. Raises one of UNLISTED."""
    return len(_fds(port, listening=False))


def close_connections(port: int) -> None:
    """Closes the connections that were made to `port`. Raises one of UNLISTED."""
    for fd in _fds(port, listening=False):
        _close_connection(fd, port)


def _fds(port: int, *, listening: bool) -> list[int]:
    return [
        found.fd
        for found in psutil.Process().net_connections("tcp")
        if found.laddr.port == port and (found.status == psutil.CONN_LISTEN) == listening
    ]


def _close_listener(fd: int, port: int) -> None:
    """Puts a socket that nobody can reach in its place: gRPC would log that the one that it knows was closed."""
    with suppress(OSError), socket.fromfd(fd, socket.AF_INET, socket.SOCK_STREAM) as listener:
        if _is_bound(listener, port) and listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            with socket.socket() as stand_in:
                os.dup2(stand_in.fileno(), fd, inheritable=False)


def _has_unsent(fd: int) -> bool:
    try:
        (size_bytes,) = struct.unpack("i", fcntl.ioctl(fd, termios.TIOCOUTQ, bytes(4)))
    except OSError:  # closed meanwhile
        return False
    return bool(size_bytes)


def _close_connection(fd: int, port: int) -> None:
    """Ends it after what was written; gRPC, which owns the descriptor, learns of it as if the client had done it."""
    with suppress(OSError), socket.fromfd(fd, socket.AF_INET, socket.SOCK_STREAM) as connection:
        if _is_bound(connection, port):
            connection.shutdown(socket.SHUT_RDWR)


def _is_bound(found: socket.socket, port: int) -> bool:
    """Whether a descriptor is still what it was: gRPC may have closed it, and its number be something else's."""
    return bool(found.getsockname()[1:2] == (port,))
