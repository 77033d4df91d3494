"""Calls that last until either side ends them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from xlaserve.wire.shared.call import shutting_down


class OpenStreams:
    """The streams that are open, for a server that stops to give each a status.

    Where a connection just closes, a client loses the messages that it has not read yet.
    """

    def __init__(self) -> None:
        self._open: dict[asyncio.Task[Any] | None, asyncio.Timeout] = {}

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Runs what a task does for a stream; `end` makes that a ShuttingDown."""
        task = asyncio.current_task()
        async with asyncio.timeout(None) as limit:
            self._open[task] = limit
            try:
                yield
            except asyncio.CancelledError:
                if limit.expired():
                    raise shutting_down() from None
                raise
            finally:
                del self._open[task]

    async def end(self, timeout_s: float) -> None:
        """Ends every stream and returns once their tasks are over, or after `timeout_s`."""
        tasks = [task for task in self._open if task is not None]
        for limit in self._open.values():
            limit.reschedule(asyncio.get_running_loop().time())
        if tasks:
            await asyncio.wait(tasks, timeout=timeout_s)
