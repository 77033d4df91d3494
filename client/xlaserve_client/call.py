"""Calls: a request, its method, and the function that reads its response."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from google.protobuf.message import Message

Result = TypeVar("Result")

STAGES: Final = ("decode_s", "queue_s", "gather_s", "execute_s", "encode_s", "total_s")
"""The stages whose seconds a response carries."""


@dataclass(frozen=True, slots=True)
class Method:
    """A unary gRPC method."""

    service: str
    name: str
    response: type[Message]

    @property
    def path(self) -> str:
        """The method's path in gRPC: `/service/name`."""
        return f"/{self.service}/{self.name}"


@dataclass(frozen=True, slots=True)
class Call(Generic[Result]):
    """A request, its method, and the function that reads its response."""

    method: Method
    request: Message
    parse: Callable[[Any], Result]
    """Reads the method's response message. Raises InvalidReply."""
