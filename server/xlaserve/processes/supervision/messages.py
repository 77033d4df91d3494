"""What a process and its supervisor tell each other, over a stream socket.

A message is a kind, the length of what follows, and that.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from enum import IntEnum
from typing import Final

CHANNEL: Final = "xlaserve.channel"
"""The descriptor of that socket, beside those of a role."""
MAX_BYTES: Final = 64 * 2**20
"""Of a message; more is an error of the sender."""

_HEAD: Final = struct.Struct("<BI")


class Kind(IntEnum):
    """What a message says."""

    READY = 1
    """Of the process: it does what it is there for; what follows is JSON about it."""
    METRICS = 2
    """Of the process: what follows is a snapshot of its metrics."""
    KEEP = 3
    """Of the process: what follows is for the next one of its role to begin with, if this one ends."""
    SUCCEED = 4
    """Of the process: another one shall take its place, and begin with what follows. It is told the OUTCOME."""
    RELOAD = 5
    """Of the process: it was told to read the configuration again, and leaves that to the one in its place."""
    ENDS = 8
    """Of the process, its last message: it ends because it was told to, or for a reason that it has logged."""
    ASK = 6
    """Of the supervisor: the metrics shall be shown."""
    OUTCOME = 7
    """Of the supervisor: what became of SUCCEED, in JSON."""


OnMessage = Callable[[Kind, bytes], None]
"""Handles a message, given its kind and content. Raises ValueError for content that can't be understood."""


def encode(kind: Kind, content: bytes) -> bytes:
    """Returns a message."""
    return _HEAD.pack(kind, len(content)) + content


class MessageReader:
    """Finds messages in bytes as they come."""

    def __init__(self) -> None:
        self._unread = bytearray()

    def feed(self, received: bytes) -> Iterator[tuple[Kind, bytes]]:
        """Yields the messages that are complete now. Raises ValueError for what is none."""
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
