"""How a process shows its supervisor that its event loop goes on: a count in memory that both can read.

Not a message: that would have to wait for others, and for a thread.
"""

from __future__ import annotations

import mmap
import os
import sys
from typing import Final

PULSE: Final = "xlaserve.pulse"
"""The descriptor of the file, beside those of a role."""
BEAT_S: Final = 1.0
"""How often an event loop counts."""
COUNT_BYTES: Final = 8
"""Processors read and write an aligned word of this size as a whole."""


def create() -> int:
    """Returns a file in memory for the count of one process. Raises OSError."""
    file = os.memfd_create("xlaserve-pulse", os.MFD_CLOEXEC)
    os.ftruncate(file, COUNT_BYTES)
    return file


def beats(file: int) -> int:
    """Returns how often the process has counted."""
    return int.from_bytes(os.pread(file, COUNT_BYTES, 0), sys.byteorder)


class Pulse:
    """The count in `file`, for the process that counts."""

    def __init__(self, file: int) -> None:
        self._count = memoryview(mmap.mmap(file, COUNT_BYTES)).cast("Q")

    def beat(self) -> None:
        """Counts."""
        self._count[0] += 1
