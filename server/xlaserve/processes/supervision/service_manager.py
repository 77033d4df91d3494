"""Tells the service manager how the server is: systemd, or whatever else speaks the protocol of sd_notify(3)."""

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

    Nothing here raises: a server serves, whether or not somebody listens. While it `is_silent` nothing is said: the
    service manager listens to another process. `channel` leads to a process that passes on what is sent there.
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
        """Shows `status`, one line for people."""
        self._send(f"STATUS={status}")

    def tell_ready(self, status: str) -> None:
        """Says that start-up or a reload has finished."""
        self._send("READY=1", f"STATUS={status}")

    def tell_reloading(self) -> None:
        """Says that the configuration is being read again; `tell_ready` ends it."""
        self._send("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}", "STATUS=reloading")

    def tell_restarting(self) -> None:
        """Says that the server starts again after a crash, and needs some time until it says that it is alive."""
        self._send("WATCHDOG=1", "STATUS=starting again after a crash")

    def tell_stopping(self) -> None:
        """Says that the server will end."""
        self._send("STOPPING=1", "STATUS=stopping")

    def tell_main(self, pid: int) -> None:
        """Has it take process `pid` for the service from now on."""
        self._send(f"MAINPID={pid}")
        self.is_silent = True

    async def watch(self) -> None:
        """Says that the event loop is alive, for ever, twice as often as the service manager wants to hear it."""
        if self._socket is None or self._watchdog_s is None:
            return
        while True:
            self._send("WATCHDOG=1")
            await asyncio.sleep(self._watchdog_s / 2)

    def close(self) -> None:
        """Says nothing more."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _send(self, *lines: str) -> None:
        if self._socket is None or self.is_silent:
            return
        try:
            self._socket.send("\n".join(lines).encode())
        except OSError as error:  # it does not listen any more, or does not keep up
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
    """Returns within what time the service manager wants to hear of this process."""
    period_us, pid = environment.get(WATCHDOG_US, ""), environment.get(WATCHDOG_PID, "")
    if not period_us.isdecimal() or int(period_us) == 0 or pid not in ("", str(os.getpid())):
        return None
    return int(period_us) / 1_000_000
