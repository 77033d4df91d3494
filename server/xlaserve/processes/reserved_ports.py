"""Ports that a server of several processes holds, and where its fronts listen."""

from __future__ import annotations

import errno
import socket
from contextlib import ExitStack

from xlaserve.telemetry.http import taken_port, unknown_host


def reserve(name: str, host: str, port: int, stack: ExitStack, *, is_taken_over: bool = False) -> int:
    """Takes a port of all addresses of `host`, where fronts may listen too, and returns it. Raises ConfigError.

    `name` is that of its setting; 0 stands for any port. Nobody else may have it, unless it `is_taken_over`. Nobody
    listens here: a connection meets a front, or is refused where there is none.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError) as error:
        raise unknown_host(host, error) from None
    for family, address in dict.fromkeys((family, address[0]) for family, _, _, _, address in found):
        try:
            if not is_taken_over:
                with _bound(family, address, port, is_shared=False) as alone:  # fails where anybody else has it
                    port = alone.getsockname()[1]
            stack.enter_context(_bound(family, address, port, is_shared=True))
        except OSError as error:
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                raise taken_port(name, host, port, error) from None
    return port


def _bound(family: int, address: str | int, port: int, *, is_shared: bool) -> socket.socket:
    one = socket.socket(family, socket.SOCK_STREAM)
    try:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        if is_shared:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        one.bind((address, port))
    except OSError:
        one.close()
        raise
    return one
