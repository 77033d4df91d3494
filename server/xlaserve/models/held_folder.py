"""Temporary folders that show whether a process still uses them: it holds a lock on them, which ends with the process.

A process id in their names would not do: containers that share a /tmp may each be process 1.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def held_folder(prefix: str) -> Iterator[Path]:
    """Yields a new temporary folder whose name begins with `prefix`, and removes it.

    Raises OSError, which says where they can't be locked.
    """
    lock = None
    while lock is None:  # another process may take it for left over before it is locked
        folder = Path(tempfile.mkdtemp(prefix=prefix))
        try:
            lock = _lock(folder)
        except OSError as error:
            folder.rmdir()
            reason = f"a folder for temporary files (TMPDIR) can't be locked: {error.strerror}"
            raise OSError(error.errno, reason) from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def remove_left(prefix: str) -> None:
    """Removes the folders of processes that were killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with suppress(OSError):  # it is no folder, or another user's
            if (lock := _lock(folder)) is not None:
                shutil.rmtree(folder, ignore_errors=True)
                os.close(lock)


def _lock(folder: Path) -> int | None:
    """Returns a file descriptor that locks `folder` until it is closed; None where another locked or removed it."""
    with suppress(BlockingIOError, FileNotFoundError):
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            folder.stat()  # another may have removed it before it was locked here; names are never used again
        except OSError:
            os.close(lock)
            raise
        return lock
    return None
