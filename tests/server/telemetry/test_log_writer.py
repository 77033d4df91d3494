from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TextIO

import pytest

from xlaserve.telemetry import log_writer

LOGGER = logging.getLogger("xlaserve.telemetry.log_writer")
PIPE_BYTES = 65_536
LINE = "x" * 100
COUNT = 20 * PIPE_BYTES // len(LINE)


class Pipe:
    """A pipe whose reader reads only when it is told to."""

    def __init__(self) -> None:
        reading, writing = os.pipe()
        self.writing: TextIO = os.fdopen(writing, "w")
        self.handler = logging.StreamHandler(self.writing)
        self._reading = os.fdopen(reading)
        self.lines: list[str] = []
        self._thread = threading.Thread(target=lambda: self.lines.extend(self._reading))

    def read(self) -> None:
        self._thread.start()

    def close(self) -> list[str]:
        """Returns all lines that came."""
        if self._thread.ident is None and not self._reading.closed:
            self._thread.start()
        with suppress(BrokenPipeError):
            self.writing.close()
        if self._thread.ident is not None:
            self._thread.join()
        self._reading.close()
        return self.lines

    def first_line(self) -> str:
        """Waits for a line and returns it."""
        return self._reading.readline()

    def hang_up(self) -> None:
        """Closes the reader's end."""
        self._reading.close()


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    """What the root logger writes to."""
    root, pipe = logging.getLogger(), Pipe()
    handlers, level = root.handlers[:], root.level
    root.handlers = [pipe.handler]
    root.setLevel(logging.INFO)
    yield pipe
    pipe.close()
    root.handlers = handlers
    root.setLevel(level)


def test_a_reader_that_stalls_holds_up_nobody(pipe: Pipe) -> None:
    with log_writer.without_waiting():
        began = time.perf_counter()
        for _ in range(COUNT):
            LOGGER.info(LINE)
        assert time.perf_counter() - began < 5
        pipe.read()
    assert [line.rstrip() for line in pipe.close()].count(LINE) >= min(COUNT, log_writer.MAX_LINES)


def test_lines_that_find_no_room_are_counted(pipe: Pipe) -> None:
    writer = log_writer.LogWriter(pipe.writing, max_lines=10)
    pipe.handler.setStream(writer)  # type: ignore[arg-type]
    for number in range(COUNT):
        LOGGER.info("%d %s", number, LINE)
    pipe.read()
    writer.finish()
    lines = pipe.close()
    dropped = sum(int(line.split()[0]) for line in lines if "were dropped" in line)
    assert dropped + sum(line.endswith(f"{LINE}\n") for line in lines) == COUNT


def test_lines_come_in_order_and_all_at_the_end(pipe: Pipe) -> None:
    with log_writer.without_waiting():
        for number in range(1000):
            LOGGER.info("%d", number)
        pipe.read()
    LOGGER.info("after")
    assert pipe.close() == [*(f"{number}\n" for number in range(1000)), "after\n"]


def test_the_end_does_not_wait_for_a_reader_for_ever(pipe: Pipe) -> None:
    writer = log_writer.LogWriter(pipe.writing)
    writer.write(f"{LINE}\n" * PIPE_BYTES)
    began = time.perf_counter()
    writer.finish(timeout_s=0.1)
    assert 0.1 <= time.perf_counter() - began < 5


def test_a_reader_that_has_gone_is_no_error(pipe: Pipe) -> None:
    pipe.hang_up()
    with log_writer.without_waiting():
        LOGGER.info(LINE)


def test_a_line_that_the_reader_has_room_for_is_there_at_once(pipe: Pipe, tmp_path: Path) -> None:
    file = (tmp_path / "log").open("w")
    with file, log_writer.without_waiting():
        LOGGER.info("to a pipe")
        assert pipe.first_line() == "to a pipe\n"
        pipe.handler.setStream(log_writer.LogWriter(file))  # type: ignore[arg-type]
        LOGGER.info(LINE * PIPE_BYTES)
        assert (tmp_path / "log").read_text() == LINE * PIPE_BYTES + "\n", "files take everything"


def test_lines_that_are_formatted_already_are_written_in_their_turn(pipe: Pipe) -> None:
    with log_writer.without_waiting():
        LOGGER.info("before")
        log_writer.write("12:34:56 INFO  [front 2] as it is\n")
        LOGGER.info("after")
    assert pipe.close() == ["before\n", "12:34:56 INFO  [front 2] as it is\n", "after\n"]


def test_lines_that_may_wait_are_written_together_and_in_order(pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_writer, "HOLD_S", 60.0)
    writer = log_writer.LogWriter(pipe.writing)
    for number in range(3):
        writer.write_soon(f"{number}\n")
    writer.write("now\n")
    assert [pipe.first_line() for _ in range(4)] == ["0\n", "1\n", "2\n", "now\n"]
    writer.finish()


def test_a_line_that_may_wait_is_written_soon(pipe: Pipe) -> None:
    writer = log_writer.LogWriter(pipe.writing)
    writer.write_soon("0\n")
    assert pipe.first_line() == "0\n"
    writer.finish()


def test_lines_that_may_wait_are_written_after_another_took_some_along(pipe: Pipe) -> None:
    writer = log_writer.LogWriter(pipe.writing)
    writer.write_soon("0\n")
    time.sleep(log_writer.HOLD_S / 4)  # the thread holds the line
    writer.write("now\n")  # both
    time.sleep(2 * log_writer.HOLD_S)
    writer.write_soon("1\n")
    writer.finish()
    assert pipe.close() == ["0\n", "now\n", "1\n"]


def test_the_end_writes_what_may_wait(pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_writer, "HOLD_S", 60.0)
    writer = log_writer.LogWriter(pipe.writing)
    writer.write_soon("0\n")
    began = time.perf_counter()
    writer.finish()
    assert pipe.first_line() == "0\n"
    assert time.perf_counter() - began < log_writer.FLUSH_S
