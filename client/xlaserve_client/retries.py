"""Retries: which failed calls are made again, and when."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import Any, Final

from xlaserve_client.call import Call
from xlaserve_client.calls import IDEMPOTENT
from xlaserve_client.connection import MAX_ATTEMPTS
from xlaserve_client.errors import Overloaded, ServerError, Unavailable

FIRST_SPREAD_S: Final = 0.05
MAX_SPREAD_S: Final = 2.0
"""Largest random part of a pause in seconds, so that clients that were refused together don't retry together."""


@dataclass(frozen=True, slots=True)
class Retries:
    """The idempotent calls that are made again."""

    overload: bool
    """Whether calls are made again that were refused for overload."""
    unavailable: bool
    """Whether calls are made again that got UNAVAILABLE without a time to retry, as in a fleet, where the next attempt
    goes to another server. gRPC itself retries calls to a single server."""

    def pause_s(self, call: Call[Any], error: ServerError, attempt: int, left_s: float) -> float | None:
        """Returns the seconds until the next attempt at a call whose attempt, counted from 1, got `error`; None for no
        further attempt.

        There is none, either, where the pause would end after the call's deadline, `left_s` from now.
        """
        if call.method not in IDEMPOTENT:
            return None
        if self.overload and isinstance(error, Overloaded):
            wait_s = _after_overload_s(error.retry_after_s, attempt)
        elif self.unavailable and isinstance(error, Unavailable):
            wait_s = _after_unavailable_s(attempt)
        elif isinstance(error, Unavailable) and error.retry_after_s is not None:  # the server will be back
            wait_s = _after_overload_s(error.retry_after_s, attempt)
        else:
            return None
        return wait_s if wait_s is not None and wait_s < left_s else None


class Attempts:
    """The attempts at one call before its deadline."""

    def __init__(self, retries: Retries, call: Call[Any], deadline_s: float) -> None:
        self._retries = retries
        self._call = call
        self._give_up_at = time.monotonic() + deadline_s
        self._attempt = 1
        """Number of the current attempt, from 1."""

    @property
    def left_s(self) -> float:
        """Seconds until the call's deadline."""
        return self._give_up_at - time.monotonic()

    def pause_s(self, error: ServerError) -> float | None:
        """Ends an attempt that got `error`. Returns the seconds until the next one; None for no further attempt."""
        pause_s = self._retries.pause_s(self._call, error, self._attempt, self.left_s)
        self._attempt += 1
        return pause_s


def _after_overload_s(retry_after_s: float | None, attempt: int) -> float | None:
    """Returns the seconds that the server asks for plus a random pause, whose range grows with each attempt.

    None after MAX_ATTEMPTS where the server names no time.
    """
    if retry_after_s is None and attempt >= MAX_ATTEMPTS:
        return None
    return (retry_after_s or 0.0) + random.uniform(0.0, min(FIRST_SPREAD_S * 2**attempt, MAX_SPREAD_S))


def _after_unavailable_s(attempt: int) -> float | None:
    """Returns 0 after the first attempt, as there may be another server, and then random pauses as gRPC's."""
    if attempt >= MAX_ATTEMPTS:
        return None
    return random.uniform(0.0, FIRST_SPREAD_S * 2 ** (attempt - 1)) if attempt > 1 else 0.0
