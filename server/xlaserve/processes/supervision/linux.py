"""System calls of Linux: to end with another process, to be another's child, and to have a name that `ps` shows."""

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
"""The bytes of a name that the kernel keeps."""

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_NAME: Final = 15
_PR_SET_CHILD_SUBREAPER: Final = 36
_ARG_START, _ARG_END = 48, 49
"""Fields of proc_pid_stat(5), the first of which is 1."""


def end_with(parent: int, number: signal.Signals) -> bool:
    """Has the kernel send this process a signal when the thread that started it ends.

    The setting outlasts exec, and processes that this one starts do not inherit it. `parent` is the number of the
    process that started this one. Returns False where that has ended already, so that no signal would ever come.
    """
    _prctl(_PR_SET_PDEATHSIG, number)
    return os.getppid() == parent


@contextmanager
def adopting() -> Iterator[None]:
    """Makes this process the parent of all orphans among its descendants (a subreaper) meanwhile. Raises OSError.

    To be held no longer than needed: no one waits for the end of other orphans.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        _prctl(_PR_SET_CHILD_SUBREAPER, 0)


def fork_sibling() -> int | None:
    """Forks a process that is a child of this one's parent, if the parent is `adopting`.

    Returns None in this process, and in the new one the number of a process in between, which has ended. Raises
    OSError.
    """
    if middle := os.fork():
        if os.waitstatus_to_exitcode(os.waitpid(middle, 0)[1]):
            raise ChildProcessError("could not be forked")
        return None
    middle = os.getpid()
    ended = os.pidfd_open(middle)
    if os.fork():
        os._exit(0)
    select.select([ended], [], [])  # until the process in between has ended, so that the parent has adopted this one
    os.close(ended)
    return middle


@contextmanager
def named(name: str) -> Iterator[None]:
    """A block in which `ps` shows `name` as the command. Main thread only: its name is the name of the process."""
    before = Path("/proc/self/comm").read_text().rstrip("\n")
    _set_name(name)
    try:
        yield
    finally:
        _set_name(before)


def set_title(title: str, name: str) -> None:
    """Has `ps` show `title` in place of the command line, as far as there is room for it, and `name` as the command."""
    _set_name(name)
    # The fields after the command's name in brackets, which may have brackets and spaces of its own.
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
