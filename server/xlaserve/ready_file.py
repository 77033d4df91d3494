"""The file that says where a ready server is found."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from xlaserve.errors import ConfigError


class ReadyFile:
    """The file at `path`; None for a server that writes none. `pid` is the process that signals are to be sent to."""

    def __init__(self, path: Path | None, pid: int | None = None) -> None:
        self._path = path
        self._pid = os.getpid() if pid is None else pid

    def write(self, addresses: Mapping[str, str | None]) -> None:
        """Writes `addresses` and the number of the process as JSON. Raises ConfigError."""
        if self._path is None:
            return
        # Readers that wait for the file must never see half of it.
        partial = self._path.with_name(f"{self._path.name}.partial")
        try:
            partial.write_text(json.dumps({**addresses, "pid": self._pid}))
            partial.replace(self._path)
        except OSError as error:
            with suppress(OSError):
                partial.unlink()
            raise self._wrong(error) from None

    def remove(self) -> None:
        """Removes it, even one left by a killed server. Raises ConfigError if there can't be one."""
        if self._path is None:
            return
        try:
            self._path.unlink(missing_ok=True)
        except OSError as error:
            raise self._wrong(error) from None
        if not self._path.parent.is_dir():
            raise ConfigError(f"ready_file: expected a file in a folder that exists, got {self._path}")

    def _wrong(self, error: OSError) -> ConfigError:
        return ConfigError(f"ready_file: expected a file that can be made, got {self._path}: {error.strerror}")
