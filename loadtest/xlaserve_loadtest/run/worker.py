"""A worker process: a `Worker` whose methods its parent calls. `python -m xlaserve_loadtest.run.worker DESCRIPTOR`.

Calls come over a `multiprocessing.connection` as `(number, path of the method, arguments, options)` and run
concurrently; the answers are `(number, is_right, value)`. The connection's end ends the process, and with it all load:
no worker outlives its parent.
"""

from __future__ import annotations

import asyncio
import gc
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import uvloop

from xlaserve_loadtest.run.runner import Generator
from xlaserve_loadtest.schedule.payload import Request
from xlaserve_loadtest.targets.target import Array, GrpcTarget, ModelInfo, Target

if TYPE_CHECKING:
    from xlaserve_loadtest.targets.in_process import Described


@dataclass(frozen=True)
class Setup:
    """What a worker needs to know before its first block."""

    models: Mapping[str, ModelInfo]
    """Models by arm."""
    requests: Mapping[str, Sequence[Request]]
    """Requests by arm."""
    deadline_s: float
    offset: int = 0
    """Index of the request that it sends first."""


class Worker:
    """What the parent can call: these methods, and those of `generator`."""

    generator: Generator
    """Sends what `setup` gave it."""

    def __init__(self) -> None:
        self._target: Target | None = None
        self._setup: Setup | None = None

    async def load(self, config: str) -> Described:
        """Loads and compiles the models of `config` in this process, which then is its own target."""
        # The one place where the load tester runs the server's code, and only when asked to.
        from xlaserve_loadtest.targets.in_process import InProcessTarget  # noqa: PLC0415

        target = await asyncio.to_thread(InProcessTarget, config)
        self._target = target
        return target.described

    async def setup(self, setup: Setup) -> None:
        """Stores the requests to send."""
        target = self._target or GrpcTarget(deadline_s=setup.deadline_s)
        self._setup = setup
        self.generator = Generator(target=target, models=setup.models, requests=setup.requests, offset=setup.offset)
        # These objects stay: the garbage collector need not scan them between two requests.
        gc.collect()
        gc.freeze()

    async def outputs(self, arm: str, addresses: Sequence[str], count: int) -> list[list[Array]]:
        """Returns the outputs for an arm's first `count` requests. Raises TargetError."""
        assert self._setup is not None
        target = self._target or GrpcTarget(deadline_s=self._setup.deadline_s)
        async with target.connect(self._setup.models[arm], addresses) as connection:
            return [await connection.outputs(request) for request in self._setup.requests[arm][:count]]


async def serve(connection: Connection) -> None:
    """Answers calls until the connection ends."""
    loop, worker, is_over = asyncio.get_running_loop(), Worker(), asyncio.Event()
    calls: set[asyncio.Task[None]] = set()

    async def answer(number: int, path: str, arguments: Sequence[Any], options: Mapping[str, Any]) -> None:
        try:
            reply = (number, True, await attrgetter(path)(worker)(*arguments, **options))
        except Exception as error:
            reply = (number, False, error)
        # Blocks while the parent is slow to read, which it is not while it measures.
        connection.send(reply)

    def receive() -> None:
        try:
            call = asyncio.create_task(answer(*connection.recv()))
        except (EOFError, ConnectionError):
            loop.remove_reader(connection.fileno())
            is_over.set()
        else:
            calls.add(call)
            call.add_done_callback(calls.discard)

    on_message(connection, receive)
    await is_over.wait()


def on_message(connection: Connection, receive: Callable[[], None]) -> None:
    """Has the running loop call `receive` whenever there is something to receive."""
    asyncio.get_running_loop().add_reader(connection.fileno(), receive)
    # uvloop has just made it non-blocking, and a connection sends and receives whole messages.
    os.set_blocking(connection.fileno(), True)


if __name__ == "__main__":
    uvloop.run(serve(Connection(int(sys.argv[1]))))
