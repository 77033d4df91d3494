"""The pulse of a process, by which its supervisor sees that its event loop runs: a count in shared memory.

Not a message: a message would have to wait for others, and for a thread.
"""

from __future__ import annotations

import mmap
import os
import sys
from typing import Final

PULSE: Final = "xlaserve.pulse"
"""The name of the file's descriptor, beside the descriptors of a role."""
BEAT_S: Final = 1.0
"""How often an event loop counts."""
COUNT_BYTES: Final = 8
"""Processors read and write an aligned word of this size as a whole."""


def create() -> int:
    """Returns the descriptor of a file in memory for the count of one process. Raises OSError."""
    file = os.memfd_create("xlaserve-pulse", os.MFD_CLOEXEC)
    os.ftruncate(file, COUNT_BYTES)
    return file


def beats(file: int) -> int:
    """Returns the count in a file."""
    return int.from_bytes(os.pread(file, COUNT_BYTES, 0), sys.byteorder)


class Pulse:
    """The count in `file`, seen from the process that counts."""

    def __init__(self, file: int) -> None:
        self._count = memoryview(mmap.mmap(file, COUNT_BYTES)).cast("Q")

    def beat(self) -> None:
        """Adds one to the count."""
        self._count[0] += 1
