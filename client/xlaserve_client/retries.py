"""When a call that failed is made again."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, Final

from xlaserve_client.call import Call
from xlaserve_client.calls import IDEMPOTENT
from xlaserve_client.connection import MAX_ATTEMPTS
from xlaserve_client.errors import Overloaded, ServerError, Unavailable

FIRST_SPREAD_S: Final = 0.05
MAX_SPREAD_S: Final = 2.0
"""Clients that were refused together come again at different times, within this many seconds at most."""


@dataclass(frozen=True, slots=True)
class Retries:
    """Which calls are made again, of those that are idempotent."""

    overload: bool
    """Those that were refused for lack of room."""
    unavailable: bool
    """Those that found no server: in a fleet the next attempt goes to another one. Of one server gRPC retries them."""

    def pause_s(self, call: Call[Any], error: ServerError, attempt: int, left_s: float) -> float | None:
        """Returns how long to wait before a call is made again whose attempt, counted from 1, got `error`; None for
        never.

        A wait that would end after the call's deadline, `left_s` from now, is none.
        """
        if call.method not in IDEMPOTENT:
            return None
        if self.overload and isinstance(error, Overloaded):
            wait_s = _after_overload_s(error.retry_after_s, attempt)
        elif self.unavailable and isinstance(error, Unavailable):
            wait_s = _after_unavailable_s(attempt)
        elif isinstance(error, Unavailable) and error.retry_after_s is not None:  # it says that it will be back
            wait_s = _after_overload_s(error.retry_after_s, attempt)
        else:
            return None
        return wait_s if wait_s is not None and wait_s < left_s else None


def _after_overload_s(retry_after_s: float | None, attempt: int) -> float | None:
    """What the server asks for, and some more by chance, further apart with each attempt.

    Where the server names no time, attempts are bounded.
    """
    if retry_after_s is None and attempt >= MAX_ATTEMPTS:
        return None
    return (retry_after_s or 0.0) + random.uniform(0.0, min(FIRST_SPREAD_S * 2**attempt, MAX_SPREAD_S))


def _after_unavailable_s(attempt: int) -> float | None:
    """Nothing at first, as there may be another server, and then as gRPC does."""
    if attempt >= MAX_ATTEMPTS:
        return None
    return random.uniform(0.0, FIRST_SPREAD_S * 2 ** (attempt - 1)) if attempt > 1 else 0.0
