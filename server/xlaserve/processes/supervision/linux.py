"""What a process asks of the Linux kernel: to end with another, to be another's child, and a name that `ps` shows."""

from __future__ import annotations

import ctypes
import os
import select
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

NAME_BYTES: Final = 15
"""How much of a name the kernel keeps."""

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_NAME: Final = 15
_PR_SET_CHILD_SUBREAPER: Final = 36
_ARG_START, _ARG_END = 48, 49
"""Fields of proc_pid_stat(5), the first of which is 1."""


def end_with(parent: int, number: signal.Signals) -> bool:
    """Has the kernel send this process `number` when the thread ends that started it, and returns whether it is there.

    It holds for this process and what it becomes, not for what it starts. `parent` is the number of the process that
    this one was started by. False where that has ended already, so that nothing would ever come.
    """
    _prctl(_PR_SET_PDEATHSIG, number)
    return os.getppid() == parent


@contextmanager
def adopting() -> Iterator[None]:
    """Has this process be the parent of all that its children start and leave behind meanwhile. Raises OSError.

    Not longer than for what it waits for: of the others nobody would notice the end.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        _prctl(_PR_SET_CHILD_SUBREAPER, 0)


def fork_sibling() -> int | None:
    """Forks. The new process is a child of what started this one, if that is `adopting`.

    Returns None here, and there the number of a process in between, which has ended. Raises OSError.
    """
    if middle := os.fork():
        if os.waitstatus_to_exitcode(os.waitpid(middle, 0)[1]):
            raise ChildProcessError("could not be forked")
        return None
    middle = os.getpid()
    ended = os.pidfd_open(middle)
    if os.fork():
        os._exit(0)
    select.select([ended], [], [])  # until it has left its child to another
    os.close(ended)
    return middle


@contextmanager
def named(name: str) -> Iterator[None]:
    """Has `ps` show `name` as the command meanwhile. Call it on the main thread, whose name is that of the process."""
    before = Path("/proc/self/comm").read_text().rstrip("\n")
    _set_name(name)
    try:
        yield
    finally:
        _set_name(before)


def set_title(title: str, name: str) -> None:
    """Has `ps` show `title` in place of the command line, as far as there is room for it, and `name` as the command."""
    _set_name(name)
    # What follows the command's name in brackets, which may have brackets and spaces of its own.
    fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    start, end = (int(fields[field - 3]) for field in (_ARG_START, _ARG_END))
    text = title.encode()[: end - start - 1]
    if start and text:
        ctypes.memset(start, 0, end - start)
        ctypes.memmove(start, text, len(text))


def _set_name(name: str) -> None:
    _prctl(_PR_SET_NAME, ctypes.c_char_p(name.encode()[:NAME_BYTES]))


def _prctl(option: int, value: int | ctypes.c_char_p) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) == -1:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
