"""The bound on memory for images while they are decoded, at all fronts together."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from xlaserve.admission.shared_counts import Kind, SharedCounts
from xlaserve.errors import ImageTooLarge, QueueFull

LOOK_S: Final = 0.002
"""Seconds between checks, while an image waits, whether another front has freed memory."""


class ImageMemory:
    """Bytes that images in decoding may take at a time, at all fronts together.

    A holder of more than that is let in alone, up to `max_alone_bytes`, and with messages up to `free_bytes`.
    """

    def __init__(self, max_bytes: int, usage: SharedCounts | None = None) -> None:
        usage = usage or SharedCounts()
        self.max_bytes = max_bytes
        """The bound, which may change at any time."""
        self.max_alone_bytes = math.inf
        """The bound of one holder without other images and messages, at least `max_bytes`. It may change as well."""
        self.free_bytes = math.inf
        """The part of it that messages leave for now, at least `max_bytes`."""
        self._used_bytes = usage.amount(Kind.DECODE_BYTES)
        self._waits_since = usage.amount(Kind.DECODE_WAITS_SINCE)
        self._is_next = threading.Lock()
        self._freed = threading.Condition()

    @property
    def used_bytes(self) -> int:
        """Bytes in use now, at all fronts."""
        return self._used_bytes.total

    @contextmanager
    def hold(self, size_bytes: int) -> Iterator[None]:
        """Waits until `size_bytes` fit beside the bytes that others hold. While a caller waits, later ones wait behind
        it.

        Raises ImageTooLarge beyond `max_alone_bytes`, and QueueFull beyond `free_bytes`.
        """
        size_mib = size_bytes >> 20
        if size_bytes > self.max_alone_bytes:
            most_mib = int(self.max_alone_bytes) >> 20
            raise ImageTooLarge(
                f"image: expected one whose decoding takes at most the {most_mib} MiB that the server's memory has"
                f" for it, got one of {size_mib} MiB; send it with fewer pixels"
            )
        if size_bytes > self.free_bytes:
            raise QueueFull(f"the server is short of memory, and to decode this image takes {size_mib} MiB")
        since = time.monotonic_ns()
        with self._is_next, self._freed:
            while not self._has_room(size_bytes, since):
                self._waits_since.own = since
                # Other fronts do not notify this one of memory that they free.
                self._freed.wait(LOOK_S if self._waits_since.elsewhere else None)
            self._waits_since.own = 0
            self._used_bytes.own += size_bytes
        try:
            yield
        finally:
            with self._freed:
                self._used_bytes.own -= size_bytes
                self._freed.notify()

    def _has_room(self, size_bytes: int, since: int) -> bool:
        used_bytes = self._used_bytes.total
        if used_bytes and used_bytes + size_bytes > self.max_bytes:
            return False
        return not any(0 < other < since for other in self._waits_since.elsewhere)
