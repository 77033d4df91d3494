"""How a call is answered with an error."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from typing import Final, NoReturn

import grpc
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status

from xlaserve.errors import RETRY_AFTER, InvalidArgument, explain, retry_after_s
from xlaserve.wire.grpc.context import Context, name_answer

MAX_PUSHBACK_MS: Final = 2**31 - 1
"""The largest that gRPC reads."""


async def refuse(
    context: Context, error: Exception, on_failed: Callable[[Exception], None] = lambda error: None
) -> NoReturn:
    """Ends the call with the status of `error`, after `on_failed`; without either where the client is gone."""
    if _is_of_wire(error):
        raise asyncio.CancelledError from None
    on_failed(error)
    try:
        await abort(context, error)
    except grpc.aio.InternalError:
        raise asyncio.CancelledError from None


async def abort(context: Context, error: Exception) -> NoReturn:
    """Ends the call with the status of `error`. Raises AbortError, or what gRPC raises where it can't write."""
    status, message = explain(error)
    code, wait_s = grpc.StatusCode[status.grpc], retry_after_s(error)
    name_answer(context)
    if wait_s is None:
        await context.abort(code, message)
    else:
        await context.abort(code, message, (*(context.trailing_metadata() or ()), *_come_again(code, message, wait_s)))
    raise AssertionError("abort raises")


def _come_again(code: grpc.StatusCode, message: str, wait_s: float) -> Sequence[tuple[str, str | bytes]]:
    """Returns trailing metadata that say when to come again: to people, to gRPC's own retries, and as Google's APIs do.

    Clients compare the code and the message of `google.rpc.Status` with the call's.
    """
    status = Status(code=code.value[0], message=message)
    delay = RetryInfo()
    delay.retry_delay.FromNanoseconds(round(wait_s * 1e9))
    status.details.add().Pack(delay)
    return (
        (RETRY_AFTER, str(math.ceil(wait_s))),
        ("grpc-retry-pushback-ms", str(min(math.ceil(wait_s * 1000), MAX_PUSHBACK_MS))),
        ("grpc-status-details-bin", status.SerializeToString()),
    )


def no_message() -> InvalidArgument:
    """Returns the error for bytes that could not be parsed."""
    return InvalidArgument("message", "the protobuf message of this method, its text in UTF-8", "other bytes")


def _is_of_wire(error: Exception) -> bool:
    """Returns whether gRPC could not write: the client is gone, and nobody is left to be told."""
    if isinstance(error, ExceptionGroup):
        return all(map(_is_of_wire, error.exceptions))
    return isinstance(error, grpc.aio.InternalError)
