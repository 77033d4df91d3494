from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
import pytest_asyncio

from xlaserve.processes.link import channel as channel_module
from xlaserve.processes.link.channel import IDLE_TURNS, Channel
from xlaserve.processes.link.link_records import Cancel, Garbled, Record, Released
from xlaserve.processes.link.record_codec import RecordReader, pack


class Transport(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []
        self.unread_bytes = 0
        self.was_aborted = self.was_closed = False

    def write(self, data: Any) -> None:
        self.written.append(data)

    def get_write_buffer_size(self) -> int:
        return self.unread_bytes

    def abort(self) -> None:
        self.was_aborted = True

    def close(self) -> None:
        self.was_closed = True


class Here:
    """An end of a link, on a transport of the test's."""

    def __init__(self, max_held_s: float = 0.0) -> None:
        self.received: list[Record] = []
        self.now = 0.0
        self.ended: list[str] = []
        self.error: Exception | None = None
        self.transport = Transport()
        self.channel = Channel(
            RecordReader.from_front(), self._receive, self.ended.append, max_held_s, clock=lambda: self.now
        )
        self.channel.connection_made(self.transport)

    def _receive(self, record: Record) -> None:
        self.received.append(record)
        if self.error:
            raise self.error

    async def turn(self, seconds: float) -> int:
        """Has the loop take a turn of so many seconds, and returns how often something was written until then."""
        self.now += seconds
        await asyncio.sleep(0)
        return len(self.transport.written)


@pytest_asyncio.fixture
async def here() -> Here:
    return Here()


async def test_the_records_of_one_turn_leave_in_one_write(here: Here) -> None:
    for job in (1, 2, 3):
        here.channel.send(Released(job))
    assert not here.transport.written
    await asyncio.sleep(0)
    here.channel.send(Released(4))
    await asyncio.sleep(0)
    assert here.transport.written == [b"".join(pack(Released(job)) for job in (1, 2, 3)), pack(Released(4))]


async def test_what_an_idle_end_sends_leaves_after_a_few_empty_turns() -> None:
    here = Here(max_held_s=1e-3)
    here.channel.send(Released(1))
    assert [await here.turn(5e-6) for _ in range(IDLE_TURNS)] == [0] * (IDLE_TURNS - 1) + [1]


async def test_a_busy_end_holds_records_until_it_is_idle() -> None:
    here = Here(max_held_s=1e-3)
    here.channel.send(Released(1))
    assert await here.turn(200e-6) == 0
    here.channel.send(Released(2))
    assert [await here.turn(seconds) for seconds in (5e-6, 200e-6)] == [0, 0]
    assert [await here.turn(5e-6) for _ in range(IDLE_TURNS)] == [0] * (IDLE_TURNS - 1) + [1]
    assert here.transport.written == [pack(Released(1)) + pack(Released(2))]


async def test_records_are_held_for_a_bounded_time() -> None:
    here = Here(max_held_s=1e-3)
    here.channel.send(Released(1))
    assert [await here.turn(300e-6) for _ in range(5)] == [0, 0, 0, 1, 1]
    here.channel.send(Released(2))
    assert await here.turn(300e-6) == 1, "the time is each batch's own"


async def test_an_end_that_holds_nothing_back_sends_what_a_long_turn_brought() -> None:
    here = Here()
    here.channel.send(Released(1))
    assert await here.turn(1.0) == 1


async def test_what_was_sent_leaves_before_a_link_is_closed(here: Here) -> None:
    here.channel.send(Released(1))
    here.channel.close()
    assert here.transport.written == [pack(Released(1))]
    assert here.transport.was_closed
    here.channel.connection_lost(None)
    assert here.ended == ["it was closed"]


async def test_an_end_that_reads_nothing_is_hung_up_on(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_module, "MAX_UNREAD_BYTES", 100)
    here.transport.unread_bytes = 90
    here.channel.send(Released(1))
    await asyncio.sleep(0)
    assert here.transport.was_aborted
    assert not here.transport.written
    here.channel.connection_lost(None)
    assert here.ended == ["it does not read what it is sent"]


async def test_nothing_is_sent_or_kept_once_a_link_has_ended(here: Here) -> None:
    here.channel.send(Released(1))
    here.channel.connection_lost(ConnectionResetError())
    here.channel.send(Released(2))
    await asyncio.sleep(0)
    assert not here.transport.written
    assert here.ended == ["the other process has gone"]
    assert not here.channel.is_open


@pytest.mark.parametrize("error", [Garbled("nonsense"), ValueError("a defect")], ids=["garbled", "defect"])
async def test_a_record_that_cannot_be_taken_ends_the_link(
    here: Here, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    here.error = error
    with caplog.at_level(logging.ERROR):
        here.channel.data_received(pack(Cancel(1)) + pack(Cancel(2)))
    assert here.transport.was_aborted
    assert here.received == [Cancel(1)], "nothing is taken after it"
    here.channel.data_received(pack(Cancel(3)))
    assert here.received == [Cancel(1)]
    here.channel.connection_lost(None)
    assert here.ended == ["it sent nonsense" if isinstance(error, Garbled) else "a record could not be taken"]
    assert bool(caplog.records) == (not isinstance(error, Garbled)), "a defect is told with its traceback"
