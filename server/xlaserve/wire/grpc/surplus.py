"""Closes connections of addresses that have too many, which gRPC does not count by address."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections import defaultdict
from contextlib import suppress
from typing import Final

import psutil

from xlaserve.admission.address import network_of
from xlaserve.wire.grpc.port_closing import UNLISTED

LOOK_S: Final = 1.0
"""How often connections are counted, where there are more than one address may have."""

log = logging.getLogger(__name__)


async def close_surplus(port: int, max_per_address: int) -> None:
    """Closes, until it is cancelled, the newest connections to `port` of each address that has too many."""
    process = psutil.Process()
    while True:
        await asyncio.sleep(LOOK_S)
        try:
            if process.num_fds() <= max_per_address:  # far cheaper than to list connections
                continue
            closed = await asyncio.to_thread(close_newest, port, max_per_address)
        except UNLISTED as error:
            log.debug("connections to port %d can't be counted: %s", port, error)
            continue
        if closed:
            log.warning("closed %d connections: max_connections_per_address is %d", closed, max_per_address)


def close_newest(port: int, max_per_address: int) -> int:
    """Closes the newest connections to `port` of each address that has too many; returns how many those are.

    Raises one of UNLISTED.
    """
    of_address: defaultdict[str, list[tuple[int, int, int]]] = defaultdict(list)
    for found in psutil.Process().net_connections("tcp"):
        if found.laddr.port == port and found.status == psutil.CONN_ESTABLISHED:
            with suppress(OSError):  # closed meanwhile
                of_address[network_of(found.raddr.ip)].append(
                    # Sockets get ascending numbers of inodes.
                    (os.fstat(found.fd).st_ino, found.fd, found.raddr.port)
                )
    surplus = [one for connections in of_address.values() for one in sorted(connections)[max_per_address:]]
    for _, fd, client_port in surplus:
        _close(fd, port, client_port)
    return len(surplus)


def _close(fd: int, port: int, client_port: int) -> None:
    """Ends a connection, unless its descriptor is another's by now."""
    with suppress(OSError), socket.fromfd(fd, socket.AF_INET, socket.SOCK_STREAM) as connection:
        if (connection.getsockname()[1:2], connection.getpeername()[1:2]) == ((port,), (client_port,)):
            connection.shutdown(socket.SHUT_RDWR)
