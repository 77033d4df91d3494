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
    http: int
    """The status code of HTTP."""


INTERNAL: Final = Status("INTERNAL", 500)

STATUS: Final[dict[type[errors.XlaserveError], Status]] = {
    errors.ConfigError: INTERNAL,
    errors.InvalidArgument: Status("INVALID_ARGUMENT", 400),
    errors.InvalidImage: Status("INVALID_ARGUMENT", 400),
    errors.ImageTooLarge: Status("INVALID_ARGUMENT", 413),
    errors.MessageTooLarge: Status("INVALID_ARGUMENT", 413),
    errors.UnsupportedFeature: Status("UNIMPLEMENTED", 501),
    errors.ModelNotFound: Status("NOT_FOUND", 404),
    errors.NotFound: Status("NOT_FOUND", 404),
    errors.Unauthenticated: Status("UNAUTHENTICATED", 401),
    errors.PermissionDenied: Status("PERMISSION_DENIED", 403),
    errors.ModelNotReady: Status("UNAVAILABLE", 503),
    errors.ModelFailed: Status("FAILED_PRECONDITION", 503),
    errors.ExecutionFailed: INTERNAL,
    errors.OutOfDeviceMemory: Status("RESOURCE_EXHAUSTED", 503),
    errors.QueueFull: Status("RESOURCE_EXHAUSTED", 429),
    errors.LimitExceeded: Status("RESOURCE_EXHAUSTED", 429),
    errors.ProfilerBusy: Status("RESOURCE_EXHAUSTED", 429),
    errors.DeadlineUnreachable: Status("RESOURCE_EXHAUSTED", 429),
    errors.DeadlineExceeded: Status("DEADLINE_EXCEEDED", 504),
    errors.EngineLost: Status("UNAVAILABLE", 503),
    errors.ShuttingDown: Status("UNAVAILABLE", 503),
}
"""By error: every leaf of the tree of errors. test_status.py checks that none is missing."""

INTERNAL_MESSAGE: Final = "internal error; its details are in the server's log"
MAX_MESSAGE_LENGTH: Final = 800
"""A status travels in trailing metadata: a client that gets more than 8 KiB of it sees another error in its place."""
RETRY_AFTER: Final = "retry-after"
"""The header, of HTTP and in gRPC's trailing metadata, that says in how many whole seconds to come again."""
RETRY_AFTER_S: Final = 1.0
"""When a client may come again where nothing says when there will be room."""

_NO_ROOM_SOON: Final = (errors.DeadlineExceeded, errors.ShuttingDown)
"""Of what may be tried again, that which waiting does not help."""


def status_of(error: BaseException) -> tuple[Status, str]:
    """Returns the status and the message that a client gets for `error`."""
    status = STATUS.get(type(error)) if isinstance(error, errors.XlaserveError) else None
    if status is None or isinstance(error, errors.ConfigError):  # the operator's concern alone
        return INTERNAL, INTERNAL_MESSAGE
    message = str(error)
    return status, message if len(message) <= MAX_MESSAGE_LENGTH else f"{message[:MAX_MESSAGE_LENGTH]} ..."


def retry_after_s(error: BaseException) -> float | None:
    """Returns in how many seconds a client may come again; None where waiting is no help, or another server may be."""
    if not isinstance(error, errors.OverloadError):
        return None
    if error.retry_after_s is None and not isinstance(error, _NO_ROOM_SOON):
        return RETRY_AFTER_S
    return error.retry_after_s


def explain(error: Exception) -> tuple[Status, str]:
    """Returns what `status_of` does; logs an unexpected error, and clears the tracebacks of any."""
    if not isinstance(error, errors.XlaserveError):
        log.error("unexpected error", exc_info=error)
    errors.clear_tracebacks(error)
    return status_of(error)
