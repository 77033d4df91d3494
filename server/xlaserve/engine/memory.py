"""The host's memory: the part that this process takes, as Linux counts it, and the part that it may take."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

import psutil

from xlaserve.engine import control_groups

Made = TypeVar("Made")

_PROCESS: Final = Path("/proc/self")
_RESET_PEAK: Final = "5"
# From glibc's <malloc.h>.
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_REUSED_BYTES: Final = 32 * 1024 * 1024
_KEPT_BYTES: Final = 4 * _REUSED_BYTES


class Taken(NamedTuple):
    """Bytes by which `measure` saw the process grow."""

    held_bytes: int
    """Memory that was still taken afterwards."""
    run_bytes: int
    """Further memory, at the worst moment."""


def measure(make: Callable[[], Made], process: Path = _PROCESS) -> tuple[Made, Taken]:
    """Returns the result of `make`, and the growth of the process's resident memory meanwhile. Raises OSError off
    Linux.

    The process's other threads count as well: it is a measurement for the time before traffic.
    """
    forget_peak(process)
    before = resident_bytes(process)
    made = make()
    after, peak = resident_bytes(process), peak_bytes(process)
    return made, Taken(max(0, after - before), max(0, peak - max(before, after)))


def forget_peak(process: Path = _PROCESS) -> None:
    """Resets the largest resident size that the kernel measures (proc(5), clear_refs). Raises OSError if it can't."""
    (process / "clear_refs").write_text(_RESET_PEAK)


def resident_bytes(process: Path = _PROCESS) -> int:
    """Returns the process's resident size. Raises OSError off Linux."""
    return _status_bytes(process, "VmRSS")


def own_bytes(process: Path = _PROCESS) -> int:
    """Returns the part of the resident size that is not shared memory. Raises OSError off Linux."""
    return resident_bytes(process) - _status_bytes(process, "RssShmem")


def peak_bytes(process: Path = _PROCESS) -> int:
    """Returns the process's largest resident size since `forget_peak`. Raises OSError off Linux."""
    return _status_bytes(process, "VmHWM")


def keep_freed_memory() -> None:
    """Has glibc keep some freed memory for the next large message, unless the environment sets its options.

    gRPC copies a message twice on the event loop. Into memory that is new to the process each copy takes several times
    as long, most of it for page faults.
    """
    if any(name in os.environ for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")):
        return
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        mallopt(_M_MMAP_THRESHOLD, _REUSED_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


def machine_memory_bytes() -> int:
    """Returns the memory of the machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def usable_memory_bytes(root: Path = control_groups.ROOT) -> int:
    """Returns the memory that the process may take: the machine's, or the limit of its control groups if that is
    less."""
    return min([machine_memory_bytes(), *(limit.limit_bytes for limit in control_groups.memory_limits(root))])


def available_memory_bytes(root: Path = control_groups.ROOT) -> int:
    """Returns the part of `usable_memory_bytes` that neither this process nor others take."""
    limits = control_groups.memory_limits(root)
    return min([psutil.virtual_memory().available, *(limit.limit_bytes - limit.taken_bytes for limit in limits)])


def _status_bytes(process: Path, field: str) -> int:
    for line in (process / "status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024  # "kB"
    raise OSError(f"{field} is unknown")
