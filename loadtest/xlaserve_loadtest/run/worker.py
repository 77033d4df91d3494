"""A worker process: a `Generator` that is called over a pipe. `python -m xlaserve_loadtest.run.worker`.

Calls come on stdin as frames (a length, then a pickled `(number, method, arguments)`) and run concurrently; results go
to stdout as `(number, is_right, value)`. The end of stdin ends the process, and with it all load: no worker outlives
its parent.
"""

from __future__ import annotations

import asyncio
import gc
import os
import pickle
import struct
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import uvloop

from xlaserve_loadtest.run.runner import Generator
from xlaserve_loadtest.schedule.payload import Request
from xlaserve_loadtest.targets.target import Array, GrpcTarget, ModelInfo, Target

LENGTH: Final = struct.Struct("<Q")


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
    """What the parent can call, in addition to every method of `Generator`."""

    def __init__(self) -> None:
        self._target: Target | None = None
        self._setup: Setup | None = None
        self._generator: Generator | None = None

    async def load(self, config: str) -> Any:
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
        self._generator = Generator(target=target, models=setup.models, requests=setup.requests, offset=setup.offset)
        # These objects stay: the garbage collector need not scan them between two requests.
        gc.collect()
        gc.freeze()

    async def outputs(self, arm: str, addresses: Sequence[str], count: int) -> list[list[Array]]:
        """Returns the outputs for an arm's first `count` requests. Raises TargetError."""
        assert self._setup is not None
        target = self._target or GrpcTarget(deadline_s=self._setup.deadline_s)
        async with target.connect(self._setup.models[arm], addresses) as connection:
            return [await connection.outputs(request) for request in self._setup.requests[arm][:count]]

    async def carry_out(self, method: str, arguments: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
        """Runs one call."""
        return await getattr(self if hasattr(type(self), method) else self._generator, method)(*arguments, **options)


async def _main(output: int) -> None:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=1 << 20)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    worker = Worker()

    async def answer(number: int, method: str, arguments: tuple[Any, ...], options: Mapping[str, Any]) -> None:
        try:
            reply = (number, True, await worker.carry_out(method, arguments, options))
        except Exception as error:
            reply = (number, False, error)
        data = pickle.dumps(reply)
        frame = memoryview(LENGTH.pack(len(data)) + data)
        # Blocks while the parent is slow to read, which it is not while it measures.
        while frame:
            frame = frame[os.write(output, frame) :]

    orders: set[asyncio.Task[None]] = set()
    with suppress(asyncio.IncompleteReadError):
        while True:
            (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
            order = asyncio.create_task(answer(*pickle.loads(await reader.readexactly(length))))
            orders.add(order)
            order.add_done_callback(orders.discard)


def main() -> None:
    """Works until stdin ends."""
    # What libraries print must not mix with the results.
    output = os.dup(1)
    os.dup2(2, 1)
    uvloop.run(_main(output))


if __name__ == "__main__":
    main()
