"""The errors that the client raises for an answer, or for its absence.

    ClientError
    ├── InvalidReply            the server's answer can't be read
    └── ServerError             the call ended with a gRPC status other than OK
        ├── InvalidRequest      INVALID_ARGUMENT: a field, a tensor or an image is not what was expected
        ├── ModelNotFound       NOT_FOUND: no model of that name or version
        ├── Unauthenticated     UNAUTHENTICATED: the credentials are missing or not valid
        ├── PermissionDenied    PERMISSION_DENIED: this caller may not do that
        ├── ModelFailed         FAILED_PRECONDITION: the model failed to load
        ├── Overloaded          RESOURCE_EXHAUSTED: a queue is full, a caller's limit reached, or the message too large
        ├── Unavailable         UNAVAILABLE: not reachable, not ready, or draining
        └── DeadlineExceeded    DEADLINE_EXCEEDED: no answer in time

Other statuses raise ServerError itself. Wrong arguments raise TypeError or ValueError and unreadable files OSError,
before anything is sent.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Final

import grpc
from google.protobuf.message import DecodeError
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status


class ClientError(Exception):
    """The base class of all errors of the client."""


class InvalidReply(ClientError):
    """The server's answer can't be read: the server has another protocol, or a defect."""


class ServerError(ClientError):
    """The call ended with a gRPC status other than OK."""

    def __init__(self, target: str, status: grpc.StatusCode, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(f"{target}: {status.name}: {message}")
        self.target = target
        self.status = status
        self.message = message
        """The server's message; gRPC's own, or ours, where the server was not reached."""
        self.retry_after_s = retry_after_s
        """Seconds after which the server asks to try again; None where it does not."""


class InvalidRequest(ServerError):
    """A field, a tensor or an image is not what was expected."""


class ModelNotFound(ServerError):
    """No model of that name or version."""


class Unauthenticated(ServerError):
    """The credentials are missing or not valid."""


class PermissionDenied(ServerError):
    """This caller may not do that."""


class ModelFailed(ServerError):
    """The model failed to load."""


class Overloaded(ServerError):
    """A queue is full, a caller's limit reached, or the message too large."""


class Unavailable(ServerError):
    """The server can't be reached or is draining, or the model is not ready."""


class DeadlineExceeded(ServerError):
    """No answer in time."""


_HTTP1: Final = "Trying to connect an http1.x server"
"""Part of gRPC's text where a port answers HTTP/1."""
_BY_STATUS: Final = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.NOT_FOUND: ModelNotFound,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDenied,
    grpc.StatusCode.FAILED_PRECONDITION: ModelFailed,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Overloaded,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
}


def reason_of(details: str | None) -> str:
    """Returns why a call failed, by what gRPC says of it."""
    if details and _HTTP1 in details:
        return (
            "this port speaks HTTP/1, as those of the HTTP API (8000 by default) and of metrics (8002) do;"
            " the gRPC port is grpc_port, 8001 by default"
        )
    return details or "no message"


def from_call(target: str, call: Any) -> ServerError:
    """Returns the error for a failed call of gRPC, of its synchronous or asyncio API."""
    status = call.code()
    retry_after_s = _retry_after_s(call.trailing_metadata() or ())
    return _BY_STATUS.get(status, ServerError)(target, status, reason_of(call.details()), retry_after_s)


def _retry_after_s(metadata: Iterable[tuple[str, Any]]) -> float | None:
    """Returns the seconds in `google.rpc.RetryInfo`; None where the metadata has none."""
    retry = RetryInfo()
    for key, value in metadata:
        if key == "grpc-status-details-bin":
            with suppress(DecodeError):
                if any(detail.Unpack(retry) for detail in Status.FromString(value).details):
                    return max(0.0, float(retry.retry_delay.ToNanoseconds() / 1e9))
    return None
