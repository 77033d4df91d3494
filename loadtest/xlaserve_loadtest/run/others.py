"""Processor time of this machine that neither the load test nor its server used: it is lost to both.

Interrupts are left out, as they are largely the network traffic of the load itself.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Final

import psutil

from xlaserve_loadtest.addresses import Address

_RESOLUTION_S: Final = 0.05
"""Processor seconds below which nothing is told apart: the system counts in ticks of 10 ms, for each process."""


class Others:
    """Measures from its creation on. `server` is the id of the server's process; None where it is elsewhere."""

    def __init__(self, server: int | None = None) -> None:
        self._server = server
        self._before = self._look()

    def share(self) -> float | None:
        """Returns the share of the machine's processor time that others used; None where the system can't tell."""
        (all_s, busy_s, own_s), (all_before_s, busy_before_s, own_before_s) = self._look(), self._before
        if all_s <= all_before_s:
            return None
        others_s = busy_s - busy_before_s - (own_s - own_before_s)
        return others_s / (all_s - all_before_s) if others_s > _RESOLUTION_S else 0.0

    def _look(self) -> tuple[float, float, float]:
        """Returns the machine's processor seconds so far: all, those used by processes, and those of ours."""
        machine = psutil.cpu_times()
        # Those of guests are in `user` and `nice` already.
        guests_s = getattr(machine, "guest", 0.0) + getattr(machine, "guest_nice", 0.0)
        busy_s = machine.user + machine.system + getattr(machine, "nice", 0.0)
        return sum(machine) - guests_s, busy_s, sum(map(_used_s, self._own()))

    def _own(self) -> Iterable[psutil.Process]:
        own: dict[int, psutil.Process] = {}
        for root in filter(None, (_process(os.getpid()), _topmost(self._server))):
            with suppress(psutil.Error):
                own |= {process.pid: process for process in (root, *root.children(recursive=True))}
        return own.values()


def is_here(address: str) -> bool:
    """Whether an address is one of this machine. Looks up names, and may take a while."""
    parsed = Address.parse(address)
    if parsed.is_loopback:
        return True
    own = {one.address.partition("%")[0] for each in psutil.net_if_addrs().values() for one in each}
    with suppress(OSError):
        return any(str(found[4][0]) in own for found in socket.getaddrinfo(parsed.host, parsed.port))
    return False


def _topmost(pid: int | None) -> psutil.Process | None:
    """Returns the process that started a server of several processes, of which the one that listens is a part."""
    process = None if pid is None else _process(pid)
    with suppress(psutil.Error, OSError):
        while process is not None and (parent := process.parent()) is not None and _is_part(process, parent):
            process = parent
    return process


def _is_part(process: psutil.Process, parent: psutil.Process) -> bool:
    return process.exe() == parent.exe() and os.getsid(process.pid) == os.getsid(parent.pid)


def _process(pid: int) -> psutil.Process | None:
    with suppress(psutil.Error):
        return psutil.Process(pid)
    return None


def _used_s(process: psutil.Process) -> float:
    """Returns the processor seconds of a process so far, those of its ended children included."""
    with suppress(psutil.Error):
        times: Any = process.cpu_times()
        return float(times.user + times.system + times.children_user + times.children_system)
    return 0.0
