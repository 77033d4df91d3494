"""The service manager, which is told how the server is: systemd, or any other with the protocol of sd_notify(3)."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Mapping
from typing import Final

log = logging.getLogger(__name__)

ADDRESS: Final = "NOTIFY_SOCKET"
WATCHDOG_US: Final = "WATCHDOG_USEC"
WATCHDOG_PID: Final = "WATCHDOG_PID"


class ServiceManager:
    """The service manager that `environment` names; without one every method does nothing.

    Nothing here raises: a server serves whether or not its messages arrive. While `is_silent` none is sent: the service
    manager accepts them from another process. `channel` leads to a process that passes messages on.
    """

    def __init__(
        self,
        environment: Mapping[str, str] = os.environ,
        *,
        is_silent: bool = False,
        channel: socket.socket | None = None,
    ) -> None:
        self.is_silent = is_silent
        if channel is not None:
            channel.setblocking(False)
        self._socket = _connect(environment.get(ADDRESS, "")) if channel is None else channel
        self._watchdog_s = _watchdog_s(environment)

    def tell_status(self, status: str) -> None:
        """Sends `status`, one line for people."""
        self._send(f"STATUS={status}")

    def tell_ready(self, status: str) -> None:
        """Tells that start-up or a reload has finished."""
        self._send("READY=1", f"STATUS={status}")

    def tell_reloading(self) -> None:
        """Tells that the configuration is being read again, until `tell_ready`."""
        self._send("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}", "STATUS=reloading")

    def tell_restarting(self) -> None:
        """Tells that the server starts again after a crash, which takes some time until the next sign of life."""
        self._send("WATCHDOG=1", "STATUS=starting again after a crash")

    def tell_stopping(self) -> None:
        """Tells that the server will end."""
        self._send("STOPPING=1", "STATUS=stopping")

    def tell_main(self, pid: int) -> None:
        """Tells that the service is process `pid` from now on. This process sends nothing more."""
        self._send(f"MAINPID={pid}")
        self.is_silent = True

    async def watch(self) -> None:
        """Tells that the event loop is alive, twice in the time that the service manager allows, for ever."""
        if self._socket is None or self._watchdog_s is None:
            return
        while True:
            self._send("WATCHDOG=1")
            await asyncio.sleep(self._watchdog_s / 2)

    def close(self) -> None:
        """Closes the socket: nothing more is sent."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _send(self, *lines: str) -> None:
        if self._socket is None or self.is_silent:
            return
        try:
            self._socket.send("\n".join(lines).encode())
        except OSError as error:  # the service manager receives no more, or does not keep up
            log.warning("the service manager was not told %s: %s", lines[0], error.strerror)


def _connect(address: str) -> socket.socket | None:
    if not address:
        return None
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    connected.setblocking(False)
    try:
        # "@" stands for the zero byte that abstract addresses begin with.
        connected.connect(f"\0{address[1:]}" if address.startswith("@") else address)
    except (OSError, ValueError) as error:
        connected.close()
        log.warning("%s: expected the address of a socket that listens, got %s: %s", ADDRESS, address, error)
        return None
    return connected


def _watchdog_s(environment: Mapping[str, str]) -> float | None:
    """Returns the time within which the service manager wants a sign of life of this process; None for no limit."""
    period_us, pid = environment.get(WATCHDOG_US, ""), environment.get(WATCHDOG_PID, "")
    if not period_us.isdecimal() or int(period_us) == 0 or pid not in ("", str(os.getpid())):
        return None
    return int(period_us) / 1_000_000
