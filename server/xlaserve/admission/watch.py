"""Files that are read again when they change."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
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
            if self._stamps() != self._stamp:
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
            files, stamp = self._files, self._stamps()  # before they are read: what is written meanwhile is a change
            self._files = (*self._read_files(),)
            self._stamp = stamp
            if self._files == files:
                return

    def _stamps(self) -> object:
        return [*map(_stamp, self._files)]


def _stamp(file: Path) -> Stamp | None:
    try:
        return Stamp.of(file)
    except OSError:  # `read` says what is wrong, if it still needs that file
        return None
