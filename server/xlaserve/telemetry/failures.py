"""The last requests that failed, for the page at `/`."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from heapq import merge
from typing import Final, NamedTuple

from xlaserve.telemetry import request_context
from xlaserve.telemetry.access_log import LEVELS, MAX_TEXT_LENGTH

KEPT: Final = 20
"""Failures of the server that are kept, and failures caused by clients that are kept."""
MAX_REASON_LENGTH: Final = 300


class Failure(NamedTuple):
    """A request that failed. Its texts may be a client's."""

    at_s: float
    """Time of the failure, in seconds since the epoch."""
    method: str
    status: str
    reason: str
    model: str
    """The model's name as the client sent it; empty where the request names no model, or failed before it was read."""
    caller: str
    request_id: str
    total_s: float | None
    """Seconds from arrival to failure, where they were measured."""


class Failures:
    """The last failures of the server and the last failures caused by clients, kept apart so that a flood of wrong
    requests pushes out none of the server's."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._of_server: deque[Failure] = deque(maxlen=KEPT)
        self._of_clients: deque[Failure] = deque(maxlen=KEPT)

    def __iter__(self) -> Iterator[Failure]:
        """Yields all failures, the newest first."""
        both = reversed(self._of_server), reversed(self._of_clients)
        return merge(*both, key=lambda failure: failure.at_s, reverse=True)

    @property
    def kept(self) -> tuple[list[Failure], list[Failure]]:
        """Failures of the server, then failures caused by clients; in each list the newest last."""
        return [*self._of_server], [*self._of_clients]

    def note(
        self, method: str, status: str, reason: str, *, caller: str = "", model: str = "", seconds: float | None = None
    ) -> None:
        """Adds a failure of the call of `caller` that the current task answers."""
        request = request_context.current()
        kept = self._of_server if status in LEVELS else self._of_clients
        kept.append(
            Failure(
                self._clock(),
                method,
                status,
                reason[:MAX_REASON_LENGTH],
                model[:MAX_TEXT_LENGTH],
                caller[:MAX_TEXT_LENGTH],
                "" if request is None else request.id,
                seconds,
            )
        )
