"""Which models a process loads or runs at this moment, where another process can read that after its end."""

from __future__ import annotations

import mmap
import os
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from hashlib import blake2b
from itertools import count
from struct import Struct
from typing import Final, NamedTuple

from xlaserve.config import ModelSettings, model_files
from xlaserve.engine.program import Executable, Images, Outputs

KEY_BYTES: Final = 16
STEPS_BYTES: Final = 232
SLOTS: Final = 1024
"""Threads that run batches, and loads; of more, nothing is noted."""
_SLOT: Final = Struct(f"={KEY_BYTES}sQ{STEPS_BYTES}s")
"""A key; the number of the thread that runs the batch, 0 for a load, which several threads work for; its steps."""
_STEPS: Final = KEY_BYTES + 8
"""Where the steps begin."""
_NOTHING: Final = bytes(KEY_BYTES)
_CURRENT: Final = re.compile(r"Current thread 0x([0-9a-f]+)")
"""As `faulthandler` names the thread that a signal came to."""


def key_of(settings: ModelSettings) -> bytes:
    """Returns what names a version with these settings, and its files as they are now, in all processes."""
    files = sorted(model_files.state(settings))
    return blake2b(f"{settings.model_dump_json()} {files}".encode(), digest_size=KEY_BYTES).digest()


def create() -> int:
    """Returns a file in memory for what one process has under way. Raises OSError."""
    file = os.memfd_create("xlaserve-under-way", os.MFD_CLOEXEC)
    os.ftruncate(file, SLOTS * _SLOT.size)
    return file


class Load:
    """A load that is under way, and its steps: on any thread, and several at the same time."""

    def __init__(self, memory: mmap.mmap, start: int) -> None:
        self._memory = memory
        self._start = start + _STEPS
        self._steps: list[str] = []
        self._lock = threading.Lock()

    @contextmanager
    def at(self, step: str) -> Iterator[None]:
        """Notes a step, such as `compiling mode xla, bucket 2x8x8`, for as long as it takes."""
        with self._lock:
            self._steps.append(step)
            self._write()
        try:
            yield
        finally:
            with self._lock:
                self._steps.remove(step)
                self._write()

    def _write(self) -> None:
        steps = "; ".join(self._steps).encode()[:STEPS_BYTES]
        self._memory[self._start : self._start + STEPS_BYTES] = steps.ljust(STEPS_BYTES, b"\0")


class UnderWay:
    """Loads and batches that this process has under way, in a `file` of `create`; by default where nobody reads it.

    Noting it takes no system call.
    """

    def __init__(self, file: int = -1) -> None:
        self._memory = mmap.mmap(file, SLOTS * _SLOT.size)
        self._of_thread = threading.local()
        self._next = count()
        self._free: list[int] = []
        """Slots of loads that have ended."""

    def noted(self, key: bytes, executable: Executable) -> Executable:
        """Returns the executable of a version, which is noted for as long as it runs."""
        memory = self._memory

        def run(images: Images) -> Outputs:
            start = self._slot()
            memory[start : start + KEY_BYTES] = key
            try:
                return executable(images)
            finally:
                memory[start : start + KEY_BYTES] = _NOTHING

        return run

    @contextmanager
    def loading(self, key: bytes) -> Iterator[Load]:
        """Notes that a version is loaded."""
        try:
            start = self._free.pop()
        except IndexError:
            start = self._take(0)
        self._memory[start : start + KEY_BYTES] = key
        try:
            yield Load(self._memory, start)
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
        _SLOT.pack_into(self._memory, start, _NOTHING, thread, b"")
        return start


class Suspect(NamedTuple):
    """A load or batches of a version that were under way when a process ended."""

    is_load: bool
    steps: str = ""
    """Of a load, separated by semicolons; empty where none was under way."""
    is_beside_batches: bool = False
    """Of a load: whether batches of other versions ran as well, any of which may be what has ended the process."""


def suspects(file: int, last_words: str) -> Mapping[bytes, Suspect]:
    """Returns, by their keys, those that may have ended a process, which had noted them in `file`.

    `last_words` are what `faulthandler` wrote. If they name the thread of a batch, it is the model of that batch alone:
    what ran beside it is innocent. Else, the fault was in a thread of a library: it is what was loaded, which is rarer
    than batches, or all that ran. Of loads it is those at a step, where any is: the others wait.
    """
    slots = [*_SLOT.iter_unpack(os.pread(file, SLOTS * _SLOT.size, 0))]
    noted = [
        (key, thread, Suspect(not thread, steps.rstrip(b"\0").decode(errors="ignore")))
        for key, thread, steps in slots
        if key != _NOTHING
    ]
    current = _CURRENT.search(last_words)
    for key, thread, suspect in noted:
        if current is not None and thread == int(current[1], 16):
            return {key: suspect}
    loads = {key: suspect for key, _, suspect in noted if suspect.is_load}
    if any(key not in loads for key, _, _ in noted):
        loads = {key: suspect._replace(is_beside_batches=True) for key, suspect in loads.items()}
    at_steps = {key: suspect for key, suspect in loads.items() if suspect.steps}
    return at_steps or loads or {key: suspect for key, _, suspect in noted}
