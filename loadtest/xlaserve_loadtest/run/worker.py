"""A worker process: a `Worker` whose methods are called. `python -m xlaserve_loadtest.run.worker DESCRIPTOR`.

Calls come over a `multiprocessing.connection` as `(number, path of the method, pickled arguments and options)` and run
concurrently; the answers are `(number, is_right, pickled value)`. Each is read whatever it holds, so that a call always
ends. The connection's end ends the process, and with it all load, and so does the end of its stdin: a worker outlives
neither its parent nor the caller, which may be on another machine.
"""

from __future__ import annotations

import asyncio
import gc
import os
import pickle
import select
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

import uvloop

from xlaserve_loadtest.run.environment import Machine
from xlaserve_loadtest.run.generator import Generator
from xlaserve_loadtest.schedule.payload import Request
from xlaserve_loadtest.targets.protocols import ServerTarget
from xlaserve_loadtest.targets.references import NONE
from xlaserve_loadtest.targets.target import Array, ModelInfo, Target, TargetError

if TYPE_CHECKING:
    from xlaserve_loadtest.targets.in_process import Described

_POLL_S: Final = 1.0
_GRACE_S: Final = 1.0
"""How long the event loop has to end the process."""
_HANG_UP: Final = getattr(select, "POLLRDHUP", 0)
"""The event of `poll` for the end of the other side; POLLHUP is always reported."""


@dataclass(frozen=True)
class Setup:
    """The facts that a worker needs before its first block: models and requests by arm."""

    models: Mapping[str, Sequence[ModelInfo]]
    requests: Mapping[str, Sequence[Request]]
    deadline_s: float
    offset: int = 0
    """Index of the request that it sends first; the worker's part of the seed where requests are drawn."""
    sample_seed: int | None = None
    """Seed with which requests are drawn at random; None sends them in turn."""
    is_distinct: bool = False
    """Whether no request is like another."""


class Worker:
    """The interface of a worker to its caller: these methods, and those of `generator`."""

    generator: Generator
    """Sends what `setup` gave it."""

    def __init__(self) -> None:
        self._target: Target | None = None
        self._setup: Setup | None = None

    async def clock(self) -> int:
        """Returns the monotonic clock's nanoseconds."""
        return time.monotonic_ns()

    async def machine(self) -> Machine:
        """Describes the machine that this runs on."""
        return await asyncio.to_thread(Machine.of_this)

    async def load(self, config: str) -> Described:
        """Loads and compiles the models of `config` in this process, which then is its own target."""
        # The one place where the load tester runs the server's code, and only when asked to.
        from xlaserve_loadtest.targets.in_process import InProcessTarget  # noqa: PLC0415

        target = await asyncio.to_thread(InProcessTarget, config)
        self._target = target
        return target.described

    async def setup(self, setup: Setup) -> None:
        """Stores the requests to send."""
        target = self._target or ServerTarget(setup.deadline_s)
        self._setup = setup
        self.generator = Generator(
            target=target,
            models=setup.models,
            requests=setup.requests,
            offset=setup.offset,
            sample_seed=setup.sample_seed,
            is_distinct=setup.is_distinct,
        )
        # These objects stay: the garbage collector need not scan them between two requests.
        gc.collect()
        gc.freeze()

    async def outputs(
        self, arm: str, addresses: Sequence[str], count: int, most_bytes: int | None = None
    ) -> list[list[Array]]:
        """Returns the outputs for an arm's first `count` requests, or as many as fit in `most_bytes`, but one.

        Raises TargetError.
        """
        assert self._setup is not None
        target = self._target or ServerTarget(self._setup.deadline_s)
        found: list[list[Array]] = []
        held_bytes = 0
        async with target.connect(self._setup.models[arm], addresses, NONE) as connection:
            for request in self._setup.requests[arm][:count]:
                outputs = await connection.outputs(request)
                held_bytes += sum(output.nbytes for output in outputs)
                if found and most_bytes is not None and held_bytes > most_bytes:
                    break
                found.append(outputs)
        return found


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
        if is_over.is_set():
            return  # the process ends, which is the answer to all calls
        with suppress(OSError):  # the caller has gone
            # Blocks while the caller is slow to read, which it is not while it measures.
            connection.send((number, *_pickled(path, is_right, value)))

    def receive(message: Any) -> None:
        call = asyncio.create_task(answer(*message))
        calls.add(call)
        call.add_done_callback(calls.discard)

    _exit_after_hang_up(connection.fileno(), sys.stdin.fileno())
    on_message(connection, receive, is_over.set)
    loop.add_reader(sys.stdin.fileno(), is_over.set)
    await is_over.wait()


def _exit_after_hang_up(*descriptors: int) -> None:
    """Has a thread end the process after the other side of a descriptor has gone, however busy the loop is."""
    ends = select.poll()
    for descriptor in descriptors:
        ends.register(descriptor, _HANG_UP)

    def watch() -> None:
        ends.poll()
        time.sleep(_GRACE_S)
        os._exit(0)

    threading.Thread(target=watch, name="from-peer-end", daemon=True).start()


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


def on_message(
    connection: Connection, receive: Callable[[Any], None], on_end: Callable[[], None]
) -> Callable[[], None]:
    """Has the running loop call `receive` with each message, and `on_end` once no more come; returns what stops it.

    A thread waits, as uvloop does not say that a connection was reset.
    """
    loop, is_over, is_read = asyncio.get_running_loop(), threading.Event(), threading.Semaphore(0)

    def read() -> None:
        try:
            if not is_over.is_set():
                receive(connection.recv())
        except (EOFError, OSError):
            is_over.set()
            on_end()
        finally:
            is_read.release()

    def watch() -> None:
        with suppress(OSError, RuntimeError):  # the connection is closed, or the loop
            while not is_over.is_set():
                if connection.poll(_POLL_S):
                    loop.call_soon_threadsafe(read)
                    is_read.acquire()

    threading.Thread(target=watch, name="from-peer", daemon=True).start()
    return is_over.set


if __name__ == "__main__":
    uvloop.run(serve(Connection(int(sys.argv[1]))))
