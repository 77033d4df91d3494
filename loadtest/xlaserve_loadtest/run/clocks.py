"""The clocks of other machines, compared with the coordinator's by round trips."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from xlaserve_loadtest.record.requests import Rows
from xlaserve_loadtest.run.generator import Generator
from xlaserve_loadtest.run.sender import Clock, Result, Task, Window

ROUND_TRIPS: Final = 16
MAX_COMPARING_S: Final = 0.5
"""Over a slow network there are fewer round trips, but one at least."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """The time of a remote clock at a moment of the coordinator's clock."""

    at_ns: int
    """Of the coordinator's clock."""
    offset_ns: int
    """The remote clock's time, less `at_ns`."""
    error_ns: int
    """How far `offset_ns` may be off at most: half of a round trip."""


async def compare(read: Callable[[], Awaitable[int]], clock: Clock = time.monotonic_ns) -> Comparison:
    """Compares the remote clock that `read` reads with `clock`, by the shortest of several round trips.

    The remote clock was read after the question was sent and before the answer was there, and so no further from the
    middle of the two than half of the round trip, however unequal the ways are.
    """
    began_ns, best = clock(), None
    for _ in range(ROUND_TRIPS):
        sent_ns = clock()
        remote_ns = await read()
        received_ns = clock()
        half_ns = (received_ns - sent_ns + 1) // 2
        if best is None or half_ns < best.error_ns:
            best = Comparison(sent_ns + half_ns, remote_ns - sent_ns - half_ns, half_ns)
        if received_ns - began_ns > MAX_COMPARING_S * 1e9:
            break
    assert best is not None
    return best


class RemoteGenerator:
    """A generator on another machine: takes and returns times of the coordinator's clock.

    All times of a request are shifted by the offset at the moment when it was due: latencies stay differences of one
    clock. Between the comparisons before and after a block the drift is taken as even.
    """

    def __init__(
        self, generator: Generator, read: Callable[[], Awaitable[int]], name: str, clock: Clock = time.monotonic_ns
    ) -> None:
        self._generator = generator
        self._read = read
        self._name = name
        self._clock = clock
        self._before = self._after = Comparison(0, 0, 0)

    def __getattr__(self, method: str) -> Any:
        """Returns a method that neither takes nor returns times."""
        return getattr(self._generator, method)

    async def prepare(self, task: Task) -> int:
        """Opens a fresh connection for a block, and compares the clocks."""
        delay_ns = await self._generator.prepare(task)
        self._before = await compare(self._read, self._clock)
        return delay_ns + 2 * self._before.error_ns

    async def begin(self, start_ns: int) -> None:
        """Starts sending at `start_ns`."""
        await self._generator.begin(start_ns + self._before.offset_ns)

    async def open(self, window: Window) -> None:
        """Requests due in `window` are the measured ones."""
        first_ns, last_ns = window
        await self._generator.open((first_ns + self._before.offset_ns, last_ns + self._before.offset_ns))

    async def finish(self, *, at_once: bool = False) -> Result:
        """Ends the block, compares the clocks again, and returns what was done."""
        result = await self._generator.finish(at_once=at_once)
        before, after = self._before, await compare(self._read, self._clock)
        self._after = after
        result.generator = self._name
        result.clock_error_ms = max(before.error_ns, after.error_ns) / 1e6
        result.clock_drift_ms = (after.offset_ns - before.offset_ns) / 1e6
        return result

    async def rows(self, first: int) -> Rows:
        """Returns requests of the block that was finished last, from the index `first` on."""
        rows = await self._generator.rows(first)
        shifts_ns = _offsets_at(rows["scheduled_ns"], self._before, self._after)
        for column in ("scheduled_ns", "start_ns", "end_ns"):
            rows[column] -= shifts_ns
        return rows


def _offsets_at(remote_ns: NDArray[np.int64], before: Comparison, after: Comparison) -> NDArray[np.int64]:
    """Returns the remote clock's offsets when it showed `remote_ns`."""
    began_ns, ended_ns = before.at_ns + before.offset_ns, after.at_ns + after.offset_ns
    share = (remote_ns - began_ns) / (ended_ns - began_ns)
    offsets: NDArray[np.int64] = before.offset_ns + np.rint((after.offset_ns - before.offset_ns) * share).astype(
        np.int64
    )
    return offsets
