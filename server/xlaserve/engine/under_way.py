"""Which models a process loads or runs at this moment, where its supervisor can read that after its end."""

from __future__ import annotations

import mmap
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from itertools import count
from struct import Struct
from typing import Final

from xlaserve.config import ModelSettings
from xlaserve.engine.program import Executable, Images, Outputs

KEY_BYTES: Final = 16
SLOTS: Final = 1024
"""Threads that run batches, and loads; of more, nothing is noted."""
_SLOT: Final = Struct(f"={KEY_BYTES}sQ")
"""A key, and the number of the thread that runs the batch: 0 for a load, which several threads work for."""
_NOTHING: Final = bytes(KEY_BYTES)
_CURRENT: Final = re.compile(r"Current thread 0x([0-9a-f]+)")
"""As `faulthandler` names the thread that a signal came to."""


def key_of(settings: ModelSettings) -> bytes:
    """Returns what names a version with these settings in all processes."""
    return blake2b(settings.model_dump_json().encode(), digest_size=KEY_BYTES).digest()


def create() -> int:
    """Returns a file in memory for what one process has under way. Raises OSError."""
    file = os.memfd_create("xlaserve-under-way", os.MFD_CLOEXEC)
    os.ftruncate(file, SLOTS * _SLOT.size)
    return file


class UnderWay:
    """What this process has under way, in a `file` of `create`. Noting it takes no system call."""

    def __init__(self, file: int) -> None:
        self._memory = mmap.mmap(file, SLOTS * _SLOT.size)
        self._of_thread = threading.local()
        self._next = count()
        self._free: list[int] = []
        """Slots of loads that have ended."""

    def noted(self, settings: ModelSettings, executable: Executable) -> Executable:
        """Returns the executable of a version, which is noted for as long as it runs."""
        key, memory = key_of(settings), self._memory

        def run(images: Images) -> Outputs:
            start = self._slot()
            memory[start : start + KEY_BYTES] = key
            try:
                return executable(images)
            finally:
                memory[start : start + KEY_BYTES] = _NOTHING

        return run

    @contextmanager
    def loading(self, settings: ModelSettings) -> Iterator[None]:
        """Notes that a version is loaded."""
        try:
            start = self._free.pop()
        except IndexError:
            start = self._take(0)
        self._memory[start : start + KEY_BYTES] = key_of(settings)
        try:
            yield
        finally:
            self._memory[start : start + KEY_BYTES] = _NOTHING
            self._free.append(start)

    def _slot(self) -> int:
        """Returns where this thread notes what it runs."""
        try:
            start: int = self._of_thread.start
        except AttributeError:
            start = self._of_thread.start = self._take(threading.get_ident())
        return start

    def _take(self, thread: int) -> int:
        """Returns where a new slot begins; the last one is for all that find no other."""
        start = min(next(self._next), SLOTS - 1) * _SLOT.size
        _SLOT.pack_into(self._memory, start, _NOTHING, thread)
        return start


def suspects(file: int, last_words: str) -> frozenset[bytes]:
    """Returns the keys of those that may have ended a process, which had noted them in `file`.

    `last_words` are what `faulthandler` wrote. If they name the thread of a batch, it is the model of that batch alone:
    what ran beside it is innocent. Else, the fault was in a thread of a library: it is what was loaded, which is rarer
    than batches, or all that ran.
    """
    slots = [*_SLOT.iter_unpack(os.pread(file, SLOTS * _SLOT.size, 0))]
    noted = [(key, thread) for key, thread in slots if key != _NOTHING]
    current = _CURRENT.search(last_words)
    for key, thread in noted:
        if current is not None and thread == int(current[1], 16):
            return frozenset({key})
    return frozenset(key for key, thread in noted if not thread) or frozenset(key for key, _ in noted)
