"""Bodies of requests: gathered as they arrive, and unpacked."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable
from typing import Final

import numpy as np
from starlette.types import Receive

from xlaserve.errors import InvalidArgument
from xlaserve.wire.http.message import too_large

ENCODINGS: Final = ("gzip", "deflate")
_ANY_FORMAT: Final = zlib.MAX_WBITS | 32
"""zlib's, which HTTP calls deflate, or gzip's, as the body's first bytes say."""
_INPUT_BYTES: Final = 2**16
_OUTPUT_BYTES: Final = 2**20
"""Bytes that come of one step on a thread, which zlib takes without the GIL."""
_FIRST_BYTES: Final = 2**16
_MAX_INLINE_COPY_BYTES: Final = 2**21
"""Bytes that are copied on the event loop, which takes a millisecond."""


class Gathered:
    """Bytes that arrive in parts, `max_bytes` at most; where `size_bytes` are expected, none is copied again."""

    def __init__(self, max_bytes: int, size_bytes: int = 0) -> None:
        self._max_bytes = max_bytes
        self._room = np.empty(size_bytes or _FIRST_BYTES, np.uint8)  # not paged in before it is used
        self._size_bytes = 0

    async def add(self, part: bytes) -> None:
        """Takes the next part. Raises MessageTooLarge."""
        begin, end = self._size_bytes, self._size_bytes + len(part)
        if end > self._max_bytes:
            raise too_large(self._max_bytes, end)
        if end > len(self._room):
            await self._grow(end)
        self._room.data[begin:end] = part
        self._size_bytes = end

    def read(self) -> memoryview:
        """Returns what has arrived."""
        return self._room.data[: self._size_bytes]

    async def _grow(self, needed_bytes: int) -> None:
        size_bytes, old = self._size_bytes, self._room
        self._room = np.empty(min(max(needed_bytes, 2 * len(old)), self._max_bytes), np.uint8)
        if size_bytes <= _MAX_INLINE_COPY_BYTES:
            self._room[:size_bytes] = old[:size_bytes]
        else:
            await asyncio.to_thread(np.copyto, self._room[:size_bytes], old[:size_bytes])


async def read_body(receive: Receive, max_bytes: int, size_bytes: int) -> bytes | memoryview:
    """Returns a request's body, of `size_bytes` unless that is 0, as it is not known.

    Raises MessageTooLarge beyond `max_bytes`, and CancelledError where it ends early.
    """
    body: Gathered | None = None
    while True:
        message = await receive()
        if message["type"] != "http.request":
            raise asyncio.CancelledError
        part, is_last = message["body"], not message["more_body"]
        if body is None:
            if is_last and len(part) <= max_bytes:
                return bytes(part)
            body = Gathered(max_bytes, size_bytes)
        await body.add(part)
        if is_last:
            return body.read()


async def decompress(body: memoryview, max_bytes: int, take: Callable[[int], None]) -> memoryview:
    """Returns what was compressed; `take` is called with the bytes of each part of it. Raises what `take` does.

    Raises MessageTooLarge beyond `max_bytes`, and InvalidArgument for what is not compressed, or not all of it.
    """
    found, inflate = Gathered(max_bytes), zlib.decompressobj(_ANY_FORMAT)
    for start in range(0, len(body), _INPUT_BYTES):
        data: bytes | memoryview = body[start : start + _INPUT_BYTES]
        while data and not inflate.eof:
            try:
                part = await asyncio.to_thread(inflate.decompress, data, _OUTPUT_BYTES)
            except zlib.error as error:
                raise _unreadable(str(error)[:64]) from None
            data = inflate.unconsumed_tail
            take(len(part))
            await found.add(part)
        if inflate.eof and (inflate.unused_data or start + _INPUT_BYTES < len(body)):
            raise _unreadable("more behind its end")
    if not inflate.eof:
        raise _unreadable("a part of one")
    return found.read()


def _unreadable(got: str) -> InvalidArgument:
    return InvalidArgument("body", "one stream as its Content-Encoding says", got)
