"""Whether a generator got the time that it needs: what its event loop and the scheduler did to it.

A generator that is starved measures itself: requests leave late, and answers wait until it takes them.
"""

from __future__ import annotations

import asyncio
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import psutil

_INTERVAL_S: Final = 0.005
_TIMER_MS: Final = 1.0
"""The resolution of the event loop's timers: no sleep ends more exactly."""


@dataclass(frozen=True, slots=True)
class Strain:
    """Delays of one generator in a block."""

    wait_ms: float = 0.0
    """Mean time that an event waited until the loop came to it, as an event at any moment would have."""
    longest_ms: float = 0.0
    """The longest time in which the loop came to nothing."""
    preemptions: int = 0
    """How often the scheduler took the processor away (involuntary context switches)."""
    steal: float = 0.0
    """Share of the machine's processor time that its hypervisor gave to others."""

    @classmethod
    def of(cls, generators: Sequence[Strain]) -> Strain:
        """Returns what held up several generators on one machine."""
        return cls(
            wait_ms=sum(own.wait_ms for own in generators) / len(generators),
            longest_ms=max(own.longest_ms for own in generators),
            preemptions=sum(own.preemptions for own in generators),
            steal=max(own.steal for own in generators),
        )

    @classmethod
    def worst(cls, machines: Sequence[Strain]) -> Strain:
        """Returns the worst of several machines in each respect."""
        return cls(
            wait_ms=max((own.wait_ms for own in machines), default=0.0),
            longest_ms=max((own.longest_ms for own in machines), default=0.0),
            preemptions=sum(own.preemptions for own in machines),
            steal=max((own.steal for own in machines), default=0.0),
        )


class StrainWatch:
    """Watches the running loop from `start` to `stop`. `clock` counts monotonic nanoseconds."""

    def __init__(self, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._clock = clock
        self._task: asyncio.Task[None] | None = None
        self._held_ms2 = 0.0
        self._longest_ms = 0.0
        self._began_ns = 0
        self._preempted = 0
        self._times: Any = None

    def start(self) -> None:
        """Begins to watch."""
        self._began_ns = self._clock()
        self._preempted = _preemptions()
        self._times = psutil.cpu_times()
        self._task = asyncio.create_task(self._watch())

    def stop(self) -> Strain:
        """Ends watching, and returns what was seen."""
        if self._task:
            self._task.cancel()
        watched_ms = (self._clock() - self._began_ns) / 1e6
        return Strain(
            # An event at any moment falls into a stretch of length h with probability h / watched, and waits h / 2.
            wait_ms=self._held_ms2 / 2 / watched_ms if watched_ms > 0 else 0.0,
            longest_ms=self._longest_ms,
            preemptions=_preemptions() - self._preempted,
            steal=stolen_share(self._times, psutil.cpu_times()),
        )

    async def _watch(self) -> None:
        while True:
            due_ns = self._clock() + round(_INTERVAL_S * 1e9)
            await asyncio.sleep(_INTERVAL_S)
            held_ms = max((self._clock() - due_ns) / 1e6 - _TIMER_MS, 0.0)
            self._held_ms2 += held_ms**2
            self._longest_ms = max(self._longest_ms, held_ms)


def _preemptions() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


def stolen_share(before: Any, after: Any) -> float:
    """Returns the share of the machine's processor time that its hypervisor gave to others between two looks.

    Both are `psutil.cpu_times()`; 0 where the system does not count it.
    """
    spent_s = sum(after) - sum(before)
    return (getattr(after, "steal", 0.0) - getattr(before, "steal", 0.0)) / spent_s if spent_s > 0 else 0.0
