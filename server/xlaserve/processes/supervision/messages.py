"""The messages between a process and its supervisor, over a stream socket.

A message is a kind, the length of its content, and the content.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from enum import IntEnum
from typing import Final

CHANNEL: Final = "xlaserve.channel"
"""The name of the socket's descriptor, beside the descriptors of a role."""
MAX_BYTES: Final = 64 * 2**20
"""Bound of a message; more is an error of the sender."""

_HEAD: Final = struct.Struct("<BI")


class Kind(IntEnum):
    """The kind of a message, and its sender."""

    READY = 1
    """From the process: it is ready. The content is JSON: details of the process."""
    METRICS = 2
    """From the process: the content is a snapshot of its metrics."""
    KEEP = 3
    """From the process: the content is for the next process of its role to begin with, if this one ends."""
    SUCCEED = 4
    """From the process: another is to take its place, and to begin with the content. OUTCOME answers."""
    RELOAD = 5
    """From the process: the process in its place is to read the configuration again, as this one was told to."""
    ENDS = 8
    """From the process, its last message: it ends because it was told to, or for a reason that it has logged."""
    ASK_METRICS = 6
    """From the supervisor: the process is to send its METRICS."""
    OUTCOME = 7
    """From the supervisor: the outcome of SUCCEED, in JSON."""


OnMessage = Callable[[Kind, bytes], None]
"""Handles a message, given its kind and content. Raises ValueError for content that can't be understood."""


def encode(kind: Kind, content: bytes) -> bytes:
    """Returns a message as bytes."""
    return _HEAD.pack(kind, len(content)) + content


class MessageReader:
    """Finds messages in a stream of bytes."""

    def __init__(self) -> None:
        self._unread = bytearray()

    def feed(self, received: bytes) -> Iterator[tuple[Kind, bytes]]:
        """Yields the messages that are complete now. Raises ValueError for bytes that are no message."""
        self._unread += received
        while len(self._unread) >= _HEAD.size:
            kind, length = _HEAD.unpack_from(self._unread)
            if length > MAX_BYTES:
                raise ValueError(f"expected a message of at most {MAX_BYTES} bytes, got one of {length}")
            end = _HEAD.size + length
            if len(self._unread) < end:
                return
            content = bytes(self._unread[_HEAD.size : end])
            del self._unread[:end]
            yield Kind(kind), content
