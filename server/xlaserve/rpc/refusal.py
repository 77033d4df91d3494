"""How a call is answered with an error."""

from __future__ import annotations

import asyncio
from typing import NoReturn

import grpc

from xlaserve.errors import InvalidArgument
from xlaserve.rpc.context import Context
from xlaserve.status import explain


async def refuse(context: Context, error: Exception) -> NoReturn:
    """Ends the call with the status of `error`; without one where the client is gone."""
    if _is_of_wire(error):
        raise asyncio.CancelledError from None
    try:
        await abort(context, error)
    except grpc.aio.InternalError:
        raise asyncio.CancelledError from None


async def abort(context: Context, error: Exception) -> NoReturn:
    """Ends the call with the status of `error`. Raises AbortError, or what gRPC raises where it can't write."""
    status, message = explain(error)
    await context.abort(grpc.StatusCode[status.grpc], message)
    raise AssertionError("abort raises")


def no_message() -> InvalidArgument:
    """Returns the error for bytes that could not be parsed."""
    return InvalidArgument("message", "the protobuf message of this method, its text in UTF-8", "other bytes")


def _is_of_wire(error: Exception) -> bool:
    """Returns whether gRPC could not write: the client is gone, and nobody is left to be told."""
    if isinstance(error, ExceptionGroup):
        return all(map(_is_of_wire, error.exceptions))
    return isinstance(error, grpc.aio.InternalError)
