"""Calls the `Worker` at the other end of a connection, as if it were here."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count
from multiprocessing.connection import Connection
from typing import Any, cast

from xlaserve_loadtest.run.worker import Worker, on_message
from xlaserve_loadtest.targets.target import TargetError


class WorkerDied(TargetError):
    """A worker process ended early, or can't be reached any more."""


class _Remote:
    """Stands for an object in a worker: its methods are called there, those of its attributes too."""

    def __init__(self, call: Callable[..., Awaitable[Any]], path: str = "") -> None:
        self._call = call
        self._path = path

    def __getattr__(self, name: str) -> _Remote:
        return _Remote(self._call, f"{self._path}.{name}" if self._path else name)

    def __call__(self, *arguments: Any, **options: Any) -> Awaitable[Any]:
        return self._call(self._path, arguments, options)


class Caller:
    """Sends calls and receives their answers, on the running loop. `on_lost` is called when the connection ends."""

    def __init__(self, connection: Connection, on_lost: Callable[[], None] = lambda: None) -> None:
        self.worker = cast(Worker, _Remote(self._call))
        """The worker. Its methods raise what they raise there, and what `end` was given."""
        self._connection = connection
        self._numbers = count()
        self._pending: dict[int, asyncio.Future[tuple[bool, bytes]]] = {}
        self._sent: Future[None] | None = None
        self._end: Exception | None = None
        # Sends in order, and waits in place of the event loop while the worker is slow to read.
        self._sender = ThreadPoolExecutor(1, thread_name_prefix="to-worker")
        self._stop = on_message(connection, self._receive, on_lost)

    @property
    def is_sending(self) -> bool:
        """Whether the worker has not read all that was sent to it."""
        return self._sent is not None and not self._sent.done()

    def end(self, error: Exception) -> None:
        """Makes calls fail, pending ones too. The first error stays."""
        self._end = self._end or error
        for answer in self._pending.values():
            if not answer.done():
                answer.set_exception(self._end)

    def hang_up(self) -> None:
        """Closes the connection once everything is sent; what comes from now on is not read."""
        self._stop()
        self._sender.submit(self._connection.close)

    def shutdown(self) -> None:
        """Waits until the connection is closed."""
        self._sender.shutdown()

    async def _call(self, path: str, arguments: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
        if self._end:
            raise self._end
        number, call = next(self._numbers), pickle.dumps((arguments, options))
        answer = self._pending[number] = asyncio.get_running_loop().create_future()
        # A worker that died makes its pending calls fail, whether they could be sent or not.
        self._sent = self._sender.submit(self._connection.send, (number, path, call))
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

    def _receive(self, message: tuple[int, bool, bytes]) -> None:
        number, is_right, pickled = message
        answer = self._pending.get(number)
        if answer and not answer.done():
            answer.set_result((is_right, pickled))
