"""CPU time and memory of the processes of a server."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

import psutil

SUPERVISOR: Final = "supervisor"
"""The role of the process that starts the others."""
CHILDREN: Final = "/proc/{0}/task/{0}/children"
"""The kernel's list of a process's children, which is cheaper than a scan of all processes of the machine."""


class ProcessUsage(NamedTuple):
    """CPU time and memory of one process."""

    role: str
    """The process's role; empty for a server of one process."""
    pid: int
    cpu_s: float
    """Processor time since its start."""
    resident_bytes: int
    """Resident memory, pages that it shares with other processes included."""


def process_usage(supervisor: int | None = None) -> list[ProcessUsage]:
    """Returns the usage of the process `supervisor` and of its children; without it, of this process alone."""
    if supervisor is None:
        return [*_usage([(os.getpid(), "")])]
    return [*_usage([(supervisor, SUPERVISOR), *((child, None) for child in _children(supervisor))])]


def _usage(processes: Iterable[tuple[int, str | None]]) -> Iterator[ProcessUsage]:
    """Yields the usage of each process that still runs. Where the role is None, the process's name is its role."""
    for pid, role in processes:
        with suppress(psutil.Error):
            process = psutil.Process(pid)
            with process.oneshot():
                times, memory = process.cpu_times(), process.memory_info()
                name = process.name() if role is None else role
            yield ProcessUsage(name, pid, times.user + times.system, memory.rss)


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(CHILDREN.format(pid)).read_text().split()]
    except OSError:  # a kernel without such a list, or the process has ended
        with suppress(psutil.Error):
            return [child.pid for child in psutil.Process(pid).children()]
        return []
