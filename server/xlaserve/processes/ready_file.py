"""The ready file, which has the addresses and the process number of a server once it is ready."""

from __future__ import annotations

import fcntl
import json
import os
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from xlaserve.errors import ConfigError


class ReadyFile:
    """The ready file at `path`; None for a server without one. `pid` is the process that signals are to be sent to.

    The process that wrote the file last owns it, and holds a lock on it until the process ends, even by a crash. No
    server removes the file of another one that runs.
    """

    def __init__(self, path: Path | None, pid: int | None = None) -> None:
        self._path = path
        self._pid = os.getpid() if pid is None else pid
        self._own: int | None = None
        """A descriptor of the file that this process has written, which holds the lock."""

    def check(self) -> None:
        """Makes sure that the file can be written, without changing it. Raises ConfigError."""
        if self._path is None:
            return
        if not self._path.parent.is_dir():
            raise ConfigError(f"ready_file: expected a file in a folder that exists, got {self._path}")
        if self._path.is_dir():
            raise ConfigError(f"ready_file: expected a file, got the folder {self._path}")
        if not _can_be_replaced(self._path):
            raise ConfigError(f"ready_file: expected a file of its own, got {self._path}, a device, a pipe or a link")
        partial, file = self._written({"pid": self._pid})
        partial.unlink(missing_ok=True)
        os.close(file)

    def remove_left(self) -> None:
        """Removes the file of a server that was killed. Raises ConfigError."""
        if self._path is None:
            return
        try:
            if not _is_locked(self._path):
                self._path.unlink(missing_ok=True)
        except OSError as error:
            raise self._wrong(error) from None

    def write(self, addresses: Mapping[str, str | None]) -> None:
        """Replaces the file by one with `addresses` and the process number as JSON. Raises ConfigError."""
        if self._path is None:
            return
        # Readers that wait for the file must never see a part of it.
        partial, file = self._written({**addresses, "pid": self._pid})
        try:
            partial.replace(self._path)
        except OSError as error:
            os.close(file)
            with suppress(OSError):
                partial.unlink()
            raise self._wrong(error) from None
        self._own = file

    def remove(self) -> None:
        """Removes the file if this process owns it. A file that can't be removed stays."""
        if self._path is None or self._own is None:
            return
        with suppress(OSError):
            if os.path.samestat(os.fstat(self._own), self._path.stat()):
                self._path.unlink()
        os.close(self._own)
        self._own = None

    def _written(self, content: Mapping[str, object]) -> tuple[Path, int]:
        """Returns a file beside the final one with `content`, and a descriptor that locks it. Raises ConfigError."""
        assert self._path is not None
        partial = self._path.with_name(f"{self._path.name}.{os.getpid()}.partial")
        try:
            with partial.open("w") as output:
                json.dump(content, output)
                output.flush()
                file = os.dup(output.fileno())
        except OSError as error:
            with suppress(OSError):
                partial.unlink()
            raise self._wrong(error) from None
        with suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return partial, file

    def _wrong(self, error: OSError) -> ConfigError:
        return ConfigError(f"ready_file: expected a file that can be made, got {self._path}: {error.strerror}")


def _can_be_replaced(path: Path) -> bool:
    """Returns whether `path` is a regular file or free: as root, a server would otherwise remove a device."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return True


def _is_locked(path: Path) -> bool:
    """Returns whether the owner of the file runs; False if there is no file, or no way to know. Raises OSError."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except (FileNotFoundError, PermissionError):
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return False
    finally:
        os.close(file)
    return False
