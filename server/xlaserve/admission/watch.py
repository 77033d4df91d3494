"""Files that are read again when they change."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from hashlib import blake2b
from pathlib import Path
from threading import Event, Thread
from typing import Final

from xlaserve.config.stamp import Stamp
from xlaserve.errors import ConfigError

LOOK_S: Final = 2.0
"""How often files are looked at for changes."""

log = logging.getLogger(__name__)


class Watch:
    """Calls `read` at once, and again when one of `files` has changed.

    `read` raises ConfigError, and has then changed nothing; otherwise it returns which files it read. What is wrong
    with them is logged once, under `name`, and they are tried again until they can be read.
    """

    def __init__(self, name: str, files: Sequence[Path], read: Callable[[], Sequence[Path]]) -> None:
        """Raises ConfigError."""
        self._name = name
        self._files = (*files,)
        self._read_files = read
        self._failure = ""
        self._stamp: Sequence[Stamp | None] = ()
        self._content: Sequence[bytes] | None = None
        """Digests of the files, while a change might not show in their stamps; else None."""
        self._on_read: Callable[[], None] = lambda: None
        self._read()

    def follow(self, on_read: Callable[[], None] = lambda: None) -> None:
        """Looks at the files from now on, on a thread of its own: reading many callers takes a second.

        `on_read` is called there after they were read again.
        """
        self._on_read = on_read
        Thread(target=self._follow, name=f"{self._name} files", daemon=True).start()

    def look(self) -> None:
        """Reads the files again where they have changed."""
        try:
            if self._stamps() != self._stamp or self._has_other_content():
                self._read()
                log.info("%s: read again", self._name)
                self._on_read()
            self._failure = ""
        except ConfigError as error:
            if self._failure != str(error):
                self._failure = str(error)
                log.error("as before: %s", error)

    def _follow(self) -> None:
        never = Event()
        while not never.wait(LOOK_S):
            try:
                self.look()
            except Exception:
                log.exception("%s: as before", self._name)

    def _read(self) -> None:
        while True:
            # Before they are read: what is written meanwhile is a change.
            files, now_ns, stamp = self._files, time.time_ns(), self._stamps()
            content = None if _is_settled(stamp, now_ns) else self._digests()
            self._files = (*self._read_files(),)
            self._stamp, self._content = stamp, content
            if self._files == files:
                return

    def _has_other_content(self) -> bool:
        """Whether files were changed so soon after a change before that their stamps do not show it."""
        if self._content is None:
            return False
        now_ns = time.time_ns()
        if self._digests() != self._content:
            return True
        if _is_settled(self._stamp, now_ns):
            self._content = None
        return False

    def _stamps(self) -> Sequence[Stamp | None]:
        return [*map(_stamp, self._files)]

    def _digests(self) -> Sequence[bytes]:
        return [*map(_digest, self._files)]


def _is_settled(stamps: Sequence[Stamp | None], now_ns: int) -> bool:
    """Whether each change after `now_ns` gives one of the files another stamp."""
    return all(stamp is None or stamp.shows_changes_after(now_ns) for stamp in stamps)


def _digest(file: Path) -> bytes:
    try:
        return blake2b(file.read_bytes()).digest()
    except OSError:
        return b""


def _stamp(file: Path) -> Stamp | None:
    try:
        return Stamp.of(file)
    except OSError:  # `read` says what is wrong, if it still needs that file
        return None
