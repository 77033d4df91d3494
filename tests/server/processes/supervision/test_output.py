from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xlaserve.processes.supervision import output
from xlaserve.processes.supervision.output import MAX_LINE_BYTES, Lines, Output


@given(st.lists(st.binary(max_size=20)), st.integers(1, 30))
def test_lines_are_found_however_they_come(lines: Sequence[bytes], piece: int) -> None:
    text = b"\n".join(lines)
    found, reader = list[str](), Lines()
    for start in range(0, len(text), piece):
        found += reader.feed(text[start : start + piece])
    found += reader.end()
    expected = [line.decode(errors="backslashreplace") for line in text.split(b"\n")]
    assert found == (expected if expected[-1] else expected[:-1])


def test_a_line_without_end_is_broken() -> None:
    reader = Lines()
    pieces = [*reader.feed(b"x" * (2 * MAX_LINE_BYTES + 1)), *reader.end()]
    assert list(map(len, pieces)) == [MAX_LINE_BYTES, MAX_LINE_BYTES, 1]
    assert list(map(len, reader.feed(b"y" * (MAX_LINE_BYTES + 2) + b"\nz\n"))) == [MAX_LINE_BYTES, 2, 1]


async def test_what_is_no_record_gets_the_role(caplog: pytest.LogCaptureFixture) -> None:
    reading, writing = os.pipe()
    found = Output("front 2", reading)
    os.write(writing, b"\xff terminate called\n\n12:34:56 INFO  [front 2] a record\n\x1b[31mred\nrest")
    os.close(writing)
    await found.closed
    said = [(record.getMessage(), record.__dict__["role"]) for record in caplog.records]
    assert said == [(text, "front 2") for text in ("\\xff terminate called", "\x1b[31mred", "rest")]
    assert {record.levelno for record in caplog.records} == {logging.WARNING}
    assert "12:34:56 INFO  [front 2] a record\n" in caplog.text


async def test_a_pipe_that_something_else_holds_is_closed_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "LAST_LINES_S", 0.05)
    reading, writing = os.pipe()
    found = Output("front 2", reading)
    found.process_ended()
    assert not found.closed.done()
    async with asyncio.timeout(10):
        await found.closed
    with pytest.raises(BrokenPipeError):
        os.write(writing, b"x")
    os.close(writing)


async def test_a_pipe_that_is_flooded_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = 0

    def endless(pipe: int, size: int) -> bytes:
        nonlocal reads
        reads += 1
        return b"\n"

    reading, writing = os.pipe()
    found = Output("front 2", reading)
    with monkeypatch.context() as patched:
        patched.setattr(os, "read", endless)
        found.process_ended()
    assert reads == output.MOST_AT_ONCE
    found.close()
    os.close(writing)
