"""Worker processes on this machine."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from contextlib import suppress
from multiprocessing import Pipe
from typing import Any, Final, Self

from xlaserve_loadtest.run.calls import Caller, WorkerDied
from xlaserve_loadtest.run.generator import Generator
from xlaserve_loadtest.run.worker import Worker

CORES_PER_WORKER: Final = 4
MAX_WORKERS: Final = 8
STOP_TIMEOUT_S: Final = 5.0

WORKER_COMMAND: Final = (sys.executable, "-m", "xlaserve_loadtest.run.worker")
_TAIL_LINES: Final = 10


def choose_number(cores: int, concurrency: int, cores_per_worker: int = CORES_PER_WORKER) -> int:
    """Returns how many workers a machine with `cores` should have: the target needs most of them, and a worker without
    a request to send is of no use."""
    return max(1, min(cores // cores_per_worker, concurrency, MAX_WORKERS))


class WorkerProcess:
    """A process with a `Worker`; `async with` starts and ends it."""

    calls: Worker
    """The worker. Its methods raise what they raise there, and WorkerDied."""

    async def __aenter__(self) -> Self:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed when the worker has ended
        connection, theirs = Pipe()
        with theirs:
            self._process = await start_worker(theirs.fileno(), stdout=self._log, stderr=self._log)
        self._caller = Caller(connection)
        self.calls = self._caller.worker
        self._watcher = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *error: object) -> None:
        self._caller.hang_up()
        try:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), STOP_TIMEOUT_S)
        finally:
            if self._process.returncode is None:
                self._process.kill()
            await asyncio.wait((self._watcher,))
            self._caller.shutdown()
            self._log.close()

    @property
    def generator(self) -> Generator:
        """The generator that sends the worker's requests."""
        return self.calls.generator

    @property
    def pid(self) -> int:
        """Id of the process."""
        return self._process.pid

    async def _watch(self) -> None:
        status = await self._process.wait()
        self._log.seek(0)
        tail = "\n".join(self._log.read().decode(errors="replace").splitlines()[-_TAIL_LINES:])
        self._caller.end(WorkerDied(f"a worker ended with status {status}\n{tail}".rstrip()))


async def start_worker(descriptor: int, **outputs: Any) -> asyncio.subprocess.Process:
    """Starts a process that answers the calls which come over `descriptor`, until it or its own stdin ends."""
    return await asyncio.create_subprocess_exec(
        *WORKER_COMMAND,
        str(descriptor),
        pass_fds=(descriptor,),
        stdin=asyncio.subprocess.PIPE,
        env={**os.environ, "GRPC_VERBOSITY": "NONE"},
        # Ctrl-C in the terminal is for the parent, which ends its workers in its own time.
        start_new_session=True,
        **outputs,
    )
