"""XLA's executables in and out of TensorFlow.

TensorFlow keeps what XLA compiled in a folder that is named before it is imported, one for the whole process. It looks
there by the function's name and its HLO, and an entry that is found but can't be read is an error and no recompilation.
So it gets a private folder, which holds an executable only between its check and its first run: what was kept is put
there before a function runs for the first time, and what XLA compiled is taken out afterwards.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from xlaserve.engine import flags
from xlaserve.engine.device import check_temporary_folder

LOG_LEVEL: Final = "TF_CPP_MIN_LOG_LEVEL"
_ERRORS, _FATAL = "2", "3"


class Executables:
    """TensorFlow's folder of executables. Safe to use from several threads, each with functions of its own."""

    def __init__(self) -> None:
        check_temporary_folder()
        self._folder = Path(tempfile.mkdtemp(prefix="xlaserve-executables-"))

    def set_environment(self) -> None:
        """Has TensorFlow use the folder. Must come before TensorFlow is imported."""
        flags.add(flags.TF_XLA, f"--tf_xla_persistent_cache_directory={self._folder}")
        if os.environ.get(LOG_LEVEL) == _ERRORS:
            # `stderr_tap` says which are of no account; without it they can only be silenced with all others, which
            # come as exceptions besides.
            os.environ[LOG_LEVEL] = _FATAL

    def put(self, files: Mapping[str, memoryview]) -> None:
        """Lets TensorFlow find `files`, by their names."""
        for name, data in files.items():
            (self._folder / Path(name).name).write_bytes(data)

    def take(self, function: str) -> dict[str, bytes]:
        """Returns the executables of the function of that name, by their file's name, and removes them."""
        taken = {}
        for file in self._folder.glob("*.pb"):
            with suppress(FileNotFoundError):  # another thread has taken its own
                data = file.read_bytes()
                if function.encode() in data:  # as the name of its HLO module
                    taken[file.name] = data
                    file.unlink()
        return taken

    def close(self) -> None:
        """Removes the folder."""
        shutil.rmtree(self._folder, ignore_errors=True)
