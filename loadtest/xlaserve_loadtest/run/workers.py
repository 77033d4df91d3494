"""The parent's side of worker processes."""

from __future__ import annotations

import asyncio
import os
import pickle
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from types import TracebackType
from typing import Any, Final, Self

from xlaserve_loadtest.run.runner import Live, Result, Task, Window
from xlaserve_loadtest.run.worker import LENGTH, Setup
from xlaserve_loadtest.targets.target import Array, TargetError

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


class WorkerProcess:
    """A process with a `Generator`; `async with` starts and ends it. Its methods are those of the generator."""

    def __init__(self) -> None:
        self._numbers = count()
        self._pending: dict[int, asyncio.Future[Any]] = {}
        self._end: Exception | None = None

    async def __aenter__(self) -> Self:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed when the worker has ended
        self._process = await asyncio.create_subprocess_exec(
            *_COMMAND,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=self._log,
            limit=1 << 20,
            env={**os.environ, "GRPC_VERBOSITY": "NONE"},
            # Ctrl-C in the terminal is for the parent, which ends its workers in its own time.
            start_new_session=True,
        )
        self._reader = asyncio.create_task(self._read())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        try:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), STOP_TIMEOUT_S)
        finally:
            if self._process.returncode is None:
                self._process.kill()
                await self._process.wait()
            self._reader.cancel()
            await asyncio.wait((self._reader,))
            self._log.close()

    @property
    def pid(self) -> int:
        """Id of the process."""
        return self._process.pid

    async def load(self, config: str) -> Any:
        """See `Worker.load`."""
        return await self._order("load", config)

    async def setup(self, setup: Setup) -> None:
        """See `Worker.setup`."""
        await self._order("setup", setup)

    async def outputs(self, arm: str, addresses: Sequence[str], requests: int) -> list[list[Array]]:
        """See `Worker.outputs`."""
        answer: list[list[Array]] = await self._order("outputs", arm, tuple(addresses), requests)
        return answer

    async def prepare(self, task: Task) -> None:
        """See `Generator`."""
        await self._order("prepare", task)

    async def begin(self, start_ns: int) -> None:
        """See `Generator`."""
        await self._order("begin", start_ns)

    async def warm(self) -> bool:
        """See `Generator`."""
        return bool(await self._order("warm"))

    async def open(self, window: Window) -> None:
        """See `Generator`."""
        await self._order("open", window)

    async def settled(self) -> None:
        """See `Generator`."""
        await self._order("settled")

    async def live(self) -> Live:
        """See `Generator`."""
        answer: Live = await self._order("live")
        return answer

    async def finish(self, *, at_once: bool = False) -> Result:
        """See `Generator`."""
        answer: Result = await self._order("finish", at_once=at_once)
        return answer

    async def _order(self, method: str, *arguments: Any, **options: Any) -> Any:
        if self._end:
            raise self._end
        assert self._process.stdin
        number = next(self._numbers)
        answer = self._pending[number] = asyncio.get_running_loop().create_future()
        data = pickle.dumps((number, method, arguments, options))
        try:
            self._process.stdin.write(LENGTH.pack(len(data)) + data)
            # A worker that died makes its pending calls fail.
            with suppress(ConnectionError):
                await self._process.stdin.drain()
            return await answer
        finally:
            self._pending.pop(number, None)

    async def _read(self) -> None:
        assert self._process.stdout
        with suppress(asyncio.IncompleteReadError):
            while True:
                (length,) = LENGTH.unpack(await self._process.stdout.readexactly(LENGTH.size))
                number, is_right, value = pickle.loads(await self._process.stdout.readexactly(length))
                answer = self._pending.get(number)
                if answer and not answer.done():
                    if is_right:
                        answer.set_result(value)
                    else:
                        answer.set_exception(value)
        status = await self._process.wait()
        self._end = WorkerDied(f"a worker ended with status {status}\n{self._log_tail()}".rstrip())
        for answer in self._pending.values():
            if not answer.done():
                answer.set_exception(self._end)

    def _log_tail(self) -> str:
        self._log.seek(0)
        return "\n".join(self._log.read().decode(errors="replace").splitlines()[-_TAIL_LINES:])
