"""How much of the host's memory something takes, as Linux counts it for this process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

Made = TypeVar("Made")

_PROCESS: Final = Path("/proc/self")
_RESET_PEAK: Final = "5"


class Taken(NamedTuple):
    """Bytes that `measure` saw."""

    held_bytes: int
    """Still taken afterwards."""
    run_bytes: int
    """Taken besides, at the worst moment."""


def measure(make: Callable[[], Made], process: Path = _PROCESS) -> tuple[Made, Taken]:
    """Returns what `make` returns, and how the process's resident memory grew meanwhile. Raises OSError off Linux.

    The process's other threads count as well: it is a measurement for the time before traffic.
    """
    (process / "clear_refs").write_text(_RESET_PEAK)
    before = _resident_bytes(process, "VmRSS")
    made = make()
    after, peak = _resident_bytes(process, "VmRSS"), _resident_bytes(process, "VmHWM")
    return made, Taken(max(0, after - before), max(0, peak - max(before, after)))


def _resident_bytes(process: Path, field: str) -> int:
    for line in (process / "status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024  # "kB"
    raise OSError(f"{field} is unknown")
