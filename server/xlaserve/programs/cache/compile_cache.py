"""The compile cache's folders, one for each version of TensorFlow, environment and model, named by their keys."""

from __future__ import annotations

import errno
import json
import logging
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import Final

from xlaserve.errors import ConfigError
from xlaserve.programs.cache.environment import environment, key, tensorflow_version
from xlaserve.programs.cache.records import RecordFolder, check_writable
from xlaserve.programs.tf import flags
from xlaserve.programs.tf.device import Device

FORMAT: Final = 1
"""Format of the cache; with another one everything is made again."""
ABOUT: Final = "environment.json"
FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
"""Errors of a full disk: it may have room later, so the server goes on without the cache."""

log = logging.getLogger(__name__)


class CompileCache:
    """A folder of compiled programs. A cache that is to be filled must be made before TensorFlow is imported.

    Raises ConfigError where the folder can't be read or, without `read_only`, written.
    """

    def __init__(self, root: Path, *, read_only: bool = False) -> None:
        self.root = root
        self._read_only = read_only
        try:
            if not self._read_only:
                check_writable(self.root)
            elif not os.access(self.root, os.R_OK | os.X_OK) or not self.root.is_dir():
                raise ConfigError(f"compile_cache: expected a folder that can be read, got {self.root}")
        except OSError as error:
            if error.errno not in FULL:
                raise ConfigError(
                    f"compile_cache: expected a folder that can be written, got {self.root}: {error.strerror};"
                    " compile_cache_read_only uses what is there"
                ) from None
            log.warning("compile cache: nothing is kept, as %s can't be written: %s", self.root, error.strerror)
            self._read_only = True
        if self.root.exists() and is_open_to_others(self.root):
            log.warning(
                "compile cache: other users can write into %s, and programs in it are run: chmod go-w", self.root
            )
        self.is_filling = not self._read_only
        """Whether missing programs are kept once they are made."""
        if not self._read_only:
            self._set_autotuning()

    def folder(self, device: Device, model: object) -> RecordFolder:
        """Returns the folder of a model on `device`; `model`, of JSON's types, says which it is."""
        facts = {"format": FORMAT, **environment(device)}
        environment_folder = self.root / f"tensorflow-{tensorflow_version()}" / key(facts)
        if not self._read_only:
            with suppress(OSError):  # only shows people which folder is whose
                environment_folder.mkdir(parents=True, exist_ok=True)
                (environment_folder / ABOUT).write_text(json.dumps(facts, indent=2) + "\n")
        return RecordFolder(environment_folder / key(model), read_only=self._read_only)

    def stop_filling(self) -> None:
        """Keeps no further programs, for when traffic begins.

        TensorFlow holds Python's lock while it exports a program, for a second or more with a large network, and costs
        that are measured beside traffic would mislead later starts.
        """
        self.is_filling = False

    def _set_autotuning(self) -> None:
        """Has XLA keep its measurements of a GPU's kernels; on a CPU it makes none."""
        folder = self.root / f"tensorflow-{tensorflow_version()}" / "autotuning"
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)  # XLA fails where it is not there
            flags.add(flags.XLA, f"--xla_gpu_per_fusion_autotune_cache_dir={folder}")


def is_open_to_others(folder: Path) -> bool:
    """Whether users other than this one and root may write into `folder`: it is another's, or everybody may."""
    status = folder.stat()
    return bool(status.st_mode & stat.S_IWOTH) or status.st_uid not in (0, os.getuid())
