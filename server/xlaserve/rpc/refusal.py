"""How a call is answered with an error."""

from __future__ import annotations

import asyncio
import logging
from typing import NoReturn

import grpc

from xlaserve.errors import InvalidArgument, XlaserveError
from xlaserve.rpc.context import Context
from xlaserve.status import status_of

log = logging.getLogger(__name__)


async def refuse(context: Context, error: Exception) -> NoReturn:
    """Ends the call with the status of `error`; without one where the client is gone."""
    if _is_of_wire(error):
        raise asyncio.CancelledError from None
    try:
        await context.abort(*explain(error))
    except grpc.aio.InternalError:
        raise asyncio.CancelledError from None
    raise AssertionError("abort raises")


def explain(error: Exception) -> tuple[grpc.StatusCode, str]:
    """Returns the status and the message for a client; an unexpected error is logged.

    Clears its traceback and those of its causes: their frames hold the request's images, some of them in cycles
    with the error, and a hundred refused requests must not keep theirs until the next garbage collection.
    """
    if not isinstance(error, XlaserveError):
        log.error("unexpected error", exc_info=error)
    _clear(error)
    status, message = status_of(error)
    return grpc.StatusCode[status.grpc], message


def _clear(error: BaseException) -> None:
    left: list[BaseException] = [error]
    while left:
        one = left.pop()
        one.__traceback__ = None
        left += [link for link in (one.__cause__, one.__context__) if link is not None and link.__traceback__]
        if isinstance(one, BaseExceptionGroup):
            left += one.exceptions


def no_message() -> InvalidArgument:
    """Returns the error for bytes that could not be parsed."""
    return InvalidArgument("message", "the protobuf message of this method, its text in UTF-8", "other bytes")


def _is_of_wire(error: Exception) -> bool:
    """Returns whether gRPC could not write: the client is gone, and nobody is left to be told."""
    if isinstance(error, ExceptionGroup):
        return all(map(_is_of_wire, error.exceptions))
    return isinstance(error, grpc.aio.InternalError)
