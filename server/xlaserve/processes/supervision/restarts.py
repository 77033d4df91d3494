"""When a process that has ended is started again, and when there is no use in it any more."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """Counts the ends of a role's processes within the last `window_s`.

    After the first `at_once` of them another is started at once, after the next in `first_wait_s`, and then in twice
    as long each time, `longest_wait_s` at most. After more than `most` nothing is started any more. Waits are shortened
    by up to the share `jitter`, so that processes that end together don't come back together.

    One that was ready for at least `longest_wait_s` is replaced at once, and the waits begin anew: it does not end more
    often than others are started. Towards `most` it counts like any other.
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
        """When, in seconds."""
        self._ready_since: float | None = None
        self._lasted_until = -math.inf
        """When the last one ended that was ready for long."""

    def became_ready(self, now: float) -> None:
        """The process is ready, or another that has taken its place, or says so again."""
        if self._ready_since is None:
            self._ready_since = now

    def wait_s(self, now: float) -> float | None:
        """One has ended: returns in how many seconds to start another, None for not at all."""
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
