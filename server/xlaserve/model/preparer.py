"""Models that are loaded beside traffic are built, traced and compiled in a process of their own.

Python's way through a network holds the interpreter's lock, and so the traffic up. The process leaves what it made in a
compile cache, from which the server takes it, and takes with it all that TensorFlow and Keras never free.
"""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from xlaserve.config import Mode, ModelSettings, Settings
from xlaserve.engine.beside_traffic import yield_to_traffic
from xlaserve.engine.cache.cache import CompileCache
from xlaserve.errors import ModelFailed, ShuttingDown
from xlaserve.model import catalog

log = logging.getLogger(__name__)

PROCESS: Final = (sys.executable, "-m", "xlaserve.model.preparer_process")
POLL_S: Final = 0.2


class Preparer:
    """Runs the process. `kept` is the configured compile cache, if there is one that may be filled."""

    def __init__(
        self,
        settings: Settings,
        kept: CompileCache | None = None,
        process: Sequence[str] = PROCESS,
    ) -> None:
        self._settings = settings
        self._kept = kept
        self._process = process
        self._stop = threading.Event()

    def stop(self) -> None:
        """Ends all that is under way, and what follows."""
        self._stop.set()

    @asynccontextmanager
    async def prepare(self, model: ModelSettings) -> AsyncIterator[CompileCache | None]:
        """Gives, for as long as it takes to load the model, a compile cache that has its programs.

        Gives None where they can't be kept, or the process failed: loading the model here then says why. Raises
        ModelFailed where the process was killed, by a lack of memory perhaps, and ShuttingDown.
        """
        if not can_be_prepared(model):
            yield None
        elif self._kept is not None:
            yield self._kept if await asyncio.to_thread(self._run, model, self._kept.root) else None
        else:
            with tempfile.TemporaryDirectory(prefix="xlaserve-prepared-", ignore_cleanup_errors=True) as folder:
                made = await asyncio.to_thread(self._run, model, Path(folder))
                yield CompileCache(Path(folder), read_only=True) if made else None

    def _run(self, model: ModelSettings, folder: Path) -> bool:
        """Returns whether the process did what it should; blocks."""
        update = {"models": (model,), "compile_cache": folder, "compile_cache_read_only": False}
        settings = self._settings.model_copy(update=update).model_dump_json().encode() + b"\n"
        with (
            tempfile.TemporaryFile() as stderr,
            subprocess.Popen(self._process, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=stderr) as process,
        ):
            try:
                yield_to_traffic(process.pid)
                assert process.stdin
                process.stdin.write(settings)
                process.stdin.flush()  # and stays open: its end is the end of this process
                status = self._wait(process)
            finally:
                process.kill()
            stderr.seek(0)
            said = stderr.read().decode(errors="replace").strip()
        if status < 0:
            raise ModelFailed(f"the process that compiles it was ended by signal {-status}")
        log.debug("model %s: prepared with status %d: %s", model.name, status, said)
        if status:
            log.warning(
                "model %s: can't be compiled in a process of its own and is compiled here: %s",
                *(model.name, said.rpartition("\n")[2] or f"exit status {status}"),
            )
        return status == 0

    def _wait(self, process: subprocess.Popen[bytes]) -> int:
        while not self._stop.is_set():
            try:
                return process.wait(POLL_S)
            except subprocess.TimeoutExpired:
                continue
        raise ShuttingDown("the server is shutting down; no model is loaded any more")


def can_be_prepared(model: ModelSettings) -> bool:
    """Returns whether all that serves the model can be kept in a compile cache, as far as its settings tell."""
    return (
        catalog.uses_tensorflow(model)
        and set(model.compiled_modes) == {Mode.XLA}
        and model.unmatched == "reject"
        and catalog.can_be_kept(model)
    )
