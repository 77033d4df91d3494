"""What the processes of a server take of the machine."""

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
"""Where the kernel lists them, so that nobody has to look at all processes of the machine."""


class Taken(NamedTuple):
    """What one process takes."""

    role: str
    """Empty for a server that is one process."""
    pid: int
    cpu_s: float
    """Processor time since its start."""
    resident_bytes: int
    """Memory, with all that it shares with others."""


def taken(supervisor: int | None = None) -> list[Taken]:
    """Returns what `supervisor` and each process takes that it has started; by default, what this process takes."""
    if supervisor is None:
        return [*_taken([(os.getpid(), "")])]
    return [*_taken([(supervisor, SUPERVISOR), *((child, None) for child in _children(supervisor))])]


def _taken(processes: Iterable[tuple[int, str | None]]) -> Iterator[Taken]:
    """Yields what each takes that has not ended; one whose role is not told has it as its name."""
    for pid, role in processes:
        with suppress(psutil.Error):
            process = psutil.Process(pid)
            with process.oneshot():
                times, memory = process.cpu_times(), process.memory_info()
                name = process.name() if role is None else role
            yield Taken(name, pid, times.user + times.system, memory.rss)


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(CHILDREN.format(pid)).read_text().split()]
    except OSError:  # a kernel without such a list, or the process has ended
        with suppress(psutil.Error):
            return [child.pid for child in psutil.Process(pid).children()]
        return []
