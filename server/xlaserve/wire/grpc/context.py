"""The context that grpcio gives each call, typed."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote

import grpc

from xlaserve.admission.address import network_of
from xlaserve.telemetry import request_context
from xlaserve.telemetry.request_context import RequestContext

Context = grpc.aio.ServicerContext[Any, Any]


def address(context: Context) -> str:
    """Returns what the client's address is counted as."""
    host = context.peer().partition(":")[2].rpartition(":")[0]
    return network_of(unquote(host).strip("[]"))


def name_answer(context: Context) -> RequestContext | None:
    """Has the call's answer carry its request id, and its trace where it has one. Returns what names the call."""
    if (request := request_context.current()) is not None:
        context.set_trailing_metadata(request.headers)
    return request


def deadline(context: Context, clock: Callable[[], float]) -> float:
    """Returns the call's deadline in seconds of `clock`; infinity where it has none."""
    remaining_s = context.time_remaining()
    return math.inf if remaining_s is None else clock() + remaining_s
