"""Preparation of models that are loaded beside traffic: a separate process builds, traces and compiles them.

Tracing a network holds the interpreter's lock, and that would hold up the traffic. The process leaves its programs in a
compile cache, from which the server takes them. When it ends, all that TensorFlow and Keras never free goes with it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import IO, Final, NamedTuple

from xlaserve.config import ModelSettings, Settings
from xlaserve.engine.niceness import Starvation, hasten, lower
from xlaserve.errors import ModelFailed
from xlaserve.models import catalog
from xlaserve.models.change_queue import Stop
from xlaserve.models.held_folder import held_folder, remove_left
from xlaserve.models.load_turns import LoadTurns
from xlaserve.programs.cache.compile_cache import CompileCache
from xlaserve.programs.cache.environment import installed, is_replaced
from xlaserve.programs.tf.device import Device

log = logging.getLogger(__name__)

PROCESS: Final = (sys.executable, "-P", "-m", "xlaserve.models.preparer_process")
STEP: Final = "xlaserve is "
"""Beginning of the lines on its stdout that name its next step, such as `compiling mode xla, bucket 2x8x8`."""
DONE: Final = "done"
FAILED: Final = "failed"
"""The last step, with and without success. A process that ends at another one was ended by the code that it ran."""
PREFIX: Final = "xlaserve-prepared-"
"""Beginning of the names of its folders."""
POLL_S: Final = 0.2
MAX_PROCESSES: Final = 32
"""Most processes at the same time: of the load that has the turn, and of others that have given it up."""
MAX_READ_BYTES: Final = 1 << 20
"""Bytes of a process's output that are read at once, in search of its steps."""
KILL_S: Final = 5.0
"""The longest wait for a process that was killed: where no processor is idle, it may need half a minute to end."""


class Preparer:
    """Runs the process, for one model at a time, unless a load has given up its turn; see `LoadTurns`.

    Once `stop` is set, the process that runs is ended, and no other started. `configured` is the compile cache that is
    configured, if one is.
    """

    def __init__(
        self,
        settings: Settings,
        device: Device,
        stop: Stop,
        configured: CompileCache | None = None,
        process: Sequence[str] = PROCESS,
        *,
        turns: LoadTurns | None = None,
    ) -> None:
        self._settings = settings
        self._device = device
        self._configured = configured
        self._is_kept = configured is not None and configured.is_filling
        self._process = process
        self._stop = stop
        # Not asyncio's own threads: large answers wait for those.
        self._threads = ThreadPoolExecutor(MAX_PROCESSES, thread_name_prefix="prepare")
        self._turns = turns or LoadTurns()
        installed()  # the code that this process runs, even if other code is installed later
        self._threads.submit(remove_left, PREFIX)

    def close(self) -> None:
        """Ends its threads, without waiting for them."""
        self._threads.shutdown(wait=False)

    @asynccontextmanager
    async def prepare(self, model: ModelSettings) -> AsyncIterator[CompileCache | None]:
        """Yields, for as long as it takes to load the model, a compile cache that has its programs.

        Yields None where they can't be kept or are in a read-only compile cache already, or the process failed: loading
        the model here then says why. Raises ModelFailed where the process was killed, by a lack of memory perhaps, and
        ShuttingDown.
        """
        if not can_be_prepared(model):
            yield None
            return
        temporary, stop, steps = ExitStack(), Stop(self._stop), _Steps()
        async with AsyncExitStack() as held:
            turn = await held.enter_async_context(self._turns.turn(model.title))
            turn.progress = steps
            self._stop.check()
            making = self._threads.submit(self._make, model, temporary, stop, steps)
            made = asyncio.wrap_future(making)
            made.add_done_callback(_take)
            try:
                prepared = await asyncio.shield(made)
                await held.aclose()  # the turn
                yield prepared
            finally:
                stop.set()
                await asyncio.wait([made], timeout=2 * KILL_S)  # a cancelled load leaves no process and no folder
                # Now, or once its thread is done: until then the thread may still add to it.
                await asyncio.to_thread(making.add_done_callback, lambda _: temporary.close())

    def _make(self, model: ModelSettings, temporary: ExitStack, stop: Stop, steps: _Steps) -> CompileCache | None:
        """Has the process compile the model into a cache, which may last no longer than `temporary`; blocks."""
        stop.check()
        try:
            if is_replaced():
                _warn(model, "other code has been installed since the server began; restart it")
                return None
            if self._is_kept:
                assert self._configured is not None
                return self._configured if self._run(model, self._configured.root, stop, steps) else None
            if self._configured is not None and self._is_there(self._configured, model):
                return None
            folder = temporary.enter_context(held_folder(PREFIX))
            if self._run(model, folder, stop, steps):
                return CompileCache(folder, read_only=True)
            temporary.close()
        except OSError as error:
            _warn(model, error.strerror or type(error).__name__)
        return None

    def _is_there(self, cache: CompileCache, model: ModelSettings) -> bool:
        from xlaserve.models.networks import cached  # noqa: PLC0415 - imports TensorFlow

        return cached.has(cache, self._device, model)

    def _run(self, model: ModelSettings, folder: Path, stop: Stop, steps: _Steps) -> bool:
        """Returns whether the process compiled the model. Raises OSError where it can't be started, ModelFailed where
        it was killed or the model's code ended it, and ShuttingDown."""
        update = {"models": (model.alone,), "compile_cache": folder, "compile_cache_read_only": False}
        settings = self._settings.model_copy(update=update).model_dump_json().encode() + b"\n"
        ended = self._run_process(settings, stop, steps, only_when_idle=True)
        if ended.status is None:
            log.info("model %s: no processor is ever idle; it compiles at low priority instead", model.title)
            # Programs in the folder are not made again.
            ended = self._run_process(settings, stop, steps, only_when_idle=False)
        status, said = ended.status, ended.said
        assert status is not None
        log.debug("model %s: prepared with status %d: %s", model.title, status, said)
        if status < 0 or ended.step not in ((DONE,) if status == 0 else ("", FAILED)):
            if self._stop.wait(POLL_S):  # a signal to the server may have ended the process as well
                self._stop.check()
            step = f" while {ended.step}" if ended.step else ""
            how = f"was ended by signal {-status}" if status < 0 else f"ended by itself with status {status}"
            raise ModelFailed(f"the process that compiles it {how}{step}")
        if status:
            _warn(model, said.rpartition("\n")[2] or f"exit status {status}")
        return status == 0

    def _run_process(self, settings: bytes, stop: Stop, steps: _Steps, *, only_when_idle: bool) -> _Ended:
        stop.check()
        with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
            # A group of its own: signals to the server's are for the server to act on.
            process = subprocess.Popen(
                self._process, stdin=subprocess.PIPE, stdout=stdout, stderr=stderr, process_group=0
            )
            assert process.stdin
            try:
                with process.stdin:  # whose end is the end of the process
                    lower(process.pid, only_when_idle=only_when_idle)
                    process.stdin.write(settings)
                    process.stdin.flush()
                    starvation = Starvation(process.pid) if only_when_idle else None
                    while (status := _wait(process)) is None:
                        stop.check()
                        steps.read(stdout)
                        if starvation is not None and starvation.is_starved():
                            break
            finally:
                _kill(process)
            named = [line.removeprefix(STEP) for line in _lines(stdout) if line.startswith(STEP)]
            return _Ended(status, "\n".join(_lines(stderr)), named[-1] if named else "")


class _Steps:
    """The last step that a process has named, while it runs."""

    def __init__(self) -> None:
        self.step = ""
        self.since_s = 0.0
        self._read_bytes = 0

    def read(self, stdout: IO[bytes]) -> None:
        """Reads what the process has written since the last call."""
        # Not by `seek`: the process writes at the same offset.
        written = os.pread(stdout.fileno(), MAX_READ_BYTES, self._read_bytes)
        whole, newline, _ = written.rpartition(b"\n")
        self._read_bytes += len(whole) + len(newline) or (len(written) if len(written) == MAX_READ_BYTES else 0)
        for line in whole.decode(errors="replace").splitlines():
            if line.startswith(STEP):
                self.step, self.since_s = line.removeprefix(STEP), time.monotonic()


class _Ended(NamedTuple):
    """The end of the process."""

    status: int | None
    """None where it was ended because it starved."""
    said: str
    """The process's stderr."""
    step: str
    """The last step that the process named; empty without one."""


def _lines(file: IO[bytes]) -> list[str]:
    file.seek(0)
    return file.read().decode(errors="replace").strip().splitlines()


def _warn(model: ModelSettings, reason: str) -> None:
    log.warning("model %s: can't be compiled in a process of its own and is compiled here: %s", model.title, reason)


def _wait(process: subprocess.Popen[bytes]) -> int | None:
    """Returns the status of the process; None if it has not ended within POLL_S seconds."""
    try:
        return process.wait(POLL_S)
    except subprocess.TimeoutExpired:
        return None


def _kill(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.kill()
        hasten(process.pid)
        with suppress(subprocess.TimeoutExpired):
            process.wait(KILL_S)


def can_be_prepared(model: ModelSettings) -> bool:
    """Returns whether all programs of the model can be kept in a compile cache, as far as its settings tell."""
    return (
        catalog.uses_tensorflow(model)
        and all(mode.traits.is_kept for mode in model.compiled_modes)
        and model.unmatched == "reject"
        and not model.has_auto_buckets  # most candidates are not kept
        and catalog.can_be_kept(model)
    )


def _take(made: asyncio.Future[CompileCache | None]) -> None:
    """Takes an error that a load which was cancelled will not ask for; else asyncio logs it."""
    if not made.cancelled():
        made.exception()
