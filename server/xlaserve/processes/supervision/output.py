"""The stderr of a process, as lines of the server's log."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterator
from typing import Final

from xlaserve.telemetry import log_writer, logs

log = logging.getLogger(logs.OUTPUT)

MAX_LINE_BYTES: Final = 64 * 1024
"""Longer lines are broken."""
CHUNK_BYTES: Final = 64 * 1024
MOST_AT_ONCE: Final = 16
"""The most chunks that are read at the end of a process before it counts as ended."""
LAST_LINES_S: Final = 1.0
"""How long after the end of a process its descendants may still write."""


class Lines:
    """Finds lines in a stream of bytes."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, received: bytes) -> Iterator[str]:
        """Yields the lines that are complete now, without their ends."""
        *lines, self._rest = (self._rest + received).split(b"\n")
        for line in lines:
            yield from _pieces(line)
        while len(self._rest) >= MAX_LINE_BYTES:
            piece, self._rest = self._rest[:MAX_LINE_BYTES], self._rest[MAX_LINE_BYTES:]
            yield from _pieces(piece)

    def end(self) -> Iterator[str]:
        """Yields the last line, if it has no end."""
        rest, self._rest = self._rest, b""
        if rest:
            yield from _pieces(rest)


def _pieces(line: bytes) -> Iterator[str]:
    for start in range(0, max(len(line), 1), MAX_LINE_BYTES):
        yield line[start : start + MAX_LINE_BYTES].decode(errors="backslashreplace")


class Output:
    """Reads the pipe that is stderr to a process of `role`, on the event loop, and closes it.

    Lines of its log are written as they are, all others as warnings.
    """

    def __init__(self, role: str, pipe: int) -> None:
        self._role = role
        self._pipe = pipe
        self._lines = Lines()
        self._loop = asyncio.get_running_loop()
        self.closed: asyncio.Future[None] = self._loop.create_future()
        """Done once nothing more will come."""
        os.set_blocking(pipe, False)
        self._loop.add_reader(pipe, self._read)

    def process_ended(self) -> None:
        """Reads all that has come, and goes on for `LAST_LINES_S` where a descendant of the process may still write."""
        for _ in range(MOST_AT_ONCE):
            if not self._read():
                break
        if not self.closed.done():
            closing = self._loop.call_later(LAST_LINES_S, self.close)
            self.closed.add_done_callback(lambda _: closing.cancel())

    def close(self) -> None:
        """Reads no more."""
        if self.closed.done():
            return
        self._loop.remove_reader(self._pipe)
        os.close(self._pipe)
        for line in self._lines.end():
            self._write(line)
        self.closed.set_result(None)

    def _read(self) -> bool:
        """Returns whether there may be more."""
        if self.closed.done():
            return False
        try:
            received = os.read(self._pipe, CHUNK_BYTES)
        except BlockingIOError:
            return False
        if not received:
            self.close()
            return False
        for line in self._lines.feed(received):
            self._write(line)
        return True

    def _write(self, line: str) -> None:
        if logs.is_record(line):
            log_writer.write(f"{line}\n")
        elif line.strip():
            log.warning("%s", line, extra={"role": self._role})
