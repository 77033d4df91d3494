from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
import pytest_asyncio

from xlaserve.link import channel as channel_module
from xlaserve.link.channel import Channel
from xlaserve.link.records import Cancel, Garbled, Reader, Record, Released, pack


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

    def __init__(self) -> None:
        self.received: list[Record] = []
        self.ended: list[str] = []
        self.error: Exception | None = None
        self.transport = Transport()
        self.channel = Channel(Reader.from_front(), self._receive, self.ended.append)
        self.channel.connection_made(self.transport)

    def _receive(self, record: Record) -> None:
        self.received.append(record)
        if self.error:
            raise self.error


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
