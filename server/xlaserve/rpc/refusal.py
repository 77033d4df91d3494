"""How a call is answered with an error."""

from __future__ import annotations

import asyncio
from typing import NoReturn

import grpc

from xlaserve import status
from xlaserve.errors import InvalidArgument
from xlaserve.rpc.context import Context


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
    """Returns the status and the message for a client, as `status.explain` does."""
    found, message = status.explain(error)
    return grpc.StatusCode[found.grpc], message


def no_message() -> InvalidArgument:
    """Returns the error for bytes that could not be parsed."""
    return InvalidArgument("message", "the protobuf message of this method, its text in UTF-8", "other bytes")


def _is_of_wire(error: Exception) -> bool:
    """Returns whether gRPC could not write: the client is gone, and nobody is left to be told."""
    if isinstance(error, ExceptionGroup):
        return all(map(_is_of_wire, error.exceptions))
    return isinstance(error, grpc.aio.InternalError)
