"""The regions of shared memory that are registered, at all fronts of a server: in a file in memory that these share."""

from __future__ import annotations

import fcntl
import json
import os
import struct
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final, NamedTuple

from xlaserve.errors import QueueFull

MAX_CONTENT_BYTES: Final = 2**20
LOCK_TIMEOUT_S: Final = 0.2
"""How long a change waits for another front's, which takes less than a millisecond."""
LOCK_POLL_S: Final = 0.001
_HEAD: Final = struct.Struct("<QQ")
"""The number of changes, and how many bytes there are of what holds since the last one."""
_PAGE_BYTES: Final = 4096


class Region(NamedTuple):
    """A part of a file that a client has registered."""

    key: str
    offset: int
    size_bytes: int
    identity: tuple[int, int]
    """Device and inode: another file of the same name is another region."""


class Regions:
    """The regions by name. `file` is what `create` returned; by default nobody else sees them.

    What holds after a change is written beside what held before, and then counts at once: a front that is killed
    meanwhile has changed nothing.
    """

    def __init__(self, file: int | None = None) -> None:
        self._file = create() if file is None else file
        self._changes = 0
        self._regions: dict[str, Region] = {}

    def current(self) -> Mapping[str, Region]:
        """Returns all regions."""
        while True:
            changes, size_bytes = self._head()
            if changes == self._changes:
                return self._regions
            content = os.pread(self._file, size_bytes, _place(changes))
            if self._head()[0] == changes:  # else it may have been written over
                read = json.loads(content)
                self._regions = {
                    name: Region(key, offset, size, (device, inode))
                    for name, (key, offset, size, (device, inode)) in read.items()
                }
                self._changes = changes

    @contextmanager
    def changed(self) -> Iterator[dict[str, Region]]:
        """Gives all regions to be changed, and has the change hold for all fronts, unless an error is raised.

        Raises QueueFull where another front does not end its change.
        """
        self._lock()
        try:
            regions = dict(self.current())
            yield regions
            content = json.dumps(regions).encode()
            if len(content) > MAX_CONTENT_BYTES:
                raise QueueFull(f"shared memory: expected names of {MAX_CONTENT_BYTES} bytes together, got more")
            changes = self._changes + 1
            os.pwrite(self._file, content, _place(changes))
            os.pwrite(self._file, _HEAD.pack(changes, len(content)), 0)
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN)

    def _head(self) -> tuple[int, int]:
        changes, size_bytes = _HEAD.unpack(os.pread(self._file, _HEAD.size, 0))
        return changes, size_bytes

    def _lock(self) -> None:
        give_up_at = time.monotonic() + LOCK_TIMEOUT_S
        while True:
            try:
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # ended by the kernel where its holder ends
            except OSError:
                if time.monotonic() >= give_up_at:
                    raise QueueFull("shared memory: another process does not end its change of the regions") from None
                time.sleep(LOCK_POLL_S)
            else:
                return


def create() -> int:
    """Returns a file in memory without regions, for processes to inherit. Raises OSError."""
    file = os.memfd_create("xlaserve-regions", os.MFD_CLOEXEC)
    try:
        os.ftruncate(file, _place(1) + MAX_CONTENT_BYTES)
    except OSError:
        os.close(file)
        raise
    return file


def _place(changes: int) -> int:
    """Returns where in the file is what holds after so many changes: two take turns."""
    return _PAGE_BYTES + changes % 2 * MAX_CONTENT_BYTES
