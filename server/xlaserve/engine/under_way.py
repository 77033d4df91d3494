"""Records of the models that a process loads and runs, in memory that another process can read after its end."""

from __future__ import annotations

import mmap
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
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
TITLE_BYTES: Final = 127
STEPS_BYTES: Final = 232
SLOTS: Final = 512
"""Threads that run batches, and loads, that are recorded; any beyond share the last slot."""
_SLOT: Final = Struct(f"={KEY_BYTES}s{TITLE_BYTES}s{STEPS_BYTES}s?Q")
"""A key; the title of the version; the steps of a load, or the program of a batch; whether the batch is taken to never
end; the number of the thread that runs the batch, 0 for a load, which several threads work for."""
_STEPS: Final = KEY_BYTES + TITLE_BYTES
"""The offset of the steps in a slot, in bytes."""
_IS_ENDLESS: Final = _STEPS + STEPS_BYTES
"""The offset of the mark of an endless batch in a slot, in bytes."""
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


class NotedProgram(NamedTuple):
    """A program whose runs are recorded."""

    title: str
    """The name of the version in messages."""
    program: str
    """Its mode and bucket in messages."""
    cost_s: float
    """Time that a run takes while all lanes are busy, as warm-up measured it."""


class BatchRun(NamedTuple):
    """A run of a program that is under way; each has another `number`."""

    noted: NotedProgram
    number: int
    thread: int
    """Number of the thread that runs it, as `threading.get_ident` tells."""
    start: int
    """Offset of its slot, in bytes."""


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
        self._memory[self._start : self._start + STEPS_BYTES] = _fixed(self.step, STEPS_BYTES)
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
        self._running: dict[int, tuple[NotedProgram, int]] = {}
        """Runs that are under way, by their slots, each with a number of its own."""
        self._runs = count()

    def noted(
        self, key: bytes, title: str, executable: Executable, program: str = "", cost_s: float = 0.0
    ) -> Executable:
        """Returns the executable of a version wrapped so that each run is recorded for as long as it takes.

        `title`, `program` and `cost_s` are those of `NotedProgram`.
        """
        memory, running, runs = self._memory, self._running, self._runs
        noted = NotedProgram(title, program, cost_s)
        record = key + _fixed(title, TITLE_BYTES) + _fixed(program, STEPS_BYTES) + bytes(1)

        def run(*rows: NDArray[Any]) -> Outputs:
            start = self._slot()
            memory[start : start + len(record)] = record
            running[start] = noted, next(runs)
            try:
                return executable(*rows)
            finally:
                memory[start : start + KEY_BYTES] = _NOTHING
                running.pop(start, None)

        return run

    def batches(self) -> list[BatchRun]:
        """Returns the runs that are under way. On any thread."""
        running = self._running.copy()
        return [BatchRun(noted, number, self._thread(start), start) for start, (noted, number) in running.items()]

    def mark_endless(self, batches: Iterable[BatchRun]) -> None:
        """Records that these never end: they and no others are suspects if the process ends now."""
        for batch in batches:
            self._memory[batch.start + _IS_ENDLESS] = True

    @contextmanager
    def loading(self, key: bytes, title: str) -> Iterator[LoadRecord]:
        """Records the load of a version until it ends and no step of it is under way any more."""
        try:
            start = self._free.pop()
        except IndexError:
            start = self._take(0)
        self._memory[start : start + _STEPS] = key + _fixed(title, TITLE_BYTES)
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

    def _thread(self, start: int) -> int:
        """Returns the number of the thread whose slot this is."""
        *_, thread = _SLOT.unpack_from(self._memory, start)
        return int(thread)

    def _take(self, thread: int) -> int:
        """Returns the offset of a new slot, in bytes; the last slot is shared by all threads and loads that find no
        other."""
        start = min(next(self._next), SLOTS - 1) * _SLOT.size
        _SLOT.pack_into(self._memory, start, _NOTHING, b"", b"", False, thread)
        return start


class Suspect(NamedTuple):
    """A load or batches of a version that were under way when a process ended."""

    is_load: bool
    title: str
    """The name of the version in messages."""
    steps: str = ""
    """Steps of a load, separated by semicolons, empty where no step was under way; the program of a batch."""


def suspects(file: int, last_words: str) -> Mapping[bytes, Suspect]:
    """Returns the versions that may have ended a process, by their keys, from its records in `file`.

    `last_words` is the text that `faulthandler` wrote. If it names the thread of a batch, only the version of that
    batch is a suspect. Otherwise, where batches were marked as endless, they are the suspects. Otherwise the fault was
    in a thread of a library, or the library ended the process: the suspects are all batches and loads. Of the loads
    only those at a step are suspects, where any is: others wait.
    """
    size_bytes = SLOTS * _SLOT.size
    if os.fstat(file).st_size != size_bytes:  # of another version, which has been replaced under a running server
        return {}
    slots = [*_SLOT.iter_unpack(os.pread(file, size_bytes, 0))]
    noted = [
        (key, thread, is_endless, Suspect(not thread, _text(title), _text(steps)))
        for key, title, steps, is_endless, thread in slots
        if key != _NOTHING
    ]
    current = _CURRENT.search(last_words)
    for key, thread, _, suspect in noted:
        if current is not None and thread == int(current[1], 16):
            return {key: suspect}
    if endless := {key: suspect for key, _, is_endless, suspect in noted if is_endless}:
        return endless
    batches = {key: suspect for key, _, _, suspect in noted if not suspect.is_load}
    loads = {key: suspect for key, _, _, suspect in noted if suspect.is_load}
    at_steps = {key: suspect for key, suspect in loads.items() if suspect.steps}
    return batches | (at_steps or loads)


def _fixed(text: str, size_bytes: int) -> bytes:
    """Returns the beginning of a text, filled up with zeros."""
    return text.encode()[:size_bytes].ljust(size_bytes, b"\0")


def _text(content: bytes) -> str:
    return content.rstrip(b"\0").decode(errors="ignore")
