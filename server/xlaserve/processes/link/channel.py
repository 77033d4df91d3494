"""Records over a Unix socket: all records of one turn of the event loop are sent in one write.

To wake the other process costs both more than all else about a record. So an end may hold records back for a moment,
while its event loop has other work: the records of that work are sent with them, and no record waits for an idle
process.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Final, cast

from xlaserve.processes.link.link_records import Garbled, Record
from xlaserve.processes.link.record_codec import RecordReader, pack

log = logging.getLogger(__name__)

MAX_UNREAD_BYTES: Final = 64 * 2**20
"""Bound of the bytes that wait for an end that does not read. Jobs are bounded, and so are the records about them: only
an end that goes on sending jobs without reading answers comes near it."""
IDLE_TURN_S: Final = 20e-6
"""Bound of an idle turn of the event loop, one that finds next to nothing to do."""
IDLE_TURNS: Final = 3
"""Consecutive idle turns after which there is no other work: gRPC takes some turns between a request's steps."""


class Channel(asyncio.Protocol):
    """One end of a link. `receive` is called with each record, and `ended` once, with the reason, when the link ends.

    Garbled of `reader` or `receive` ends the link, and so does any other error of `receive`. Records are held back for
    `max_held_s` at most, and only while the event loop has other work.
    """

    def __init__(
        self,
        reader: RecordReader,
        receive: Callable[[Record], None],
        ended: Callable[[str], None],
        max_held_s: float = 0.0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._reader = reader
        self._receive = receive
        self._ended = ended
        self._max_held_s = max_held_s
        self._clock = clock
        self._held_since = self._turn_began = 0.0
        self._idle_turns = 0
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._unsent: list[bytes] = []
        self._reason = ""

    @property
    def is_open(self) -> bool:
        """Whether records may still come and go."""
        return self._transport is not None

    def send(self, record: Record) -> None:
        """Sends a record with others; drops it where the link has ended."""
        if self._transport is None:
            return
        if not self._unsent:
            self._held_since = self._turn_began = self._clock()
            self._idle_turns = 0
            self._loop.call_soon(self._end_turn)
        self._unsent.append(pack(record))

    def close(self) -> None:
        """Ends the link once all records are written to the socket."""
        self._flush()
        if self._transport is not None:
            self._reason = self._reason or "it was closed"
            self._transport.close()

    def end(self, reason: str) -> None:
        """Ends the link now."""
        self._reason = self._reason or reason
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Opens the channel; see `asyncio.Protocol`."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transport is of no class of asyncio's

    def data_received(self, data: bytes) -> None:
        """Passes on the records that are complete with `data`."""
        try:
            for record in self._reader.feed(data):
                if self._reason:
                    return
                self._receive(record)
        except Garbled as error:
            self.end(f"it sent {error}")
        except Exception:
            log.exception("a record could not be taken")
            self.end("a record could not be taken")

    def connection_lost(self, error: Exception | None) -> None:
        """Calls `ended`; see `asyncio.Protocol`."""
        self._transport = None
        self._unsent.clear()
        self._ended(self._reason or "the other process has gone")

    def _end_turn(self) -> None:
        now = self._clock()
        self._idle_turns = 0 if now - self._turn_began > IDLE_TURN_S else self._idle_turns + 1
        if self._unsent and self._idle_turns < IDLE_TURNS and now - self._held_since < self._max_held_s:
            self._turn_began = now
            self._loop.call_soon(self._end_turn)
        else:
            self._flush()

    def _flush(self) -> None:
        if self._transport is None or not self._unsent:
            return
        data = b"".join(self._unsent)
        self._unsent.clear()
        if self._transport.get_write_buffer_size() + len(data) > MAX_UNREAD_BYTES:
            self.end("it does not read what it is sent")
        else:
            self._transport.write(data)
