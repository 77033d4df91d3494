"""The one table from errors to the statuses of the protocols."""

from __future__ import annotations

import logging
from typing import Final, NamedTuple

from xlaserve import errors

log = logging.getLogger(__name__)


class Status(NamedTuple):
    """What an error is called."""

    grpc: str
    """The name of a status code of gRPC; in metrics as well."""


INTERNAL: Final = Status("INTERNAL")

STATUS: Final[dict[type[errors.XlaserveError], Status]] = {
    errors.ConfigError: INTERNAL,
    errors.InvalidArgument: Status("INVALID_ARGUMENT"),
    errors.InvalidImage: Status("INVALID_ARGUMENT"),
    errors.ImageTooLarge: Status("INVALID_ARGUMENT"),
    errors.UnsupportedFeature: Status("UNIMPLEMENTED"),
    errors.ModelNotFound: Status("NOT_FOUND"),
    errors.NotFound: Status("NOT_FOUND"),
    errors.ModelNotReady: Status("UNAVAILABLE"),
    errors.ModelFailed: Status("FAILED_PRECONDITION"),
    errors.ExecutionFailed: INTERNAL,
    errors.OutOfDeviceMemory: Status("RESOURCE_EXHAUSTED"),
    errors.QueueFull: Status("RESOURCE_EXHAUSTED"),
    errors.ProfilerBusy: Status("RESOURCE_EXHAUSTED"),
    errors.DeadlineExceeded: Status("DEADLINE_EXCEEDED"),
    errors.ShuttingDown: Status("UNAVAILABLE"),
}
"""By error: every leaf of the tree of errors. test_status.py checks that none is missing."""

INTERNAL_MESSAGE: Final = "internal error; its details are in the server's log"
MAX_MESSAGE_LENGTH: Final = 800
"""A status travels in trailing metadata: a client that gets more than 8 KiB of it sees another error in its place."""


def status_of(error: BaseException) -> tuple[Status, str]:
    """Returns the status and the message that a client gets for `error`."""
    status = STATUS.get(type(error)) if isinstance(error, errors.XlaserveError) else None
    if status is None or isinstance(error, errors.ConfigError):  # the operator's concern alone
        return INTERNAL, INTERNAL_MESSAGE
    message = str(error)
    return status, message if len(message) <= MAX_MESSAGE_LENGTH else f"{message[:MAX_MESSAGE_LENGTH]} ..."


def explain(error: Exception) -> tuple[Status, str]:
    """Returns what `status_of` does; logs an unexpected error.

    Clears its traceback and those of its causes: their frames hold the request's images, some of them in cycles
    with the error, and a hundred refused requests must not keep theirs until the next garbage collection.
    """
    if not isinstance(error, errors.XlaserveError):
        log.error("unexpected error", exc_info=error)
    _clear(error)
    return status_of(error)


def _clear(error: BaseException) -> None:
    left: list[BaseException] = [error]
    while left:
        one = left.pop()
        one.__traceback__ = None
        left += [link for link in (one.__cause__, one.__context__) if link is not None and link.__traceback__]
        if isinstance(one, BaseExceptionGroup):
            left += one.exceptions
