"""Runs of batches that no request waits for: in a lane that was acquired for them, or while the device is idle."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from xlaserve.engine.batching.lanes import Lanes
from xlaserve.engine.batching.worker import Batch, Run, Worker


async def run_in_lane(
    batch: Batch, lanes: Lanes, worker: Worker, on_end: Callable[[Run | BaseException], object]
) -> Run:
    """Runs `batch` in a lane that was acquired for it. Raises the errors of its executable.

    When the batch ends `on_end` is called and the lane given back, even if its caller was cancelled.
    """
    loop = asyncio.get_running_loop()
    ran: asyncio.Future[Run | BaseException] = loop.create_future()

    def end(run: Run | BaseException) -> None:
        on_end(run)
        lanes.release()
        if not ran.done():
            ran.set_result(run)

    try:
        worker.submit(batch, lambda run: loop.call_soon_threadsafe(end, run))
    except BaseException as error:  # the worker was stopped
        end(error)
        raise
    run = await ran
    if isinstance(run, BaseException):
        raise run
    return run


class IdleRuns:
    """One model's batches on an idle device. They are not observed, charged to no queue, and count as no demand."""

    def __init__(self, lanes: Lanes, worker: Worker) -> None:
        self._lanes = lanes
        self._worker = worker
        self._running = 0
        self._ended = asyncio.Event()

    async def run(self, batch: Batch) -> Run | None:
        """Runs `batch` if nothing else runs or waits for a lane; None otherwise. Raises the errors of its
        executable."""
        if not self._lanes.acquire_idle():
            return None
        self._running += 1
        return await run_in_lane(batch, self._lanes, self._worker, self._end)

    def _end(self, run: Run | BaseException) -> None:
        self._running -= 1
        self._ended.set()

    async def drain(self) -> None:
        """Returns once no batch runs; the caller makes sure that none begins."""
        while self._running:
            self._ended.clear()
            await self._ended.wait()
