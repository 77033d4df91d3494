"""The folder in which a fleet keeps files on a machine; it belongs to one user and is closed to all others."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from xlaserve.errors import ConfigError

MODE: Final = 0o700
HELD: Final = "held"
"""The file that is locked for as long as somebody uses the folder that it is in."""


def private() -> Path:
    """Returns this user's folder, made where there is none. Raises ConfigError where others can use it."""
    uid = os.getuid()
    folder = Path(tempfile.gettempdir()) / f"xlaserve-fleets-{uid}"
    with suppress(FileExistsError):
        folder.mkdir(MODE)
    found = folder.lstat()
    mode = stat.S_IMODE(found.st_mode)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != uid or mode & ~MODE:
        what = f"{stat.filemode(found.st_mode)} of user {found.st_uid}"
        raise ConfigError(f"{folder}: expected a folder of user {uid} with mode {MODE:o}, got {what}")
    return folder


def write(file: Path, text: str) -> None:
    """Writes a file that only this user can read."""
    file.unlink(missing_ok=True)
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as output:
        output.write(text)


def read(file: Path) -> str:
    """Returns what is in a file of this user. Raises ConfigError where it is another's, and OSError."""
    with os.fdopen(os.open(file, os.O_RDONLY | os.O_NOFOLLOW)) as text:
        owner = os.fstat(text.fileno()).st_uid
        if owner != os.getuid():
            raise ConfigError(f"{file}: expected a file of user {os.getuid()}, got one of user {owner}")
        return text.read()


def hold(folder: Path) -> int:
    """Makes `folder`, and returns a file descriptor that keeps it. Folders beside it that nobody keeps are removed.

    The lock is the kernel's: it goes with the last process that has the descriptor, however that ends.
    """
    folder.parent.mkdir(MODE, parents=True, exist_ok=True)
    with _alone(folder.parent):  # nobody sweeps a folder between its making and its lock
        for other in folder.parent.iterdir():
            if other.is_dir() and not other.is_symlink():
                _sweep(other)
        folder.mkdir(MODE)
        return _lock(folder / HELD, os.O_CREAT, fcntl.LOCK_EX)


def _sweep(folder: Path) -> None:
    try:
        held = _lock(folder / HELD, 0, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # it is in use, or was not made here
        return
    shutil.rmtree(folder, ignore_errors=True)
    os.close(held)


@contextmanager
def _alone(parent: Path) -> Iterator[None]:
    held = _lock(parent / HELD, os.O_CREAT, fcntl.LOCK_EX)
    try:
        yield
    finally:
        os.close(held)


def _lock(file: Path, opening: int, locking: int) -> int:
    """Returns a descriptor of `file`, opened and locked with these flags. Raises OSError."""
    found = os.open(file, os.O_RDWR | os.O_CLOEXEC | opening, 0o600)
    try:
        fcntl.flock(found, locking)
    except OSError:
        os.close(found)
        raise
    return found
