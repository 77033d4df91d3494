"""Ports that the supervisor of a server reserves, so that its fronts, and nobody else, can listen there."""

from __future__ import annotations

import errno
import socket
from contextlib import ExitStack
from typing import Final

from xlaserve.config import Settings
from xlaserve.processes.handover import Predecessor
from xlaserve.telemetry.http import taken_port, unknown_host

PORTS: Final = ("grpc_port", "http_port")


def reserve_all(settings: Settings, before: Predecessor | None, stack: ExitStack) -> dict[str, int]:
    """Reserves the ports of gRPC and HTTP, and returns them by the names of their settings. Raises ConfigError.

    A port of the server `before` is taken over, unless the configuration says another one by now.
    """
    ports = {}
    for name in PORTS:
        wanted: int = getattr(settings, name)
        is_taken_over = before is not None and wanted in (0, before.ports[name])
        port = before.ports[name] if before is not None and is_taken_over else wanted
        ports[name] = reserve(name, settings.host, port, stack, is_taken_over=is_taken_over)
    return ports


def reserve(name: str, host: str, port: int, stack: ExitStack, *, is_taken_over: bool = False) -> int:
    """Reserves a port of all addresses of `host`, with SO_REUSEPORT for fronts, and returns it. Raises ConfigError.

    `name` is the name of its setting; port 0 stands for any free port. No other process may have the port, unless it
    `is_taken_over`. The supervisor does not listen: connections go to fronts, or are refused when there is none.
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
