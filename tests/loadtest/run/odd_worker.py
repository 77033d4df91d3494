"""A worker process whose answers don't travel."""

from __future__ import annotations

import asyncio
import sys
from multiprocessing.connection import Connection

import uvloop

from xlaserve_loadtest.run import worker


class Unreadable(Exception):
    """Can be pickled, but not read back: its constructor takes more than its arguments."""

    def __init__(self, what: str, *, why: str) -> None:
        super().__init__(what)


class Unpicklable(Exception):
    def __reduce__(self) -> str:
        raise TypeError("it can't be pickled")


class OddWorker:
    async def right(self, given: object = None) -> str:
        return "right"

    async def value(self) -> object:
        return asyncio.get_running_loop()

    async def unreadable_value(self) -> object:
        return Unreadable("what", why="why")

    async def unpicklable_error(self) -> None:
        raise Unpicklable("what went wrong")

    async def unreadable_error(self) -> None:
        raise Unreadable("what went wrong", why="why")

    async def busy(self) -> None:
        print("busy", flush=True)
        while True:
            pass

    async def cancelled(self) -> None:
        raise asyncio.CancelledError


def main() -> None:
    worker.Worker = OddWorker  # type: ignore[assignment, misc]
    uvloop.run(worker.serve(Connection(int(sys.argv[1]))))
