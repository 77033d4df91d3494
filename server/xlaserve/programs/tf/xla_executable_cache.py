"""XLA's executables in and out of TensorFlow.

TensorFlow keeps what XLA compiled in a folder that is named before it is imported, one for the whole process. It looks
there by the function's name and its HLO; an entry that is found but can't be read is an error and not a recompilation,
and so is one that can't be written. So it gets a private folder in memory, where no disk can be full, which holds an
executable only between its check and its first run: what was kept is put there before a function runs for the first
time, and what XLA compiled is taken out afterwards. Several threads may do so, each with functions of its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from xlaserve.programs.tf import flags

FOLDER: Final = "ram://xlaserve/executables"
"""A folder in TensorFlow's in-memory file system, of this process alone."""
PREFIX: Final = "xlaserve_"
"""Beginning of the names of functions that are kept; an executable's HLO module has its function's name."""
LOG_LEVEL: Final = "TF_CPP_MIN_LOG_LEVEL"
_ERRORS, _FATAL = "2", "3"


def set_environment(*, has_all_compiled: bool = True) -> None:
    """Has TensorFlow use the folder. Must come before TensorFlow is imported.

    Without `has_all_compiled` TensorFlow looks there, and leaves nothing of what XLA compiles.
    """
    flags.add(flags.TF_XLA, f"--tf_xla_persistent_cache_directory={FOLDER}")
    # Always said: the process may have been started by one that said otherwise, and the last one counts.
    flags.add(flags.TF_XLA, f"--tf_xla_persistent_cache_read_only={str(not has_all_compiled).lower()}")
    if os.environ.get(LOG_LEVEL) == _ERRORS:
        # `stderr_tap` says which don't matter; without it they can only be silenced with all others, which
        # come as exceptions as well.
        os.environ[LOG_LEVEL] = _FATAL


def put(files: Mapping[str, memoryview]) -> None:
    """Lets TensorFlow find `files`, by their names."""
    import tensorflow as tf  # noqa: PLC0415

    for name, data in files.items():
        with tf.io.gfile.GFile(f"{FOLDER}/{Path(name).name}", "wb") as file:
            file.write(bytes(data))


def take(function: str) -> dict[str, bytes]:
    """Returns the executables of the function of that name, by their file's name, and removes them."""
    return {path.rpartition("/")[2]: data for path, data in _remove(lambda data: function.encode() in data)}


def sweep() -> None:
    """Removes the executables of functions that are not kept: TensorFlow puts those there too."""
    _remove(lambda data: PREFIX.encode() not in data)


def _remove(is_meant: Callable[[bytes], bool]) -> list[tuple[str, bytes]]:
    import tensorflow as tf  # noqa: PLC0415

    removed = []
    for path in tf.io.gfile.glob(f"{FOLDER}/*.pb"):
        with suppress(tf.errors.NotFoundError):  # another thread has taken its own
            with tf.io.gfile.GFile(path, "rb") as file:
                data = file.read()
            if is_meant(data):
                tf.io.gfile.remove(path)
                removed.append((path, data))
    return removed
