"""Records of the models that a process loads and runs, in memory that another process can read after its end."""

from __future__ import annotations

import mmap
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from hashlib import blake2b
from itertools import count
from struct import Struct
from typing import Any, Final, NamedTuple

from numpy.typing import NDArray

from xlaserve.config import ModelSettings, model_files
from xlaserve.engine.program import Executable, Outputs

KEY_BYTES: Final = 16
STEPS_BYTES: Final = 232
SLOTS: Final = 1024
"""Threads that run batches, and loads, that are recorded; any beyond share the last slot."""
_SLOT: Final = Struct(f"={KEY_BYTES}sQ{STEPS_BYTES}s")
"""A key; the number of the thread that runs the batch, 0 for a load, which several threads work for; its steps."""
_STEPS: Final = KEY_BYTES + 8
"""The offset of the steps in a slot, in bytes."""
_NOTHING: Final = bytes(KEY_BYTES)
_CURRENT: Final = re.compile(r"Current thread 0x([0-9a-f]+)")
"""The line in which `faulthandler` names the thread that a signal came to."""


def key_of(settings: ModelSettings) -> bytes:
    """Returns a fingerprint of a version's settings and of its files as they are now, the same in all processes."""
    files = sorted(model_files.state(settings))
    return blake2b(f"{settings.model_dump_json()} {files}".encode(), digest_size=KEY_BYTES).digest()


def create() -> int:
    """Returns a file in memory for the records of one process. Raises OSError."""
    file = os.memfd_create("xlaserve-under-way", os.MFD_CLOEXEC)
    os.ftruncate(file, SLOTS * _SLOT.size)
    return file


class LoadRecord:
    """A load that is under way, and its steps: on any thread, and several at the same time.

    `free` is called once the record is closed and no step is under way: a thread may go on after its load has ended.
    """

    def __init__(self, memory: mmap.mmap, start: int, free: Callable[[], object]) -> None:
        self._memory = memory
        self._start = start + _STEPS
        self._free = free
        self._steps: list[str] = []
        self._is_closed = False
        self._lock = threading.Lock()
        self.since_s = 0.0
        """Time of the last change of steps, in seconds of the monotonic clock."""

    @property
    def step(self) -> str:
        """The steps that are under way, separated by semicolons."""
        return "; ".join(self._steps)

    @contextmanager
    def at(self, step: str) -> Iterator[None]:
        """Records a step, such as `compiling mode xla, bucket 2x8x8`, for as long as it takes."""
        with self._lock:
            is_recorded = bool(self._steps) or not self._is_closed
            if is_recorded:
                self._steps.append(step)
                self._write()
        try:
            yield
        finally:
            if is_recorded:
                with self._lock:
                    self._steps.remove(step)
                    self._write()

    def close(self) -> None:
        """Ends the record: now, or with the last step that is under way."""
        with self._lock:
            self._is_closed = True
            if not self._steps:
                self._free()

    def _write(self) -> None:
        self.since_s = time.monotonic()
        steps = self.step.encode()[:STEPS_BYTES]
        self._memory[self._start : self._start + STEPS_BYTES] = steps.ljust(STEPS_BYTES, b"\0")
        if self._is_closed and not self._steps:
            self._free()


class UnderWay:
    """Loads and batches that this process has under way, in a `file` of `create`; by default in memory of its own.

    A record takes no system call.
    """

    def __init__(self, file: int = -1) -> None:
        self._memory = mmap.mmap(file, SLOTS * _SLOT.size)
        self._of_thread = threading.local()
        self._next = count()
        self._free: list[int] = []
        """Slots of loads that have ended."""

    def noted(self, key: bytes, executable: Executable) -> Executable:
        """Returns the executable of a version wrapped so that each run is recorded for as long as it takes."""
        memory = self._memory

        def run(*rows: NDArray[Any]) -> Outputs:
            start = self._slot()
            memory[start : start + KEY_BYTES] = key
            try:
                return executable(*rows)
            finally:
                memory[start : start + KEY_BYTES] = _NOTHING

        return run

    @contextmanager
    def loading(self, key: bytes) -> Iterator[LoadRecord]:
        """Records the load of a version until it ends and no step of it is under way any more."""
        try:
            start = self._free.pop()
        except IndexError:
            start = self._take(0)
        self._memory[start : start + KEY_BYTES] = key
        record = LoadRecord(self._memory, start, partial(self._free_slot, start))
        try:
            yield record
        finally:
            record.close()

    def _free_slot(self, start: int) -> None:
        self._memory[start : start + KEY_BYTES] = _NOTHING
        self._free.append(start)

    def _slot(self) -> int:
        """Returns the offset of this thread's slot, in bytes."""
        try:
            start: int = self._of_thread.start
        except AttributeError:
            start = self._of_thread.start = self._take(threading.get_ident())
        return start

    def _take(self, thread: int) -> int:
        """Returns the offset of a new slot, in bytes; the last slot is shared by all threads and loads that find no
        other."""
        start = min(next(self._next), SLOTS - 1) * _SLOT.size
        _SLOT.pack_into(self._memory, start, _NOTHING, thread, b"")
        return start


class Suspect(NamedTuple):
    """A load or batches of a version that were under way when a process ended."""

    is_load: bool
    steps: str = ""
    """Steps of a load, separated by semicolons; empty where no step was under way."""
    is_beside_batches: bool = False
    """Of a load: whether batches of other versions ran as well, any of which may have ended the process."""


def suspects(file: int, last_words: str) -> Mapping[bytes, Suspect]:
    """Returns the versions that may have ended a process, by their keys, from its records in `file`.

    `last_words` is the text that `faulthandler` wrote. If it names the thread of a batch, only the version of that
    batch is a suspect. Otherwise the fault was in a thread of a library: the suspects are the loads, which are rarer
    than batches, or, without any, all batches. Of the loads only those at a step are suspects, where any is: others
    wait.
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
