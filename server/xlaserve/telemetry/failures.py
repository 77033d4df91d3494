"""The last requests that failed, for the page at `/`."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from heapq import merge
from typing import Final, NamedTuple

from xlaserve.admission.caller import CURRENT
from xlaserve.telemetry import request_context
from xlaserve.telemetry.access_log import LEVELS, MAX_TEXT_LENGTH

KEPT: Final = 20
"""Failures that are kept of the server's own, and as many of those that clients caused."""
MAX_REASON_LENGTH: Final = 300


class Failure(NamedTuple):
    """A request that failed. Its texts may be a client's."""

    at_s: float
    """When, in seconds since the epoch."""
    method: str
    status: str
    reason: str
    model: str
    """As the client named it; empty where no model was asked for, or before that was known."""
    caller: str
    request_id: str
    total_s: float | None
    """What it took, where that was measured."""


class Failures:
    """Keeps the last failures: a flood of what clients did wrong leaves those of the server in their place."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._of_server: deque[Failure] = deque(maxlen=KEPT)
        self._of_clients: deque[Failure] = deque(maxlen=KEPT)

    def __iter__(self) -> Iterator[Failure]:
        """Yields them, the newest first."""
        both = reversed(self._of_server), reversed(self._of_clients)
        return merge(*both, key=lambda failure: failure.at_s, reverse=True)

    @property
    def kept(self) -> tuple[list[Failure], list[Failure]]:
        """Those of the server and those of clients, the newest last."""
        return [*self._of_server], [*self._of_clients]

    def note(self, method: str, status: str, reason: str, *, model: str = "", seconds: float | None = None) -> None:
        """Keeps one, of the call that is answered here."""
        request = request_context.current()
        kept = self._of_server if status in LEVELS else self._of_clients
        kept.append(
            Failure(
                self._clock(),
                method,
                status,
                reason[:MAX_REASON_LENGTH],
                model[:MAX_TEXT_LENGTH],
                CURRENT.get().name[:MAX_TEXT_LENGTH],
                "" if request is None else request.id,
                seconds,
            )
        )
