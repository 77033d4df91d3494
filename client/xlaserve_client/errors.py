"""Every error that the client raises for an answer, or the lack of one.

    ClientError
    ├── InvalidReply            the server's answer can't be understood
    └── ServerError             the call ended with a gRPC status other than OK
        ├── InvalidRequest      INVALID_ARGUMENT: a field, a tensor or an image is not what was expected
        ├── ModelNotFound       NOT_FOUND: no model of that name or version
        ├── ModelFailed         FAILED_PRECONDITION: the model failed to load
        ├── Overloaded          RESOURCE_EXHAUSTED: the queue is full, or the message too large
        ├── Unavailable         UNAVAILABLE: not reachable, not ready, or draining
        └── DeadlineExceeded    DEADLINE_EXCEEDED: no answer in time

Other statuses raise ServerError itself. Wrong arguments raise TypeError or ValueError and unreadable files OSError,
before anything is sent.
"""

from __future__ import annotations

from typing import Final

import grpc


class ClientError(Exception):
    """Root of the tree."""


class InvalidReply(ClientError):
    """The server's answer can't be understood: a server that speaks another protocol, or a defect."""


class ServerError(ClientError):
    """The call ended with a gRPC status other than OK."""

    def __init__(self, target: str, status: grpc.StatusCode, message: str) -> None:
        super().__init__(f"{target}: {status.name}: {message}")
        self.target = target
        self.status = status
        self.message = message
        """The server's message; gRPC's own where the server was not reached."""


class InvalidRequest(ServerError):
    """A field, a tensor or an image is not what was expected."""


class ModelNotFound(ServerError):
    """No model of that name or version."""


class ModelFailed(ServerError):
    """The model failed to load."""


class Overloaded(ServerError):
    """The queue is full, or the message too large."""


class Unavailable(ServerError):
    """The server can't be reached or is draining, or the model is not ready."""


class DeadlineExceeded(ServerError):
    """No answer in time."""


_BY_STATUS: Final = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.NOT_FOUND: ModelNotFound,
    grpc.StatusCode.FAILED_PRECONDITION: ModelFailed,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Overloaded,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
}


def from_status(target: str, status: grpc.StatusCode, message: str | None) -> ServerError:
    """Returns the error that stands for `status`."""
    return _BY_STATUS.get(status, ServerError)(target, status, message or "no message")
