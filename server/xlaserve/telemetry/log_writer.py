"""Writes the log without waiting for its reader: a process that reads stderr slowly, or not at all, delays no request.

While the reader keeps up, lines are written by the thread that logs them, so that none is lost if the process ends.
Lines that a pipe has no room for, and lines that may wait (`write_soon`), are written by a thread of their own.
"""

from __future__ import annotations

import io
import logging
import os
import select
import stat
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, Final, TextIO

log = logging.getLogger(__name__)

MAX_LINES: Final = 10_000
"""Lines that wait to be written. More are dropped, and counted."""
HOLD_S: Final = 0.02
"""Seconds that a line which may wait is held, so that many are written at once: each write wakes the reader."""
FLUSH_S: Final = 2.0
"""Seconds that the end of the process waits for lines that are not yet written."""


class LogWriter(io.TextIOBase):
    """A stream of lines to `stream`, which never blocks its writers."""

    def __init__(self, stream: TextIO, max_lines: int = MAX_LINES) -> None:
        self._stream = stream
        self._poll = _poll(stream)
        """Asks whether a pipe or a socket has room for PIPE_BUF bytes; None for files, which always have."""
        self._max_lines = max_lines
        self._lines: deque[str] = deque()
        self._dropped = 0
        self._changed = threading.Condition()
        self._is_writing = False
        self._is_urgent = False
        """Whether one of the lines must be written at once."""
        self._has_ended = False
        threading.Thread(target=self._run, name="log", daemon=True).start()

    def write(self, text: str) -> int:
        """Writes `text` after the lines that wait: at once if the stream has room, else on the thread."""
        with self._changed:
            if not self._is_writing and self._write_lines() and self._takes(text):
                self._write(text)
                return len(text)
            self._is_urgent = True
            self._add(text)
        self._report()
        return len(text)

    def write_soon(self, text: str) -> None:
        """Adds `text` to the lines that wait; it is written within HOLD_S, or with the next line that can't wait."""
        with self._changed:
            self._add(text)
        self._report()

    def _add(self, text: str) -> None:
        if len(self._lines) >= self._max_lines:
            self._dropped += 1
            return
        self._lines.append(text)
        if self._is_urgent or len(self._lines) == 1:
            self._changed.notify_all()

    def _write_lines(self) -> bool:
        """Writes as many of the waiting lines as the stream takes now; returns whether none is left."""
        while self._lines and self._takes(self._lines[0]):
            self._write(self._lines.popleft())
        return not self._lines

    def flush(self) -> None:
        """Does nothing: lines are flushed as they are written."""

    def finish(self, timeout_s: float = FLUSH_S) -> None:
        """Writes the waiting lines, for at most `timeout_s`, and ends the thread."""
        until = time.monotonic() + timeout_s
        self._wait(until)
        self._report()
        self._wait(until)
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()

    def _report(self) -> None:
        """Logs how many lines were dropped, if any were and there is room for another line."""
        with self._changed:
            if not self._dropped or len(self._lines) >= self._max_lines:
                return
            dropped, self._dropped = self._dropped, 0
        log.warning("%d lines of the log were dropped: they were not read in time", dropped)

    def _wait(self, until: float) -> None:
        with self._changed:
            self._is_urgent = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._lines and not self._is_writing, until - time.monotonic())

    def _run(self) -> None:
        while (lines := self._next()) or not self._has_ended:
            self._write(lines)
            with self._changed:
                self._is_writing = False
                self._changed.notify_all()

    def _takes(self, text: str) -> bool:
        """Returns whether `text` can be written without waiting."""
        return self._poll is None or (len(text.encode()) <= select.PIPE_BUF and bool(self._poll.poll(0)))

    def _write(self, text: str) -> None:
        with suppress(OSError, ValueError):  # nobody reads any more
            self._stream.write(text)
            self._stream.flush()

    def _next(self) -> str:
        """Waits for lines and takes them as one text; empty where `write` has written them already, or at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._lines or self._has_ended)
            self._changed.wait_for(lambda: self._is_urgent or self._has_ended, HOLD_S)
            lines = "".join(self._lines)
            self._lines.clear()
            self._is_urgent = False
            self._is_writing = bool(lines)
            return lines


def _poll(stream: TextIO) -> select.poll | None:
    try:
        number = stream.fileno()
        is_file = stat.S_ISREG(os.fstat(number).st_mode)
    except (OSError, ValueError):  # in memory
        return None
    if is_file:
        return None
    poll = select.poll()
    poll.register(number, select.POLLOUT)
    return poll


@contextmanager
def without_waiting() -> Iterator[None]:
    """Within the context, log lines that would block are written in the background; afterwards all are written
    directly."""
    direct = [(handler, handler.stream) for handler in _handlers()]
    for handler, stream in direct:
        handler.setStream(LogWriter(stream))
    try:
        yield
    finally:
        finish()
        for handler, stream in direct:
            handler.setStream(stream)


def write(text: str) -> None:
    """Writes lines that are formatted already to the streams of the log."""
    for handler in _handlers():
        with handler.lock or nullcontext(), suppress(OSError, ValueError):  # nobody reads any more
            handler.stream.write(text)
            handler.flush()


def finish(timeout_s: float = FLUSH_S) -> None:
    """Writes the waiting lines of each LogWriter, for at most `timeout_s`."""
    for handler in _handlers():
        if isinstance(handler.stream, LogWriter):
            handler.stream.finish(timeout_s)


def _handlers() -> list[logging.StreamHandler[Any]]:
    return [handler for handler in logging.getLogger().handlers if isinstance(handler, logging.StreamHandler)]
