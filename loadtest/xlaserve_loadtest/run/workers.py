"""The parent's side of worker processes."""

from __future__ import annotations

import asyncio
import os
import pickle
import sys
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import count
from multiprocessing import Pipe
from typing import Any, Final, Self, cast

from xlaserve_loadtest.run.worker import Worker, on_message
from xlaserve_loadtest.targets.target import TargetError

CORES_PER_WORKER: Final = 4
MAX_WORKERS: Final = 8
STOP_TIMEOUT_S: Final = 5.0

_COMMAND: Final = (sys.executable, "-m", "xlaserve_loadtest.run.worker")
_TAIL_LINES: Final = 10


class WorkerDied(TargetError):
    """A worker process ended early."""


def choose_number(cores: int, concurrency: int) -> int:
    """Returns how many workers a machine with `cores` should have: the target needs most of them, and a worker without
    a request to send is of no use."""
    return max(1, min(cores // CORES_PER_WORKER, concurrency, MAX_WORKERS))


class _Remote:
    """Stands for an object in a worker: its methods are called there, those of its attributes too."""

    def __init__(self, call: Callable[..., Awaitable[Any]], path: str = "") -> None:
        self._call = call
        self._path = path

    def __getattr__(self, name: str) -> _Remote:
        return _Remote(self._call, f"{self._path}.{name}" if self._path else name)

    def __call__(self, *arguments: Any, **options: Any) -> Awaitable[Any]:
        return self._call(self._path, arguments, options)


class WorkerProcess:
    """A process with a `Worker`; `async with` starts and ends it."""

    def __init__(self) -> None:
        self.calls = cast(Worker, _Remote(self._call))
        """The worker. Its methods raise what they raise there, and WorkerDied."""
        self._numbers = count()
        self._pending: dict[int, asyncio.Future[tuple[bool, bytes]]] = {}
        self._end: Exception | None = None

    async def __aenter__(self) -> Self:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed when the worker has ended
        self._connection, theirs = Pipe()
        with theirs:
            self._process = await asyncio.create_subprocess_exec(
                *_COMMAND,
                str(theirs.fileno()),
                pass_fds=(theirs.fileno(),),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                env={**os.environ, "GRPC_VERBOSITY": "NONE"},
                # Ctrl-C in the terminal is for the parent, which ends its workers in its own time.
                start_new_session=True,
            )
        # Sends in order, and waits in place of the event loop while the worker is slow to read.
        self._sender = ThreadPoolExecutor(1, thread_name_prefix="to-worker")
        on_message(self._connection, self._receive)
        self._watcher = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *error: object) -> None:
        asyncio.get_running_loop().remove_reader(self._connection.fileno())
        self._sender.submit(self._connection.close)
        try:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), STOP_TIMEOUT_S)
        finally:
            if self._process.returncode is None:
                self._process.kill()
            await asyncio.wait((self._watcher,))
            self._sender.shutdown()
            self._log.close()

    @property
    def pid(self) -> int:
        """Id of the process."""
        return self._process.pid

    async def _call(self, path: str, arguments: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
        if self._end:
            raise self._end
        number, call = next(self._numbers), pickle.dumps((arguments, options))
        answer = self._pending[number] = asyncio.get_running_loop().create_future()
        # A worker that died makes its pending calls fail, whether they could be sent or not.
        self._sender.submit(self._connection.send, (number, path, call))
        try:
            is_right, pickled = await answer
        finally:
            del self._pending[number]
        try:
            value = pickle.loads(pickled)
        except Exception as error:
            raise TargetError(f"worker: {path}: its answer can't be read: {error}") from error
        if not is_right:
            raise value
        return value

    def _receive(self) -> None:
        try:
            number, is_right, pickled = self._connection.recv()
        except (EOFError, ConnectionError):
            asyncio.get_running_loop().remove_reader(self._connection.fileno())
            return
        answer = self._pending.get(number)
        if answer and not answer.done():
            answer.set_result((is_right, pickled))

    async def _watch(self) -> None:
        status = await self._process.wait()
        self._log.seek(0)
        tail = "\n".join(self._log.read().decode(errors="replace").splitlines()[-_TAIL_LINES:])
        self._end = WorkerDied(f"a worker ended with status {status}\n{tail}".rstrip())
        for answer in self._pending.values():
            if not answer.done():
                answer.set_exception(self._end)
