"""The signs by which a change of a file is found without reading it."""

from __future__ import annotations

from pathlib import Path
from typing import Final, NamedTuple, Self

GRANULARITY_NS: Final = 2 * 10**9
"""Within this time, file systems may give two changes the same time: FAT counts in two seconds, others are finer."""


class Stamp(NamedTuple):
    """The state of a file: another one once it was changed or replaced."""

    device: int
    number: int
    """The number of the file on its device."""
    size_bytes: int
    modified_ns: int
    """When its content was changed, which programs that copy files set to the time of the original."""
    changed_ns: int
    """When its content, or what is known of the file, was changed, which no program can set."""

    @classmethod
    def of(cls, path: Path) -> Self:
        """Returns the stamp of the file at `path`. Raises OSError."""
        stat = path.stat()
        return cls(stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)

    def shows_changes_after(self, time_ns: int) -> bool:
        """Returns whether each change after `time_ns`, in nanoseconds since 1970, gives the file another stamp.

        A change so soon after another that both have the same time gives it none.
        """
        return max(self.modified_ns, self.changed_ns) < time_ns - GRANULARITY_NS
