"""A worker process: a `Worker` whose methods its parent calls. `python -m xlaserve_loadtest.run.worker DESCRIPTOR`.

Calls come over a `multiprocessing.connection` as `(number, path of the method, pickled arguments and options)` and run
concurrently; the answers are `(number, is_right, pickled value)`. Each is read whatever it holds, so that a call always
ends. The connection's end ends the process, and with it all load: no worker outlives its parent.
"""

from __future__ import annotations

import asyncio
import gc
import os
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from operator import attrgetter
from typing import TYPE_CHECKING

import uvloop

from xlaserve_loadtest.run.runner import Generator
from xlaserve_loadtest.schedule.payload import Request
from xlaserve_loadtest.targets.target import Array, GrpcTarget, ModelInfo, Target, TargetError

if TYPE_CHECKING:
    from xlaserve_loadtest.targets.in_process import Described


@dataclass(frozen=True)
class Setup:
    """What a worker needs to know before its first block: models and requests by arm."""

    models: Mapping[str, Sequence[ModelInfo]]
    requests: Mapping[str, Sequence[Request]]
    deadline_s: float
    offset: int = 0
    """Index of the request that it sends first; the worker's part of the seed where requests are drawn."""
    sample_seed: int | None = None
    """Seed with which requests are drawn at random; None sends them in turn."""


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
        self.generator = Generator(
            target=target,
            models=setup.models,
            requests=setup.requests,
            offset=setup.offset,
            sample_seed=setup.sample_seed,
        )
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

    async def answer(number: int, path: str, call: bytes) -> None:
        value: object
        try:
            arguments, options = pickle.loads(call)
            value, is_right = await attrgetter(path)(worker)(*arguments, **options), True
        except asyncio.CancelledError:  # which at the parent would be its own
            value, is_right = TargetError(f"worker: {path} was cancelled"), False
        except Exception as error:
            value, is_right = error, False
        with suppress(ConnectionError):  # the parent has gone
            # Blocks while the parent is slow to read, which it is not while it measures.
            connection.send((number, *_pickled(path, is_right, value)))

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


def _pickled(path: str, is_right: bool, value: object) -> tuple[bool, bytes]:
    """Pickles an answer; one that can't be read back becomes a TargetError that names the method at `path`."""
    try:
        pickled = pickle.dumps(value)
        if not is_right:
            pickle.loads(pickled)  # an error may be pickled and not read back
    except Exception as error:
        kind = type(value).__name__
        what = f"its answer, a {kind}, can't be sent: {error}" if is_right else f"{kind}: {value}"
        return False, pickle.dumps(TargetError(f"worker: {path}: {what}"))
    return is_right, pickled


def on_message(connection: Connection, receive: Callable[[], None]) -> None:
    """Has the running loop call `receive` whenever there is something to receive."""
    asyncio.get_running_loop().add_reader(connection.fileno(), receive)
    # uvloop has just made it non-blocking, and a connection sends and receives whole messages.
    os.set_blocking(connection.fileno(), True)


if __name__ == "__main__":
    uvloop.run(serve(Connection(int(sys.argv[1]))))
