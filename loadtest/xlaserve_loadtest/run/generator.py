"""A `Generator` sends requests, one block after the other.

There is one in each worker process. `crew` coordinates several of them: it tells each when to begin, when the window of
measurement is open, and when to end.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from itertools import cycle, islice
from typing import Final

import numpy as np

from xlaserve_loadtest.record.requests import REQUEST, Rows
from xlaserve_loadtest.run.sender import Clock, Live, Result, Sender, Task, Window, listed
from xlaserve_loadtest.schedule.arrivals import Places
from xlaserve_loadtest.schedule.payload import Request
from xlaserve_loadtest.targets.references import NONE, Reference, References
from xlaserve_loadtest.targets.target import ModelInfo, Target

DRAWS: Final = 1024
"""Indices of requests that are drawn at a time."""
MAX_ROWS: Final = 65_536
"""Requests that are passed on at a time: a long block's, passed on at once, would be in memory several times."""
SPIN_S: Final = 0.0015
"""How long before a send is due the clock is polled, without an alarm: the event loop's timers are a millisecond
coarse."""


class Generator:
    """Sends requests to `target`. `clock` counts monotonic nanoseconds; where it is virtual, `spin_s` must be 0."""

    def __init__(
        self,
        *,
        target: Target,
        models: Mapping[str, Sequence[ModelInfo]],
        requests: Mapping[str, Sequence[Request]],
        offset: int = 0,
        sample_seed: int | None = None,
        is_distinct: bool = False,
        clock: Clock = time.monotonic_ns,
        spin_s: float = SPIN_S,
    ) -> None:
        self._target = target
        self._models = models
        self._requests = requests
        self._is_distinct = is_distinct
        # Of closed loops. Workers begin at different requests, so that they don't send the same at the same time.
        self._feeds = {
            arm: islice(cycle(sequence), offset, None)
            if sample_seed is None
            else drawn(sequence, np.random.default_rng((sample_seed, offset)))
            for arm, sequence in requests.items()
        }
        self._references = {arm: References() for arm in requests}
        self._in_use = NONE
        """References of the present block's arm."""
        self._clock = clock
        self._spin_s = spin_s
        self._sender: Sender | None = None
        self._rows: Rows = np.empty(0, REQUEST)
        self._stack = AsyncExitStack()

    async def learn(self, arm: str, references: Sequence[Reference]) -> None:
        """Has answers compared with these, which the first of an arm's requests got alone."""
        self._references[arm].learn(self._requests[arm], references)

    async def prepare(self, task: Task) -> int:
        """Opens a fresh connection for a block; returns the nanoseconds that a call to this generator takes."""
        self._rows = np.empty(0, REQUEST)
        self._in_use = references = self._references[task.arm]
        references.reset()
        connection = await self._stack.enter_async_context(
            self._target.connect(self._models[task.arm], task.targets, references)
        )
        feed = self._feeds[task.arm] if task.requests is None else scheduled(self._requests[task.arm], task.requests)
        feed = stamped(feed) if self._is_distinct else feed
        self._sender = Sender(task, connection, feed, self._clock, self._spin_s)
        return 0

    async def begin(self, start_ns: int) -> None:
        """Starts sending at `start_ns`."""
        self._sending.begin(start_ns)

    async def warm(self) -> bool:
        """Waits until a request of every slot has ended; returns whether anything was answered yet."""
        await self._sending.is_warm.wait()
        return self._sending.answered > 0

    async def open(self, window: Window) -> None:
        """Requests due in `window` are the measured ones; may be called again to move its end."""
        self._sending.window = window

    async def settled(self) -> None:
        """Waits until the window is over and every request of it has ended."""
        await self._sending.is_settled.wait()

    async def live(self) -> Live:
        """Returns the answers since the last call."""
        return self._sending.live()

    async def finish(self, *, at_once: bool = False) -> Result:
        """Ends the block and closes the connection. Requests under way are waited for, unless `at_once`."""
        sender, self._sender = self._sender, None
        try:
            if sender is None:
                return Result()
            result = await sender.finish(at_once=at_once)
            self._rows = sender.rows()
            result.compared, result.differing = self._in_use.compared, self._in_use.differing
            return result
        finally:
            await self._stack.aclose()

    async def rows(self, first: int) -> Rows:
        """Returns requests of the block that was finished last, from the index `first` on, MAX_ROWS at most."""
        return self._rows[first : first + MAX_ROWS]

    @property
    def _sending(self) -> Sender:
        assert self._sender is not None
        return self._sender


def stamped(requests: Iterator[Request]) -> Iterator[Request]:
    """Yields requests that no server has seen before, not in an earlier run either."""
    first = secrets.randbits(63)
    for number, request in enumerate(requests, start=first):
        yield request.stamped(number)


def scheduled(requests: Sequence[Request], places: Places) -> Iterator[Request]:
    """Returns the requests at these places of a sequence that repeats."""
    return map(requests.__getitem__, listed(places % len(requests)))


def drawn(requests: Sequence[Request], random: np.random.Generator) -> Iterator[Request]:
    """Yields requests drawn at random with replacement, without an end."""
    while True:
        for index in random.integers(len(requests), size=DRAWS).tolist():
            yield requests[index]
