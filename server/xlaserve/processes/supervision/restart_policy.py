"""The delay after which a process that has ended is started again, and the limit of restarts."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """The delays between restarts, by the number of ends of a role's processes within the last `window_s`.

    After each of the first `at_once` ends another process is started at once, after the next in `first_wait_s`, and
    then in twice as long each time, `longest_wait_s` at most. After more than `most` ends no process is started any
    more. Delays are shortened by up to the share `jitter`, so that processes that end together do not start together.

    A process that was ready for at least `longest_wait_s` is replaced at once, and the delays begin anew. Its end
    counts towards `most` like any other.
    """

    window_s: float = 60.0
    at_once: int = 1
    first_wait_s: float = 0.1
    longest_wait_s: float = 5.0
    most: int = 10
    jitter: float = 0.25


class Restarts:
    """The ends of one role's processes. `draw` gives random numbers from 0 to 1."""

    def __init__(self, policy: RestartPolicy, draw: Callable[[], float] = random.random) -> None:
        self.policy = policy
        self._draw = draw
        self._ends: deque[float] = deque()
        """The times of ends, in seconds."""
        self._ready_since: float | None = None
        self._lasted_until = -math.inf
        """The time of the last end of a process that was ready for `longest_wait_s`."""

    def became_ready(self, now: float) -> None:
        """Notes that a process fills the role and is ready. Later calls before its end change nothing."""
        if self._ready_since is None:
            self._ready_since = now

    def wait_s(self, now: float) -> float | None:
        """Counts an end, and returns the delay before the next start, in seconds; None for no start at all."""
        policy, ends = self.policy, self._ends
        ends.append(now)
        while ends[0] <= now - policy.window_s:
            ends.popleft()
        if self._ready_since is not None and now - self._ready_since >= policy.longest_wait_s:
            self._lasted_until = now
        self._ready_since = None
        if len(ends) > policy.most:
            return None
        doublings = sum(end > self._lasted_until for end in ends) - policy.at_once - 1
        if doublings < 0:
            return 0.0
        return min(policy.first_wait_s * 2.0**doublings, policy.longest_wait_s) * (1 - policy.jitter * self._draw())
