"""The one table from errors to gRPC statuses."""

from __future__ import annotations

from typing import Final

from grpc import StatusCode

from xlaserve import errors

STATUS: Final[dict[type[errors.XlaserveError], StatusCode]] = {
    errors.ConfigError: StatusCode.INTERNAL,
    errors.InvalidArgument: StatusCode.INVALID_ARGUMENT,
    errors.InvalidImage: StatusCode.INVALID_ARGUMENT,
    errors.ImageTooLarge: StatusCode.INVALID_ARGUMENT,
    errors.UnsupportedFeature: StatusCode.UNIMPLEMENTED,
    errors.ModelNotFound: StatusCode.NOT_FOUND,
    errors.ModelNotReady: StatusCode.UNAVAILABLE,
    errors.ModelFailed: StatusCode.FAILED_PRECONDITION,
    errors.ExecutionFailed: StatusCode.INTERNAL,
    errors.OutOfDeviceMemory: StatusCode.RESOURCE_EXHAUSTED,
    errors.QueueFull: StatusCode.RESOURCE_EXHAUSTED,
    errors.ProfilerBusy: StatusCode.RESOURCE_EXHAUSTED,
    errors.DeadlineExceeded: StatusCode.DEADLINE_EXCEEDED,
    errors.ShuttingDown: StatusCode.UNAVAILABLE,
}
"""Every leaf of the tree of errors; a test demands it."""

INTERNAL_MESSAGE: Final = "internal error; its details are in the server's log"
MAX_MESSAGE_LENGTH: Final = 800
"""A status travels in trailing metadata: a client that gets more than 8 KiB of it sees another error in its place."""


def status_of(error: BaseException) -> tuple[StatusCode, str]:
    """Returns the status and the message that a client gets for `error`."""
    status = STATUS.get(type(error)) if isinstance(error, errors.XlaserveError) else None
    if status is None or isinstance(error, errors.ConfigError):  # which is the operator's business
        return StatusCode.INTERNAL, INTERNAL_MESSAGE
    message = str(error)
    return status, message if len(message) <= MAX_MESSAGE_LENGTH else f"{message[:MAX_MESSAGE_LENGTH]} ..."
