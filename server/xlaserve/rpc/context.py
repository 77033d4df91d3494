"""What grpcio gives each call."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import grpc

Context = grpc.aio.ServicerContext[Any, Any]


def deadline(context: Context, clock: Callable[[], float]) -> float:
    """Returns the call's deadline in seconds of `clock`; infinity where it has none."""
    remaining_s = context.time_remaining()
    return math.inf if remaining_s is None else clock() + remaining_s
