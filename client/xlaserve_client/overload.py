"""When a call that an overloaded server refused is made again."""

from __future__ import annotations

import random
from typing import Any, Final

from xlaserve_client.call import Call
from xlaserve_client.calls import IDEMPOTENT
from xlaserve_client.connection import MAX_ATTEMPTS
from xlaserve_client.errors import Overloaded, ServerError

FIRST_SPREAD_S: Final = 0.05
MAX_SPREAD_S: Final = 2.0
"""Clients that were refused together come again at different times, within this many seconds at most."""


def pause_s(call: Call[Any], error: ServerError, attempt: int, left_s: float) -> float | None:
    """Returns how long to wait before a call is made again whose attempt, counted from 1, got `error`; None for never.

    That is what the server asks for, and some more by chance, further apart with each attempt. A wait that would end
    after the call's deadline, `left_s` from now, is none. Where the server names no time, attempts are bounded.
    """
    if not isinstance(error, Overloaded) or call.method not in IDEMPOTENT:
        return None
    if error.retry_after_s is None and attempt >= MAX_ATTEMPTS:
        return None
    spread_s = min(FIRST_SPREAD_S * 2**attempt, MAX_SPREAD_S)
    wait_s = (error.retry_after_s or 0.0) + random.uniform(0.0, spread_s)
    return wait_s if wait_s < left_s else None
