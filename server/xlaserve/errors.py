"""Every error that xlaserve raises on purpose.

A message is written for the client: it names the field, what was expected and what came, and never a path or a trace.
The status that each protocol's clients get is in `STATUS`.
"""

from __future__ import annotations

import logging
from typing import Final, NamedTuple, Self

log = logging.getLogger(__name__)

_SHOWN: Final = 48
"""Characters of a value that a refusal shows."""


class XlaserveError(Exception):
    """Root of the tree. `str(error)` is safe to send to a client."""


class ConfigError(XlaserveError):
    """The configuration can't be used: names the field, the value and what was expected. Never reaches a client."""


class RequestError(XlaserveError):
    """The client sent something wrong."""

    def name_image(self, name: str) -> None:
        """Has the message name the image that is meant, such as `images[2]`, in place of `image`."""
        message = str(self)
        if message.startswith("image:"):
            self.args = (f"{name}{message.removeprefix('image')}",)


class InvalidArgument(RequestError):
    """A field of the request is not what was expected."""

    def __init__(self, field: str, expected: str, got: object) -> None:
        super().__init__(f"{field}: expected {expected}, got {got}")
        self.field = field

    @classmethod
    def with_message(cls, field: str, message: str) -> Self:
        """Returns an error whose message is there already, as another process has raised it."""
        error = cls(field, "", "")
        error.args = (message,)
        return error


class InvalidImage(RequestError):
    """Bytes that are not a readable JPEG, PNG or WebP image."""


class ImageTooLarge(RequestError):
    """An image has more encoded bytes or decoded pixels than the server accepts."""


class MessageTooLarge(RequestError):
    """A message has more bytes than the server accepts."""


class UnsupportedFeature(RequestError):
    """The request names a protocol extension that this server does not speak."""


class ModelNotFound(RequestError):
    """No model of that name and version is in the repository."""


class NotFound(RequestError):
    """A service, socket or other thing that the request names does not exist."""


class Unauthenticated(RequestError):
    """Nobody knows who calls."""


class PermissionDenied(RequestError):
    """Whoever calls may not do that."""


class ModelError(XlaserveError):
    """The request is fine but the model can't answer it."""


class ModelNotReady(ModelError):
    """The model is loading, compiling, draining or unloaded."""


class LoadEnded(ModelError):
    """A load was ended by an unload of its model."""


class ModelFailed(ModelError):
    """The model failed to load or to warm up; the reason is in the repository's index."""

    lacks_mode: bool = False
    """Whether this installation or device can't run a mode, whatever the model. Not sent to others."""

    def __init__(self, message: str, *, lacks_mode: bool = False) -> None:
        super().__init__(message)
        if lacks_mode:
            self.lacks_mode = True


class ExecutionFailed(ModelError):
    """Running a batch raised; the details are in the log only."""


class OutOfDeviceMemory(ModelError):
    """The device's memory did not hold a batch; a smaller one may do."""


class OverloadError(XlaserveError):
    """Nothing is wrong with the request, but it can't be served now."""

    reason = "overload"
    """The label of the error in metrics."""

    def __init__(self, message: str = "", retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        """Seconds until the same request is likely to be served, where that can be said."""


class DeadlineUnreachable(OverloadError):
    """Too much waits for the request to be answered before its deadline: it was refused on arrival."""

    reason = "deadline"


class QueueFull(OverloadError):
    """A queue is at its bound: of images, bytes or changes of a model."""

    reason = "queue_full"


class LimitExceeded(OverloadError):
    """The caller asks for more than its limits allow."""

    reason = "limit"


class ProfilerBusy(OverloadError):
    """Another profile is being recorded."""

    reason = "profiler_busy"


class DeadlineExceeded(OverloadError):
    """The job could not be run before its deadline."""

    reason = "late"


class EngineLost(OverloadError):
    """The process that ran the model has ended, and with it what it was doing."""

    reason = "engine_lost"


class ShuttingDown(OverloadError):
    """The server is draining and takes no new work."""

    reason = "shutting_down"


def clear_tracebacks(error: BaseException) -> None:
    """Clears the traceback of an error and those of its causes, which hold a request's images.

    Some of their frames are in cycles with the error, and a hundred failed requests must not keep their images until
    the next garbage collection.
    """
    left: list[BaseException] = [error]
    while left:
        one = left.pop()
        one.__traceback__ = None
        left += [link for link in (one.__cause__, one.__context__) if link is not None and link.__traceback__]
        if isinstance(one, BaseExceptionGroup):
            left += one.exceptions


def shown(value: object) -> str:
    """Returns what a refusal shows of a value that a client sent, however large it is."""
    if isinstance(value, str):
        return repr(value[:_SHOWN])
    if isinstance(value, (bool, int, float)):
        return repr(value)[:_SHOWN]
    if isinstance(value, list):
        return "a list" if value else "an empty list"
    if isinstance(value, dict):
        return "an object" if value else "an empty object"
    if isinstance(value, (bytes, bytearray, memoryview)):  # a long string of JSON that may be base64
        return f"a long text, taken for {len(value)} bytes in base64"
    return "nothing" if value is None else "another value"


class Status(NamedTuple):
    """The status of an error in each protocol."""

    grpc: str
    """The name of a status code of gRPC; in metrics as well."""
    http: int
    """The status code of HTTP."""


INTERNAL: Final = Status("INTERNAL", 500)

STATUS: Final[dict[type[XlaserveError], Status]] = {
    ConfigError: INTERNAL,
    InvalidArgument: Status("INVALID_ARGUMENT", 400),
    InvalidImage: Status("INVALID_ARGUMENT", 400),
    ImageTooLarge: Status("INVALID_ARGUMENT", 413),
    MessageTooLarge: Status("INVALID_ARGUMENT", 413),
    UnsupportedFeature: Status("UNIMPLEMENTED", 501),
    ModelNotFound: Status("NOT_FOUND", 404),
    NotFound: Status("NOT_FOUND", 404),
    Unauthenticated: Status("UNAUTHENTICATED", 401),
    PermissionDenied: Status("PERMISSION_DENIED", 403),
    ModelNotReady: Status("UNAVAILABLE", 503),
    LoadEnded: Status("ABORTED", 409),
    ModelFailed: Status("FAILED_PRECONDITION", 503),
    ExecutionFailed: INTERNAL,
    OutOfDeviceMemory: Status("RESOURCE_EXHAUSTED", 503),
    QueueFull: Status("RESOURCE_EXHAUSTED", 429),
    LimitExceeded: Status("RESOURCE_EXHAUSTED", 429),
    ProfilerBusy: Status("RESOURCE_EXHAUSTED", 429),
    DeadlineUnreachable: Status("RESOURCE_EXHAUSTED", 429),
    DeadlineExceeded: Status("DEADLINE_EXCEEDED", 504),
    EngineLost: Status("UNAVAILABLE", 503),
    ShuttingDown: Status("UNAVAILABLE", 503),
}
"""Statuses by class of error, for every class without subclasses; `test_status.py` checks that none is missing."""

INTERNAL_MESSAGE: Final = "internal error; its details are in the server's log"
MAX_MESSAGE_LENGTH: Final = 800
"""A status travels in trailing metadata: a client that gets more than 8 KiB of it sees another error in its place."""
RETRY_AFTER: Final = "retry-after"
"""The header, of HTTP and in gRPC's trailing metadata, that says in how many whole seconds to come again."""
RETRY_AFTER_S: Final = 1.0
"""When a client may come again where nothing says when there will be room."""

_NO_ROOM_SOON: Final = (DeadlineExceeded, ShuttingDown)
"""Overloads in which waiting does not help, though another server may."""


def status_of(error: BaseException) -> tuple[Status, str]:
    """Returns the status and the message that a client gets for `error`."""
    status = STATUS.get(type(error)) if isinstance(error, XlaserveError) else None
    if status is None or isinstance(error, ConfigError):  # the operator's concern alone
        return INTERNAL, INTERNAL_MESSAGE
    message = str(error)
    return status, message if len(message) <= MAX_MESSAGE_LENGTH else f"{message[:MAX_MESSAGE_LENGTH]} ..."


def retry_after_s(error: BaseException) -> float | None:
    """Returns in how many seconds a client may come again; None where waiting is no help, or another server may be."""
    if not isinstance(error, OverloadError):
        return None
    if error.retry_after_s is None and not isinstance(error, _NO_ROOM_SOON):
        return RETRY_AFTER_S
    return error.retry_after_s


def explain(error: Exception) -> tuple[Status, str]:
    """Returns what `status_of` does; logs an unexpected error, and clears the tracebacks of any."""
    if not isinstance(error, XlaserveError):
        log.error("unexpected error", exc_info=error)
    clear_tracebacks(error)
    return status_of(error)
