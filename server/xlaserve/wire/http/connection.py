"""uvicorn's connection, with bounds on what it holds for a client that is slow, silent or hostile.

What uvicorn leaves open (0.54): how long and how large a request's head may be, how many requests or parts of a body
one chunk may hold, how long a connection that sends nothing may stay, for how long a client may leave an answer unread,
and heads that others may read in another way: a proxy in front would take what is one request here for two. httptools
reads no body behind a head that asks for an upgrade, which is then read again without it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, Final

import httptools
import uvicorn
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from xlaserve.admission.address import network_of
from xlaserve.admission.certificates import names_of
from xlaserve.wire.http.connections import Connections
from xlaserve.wire.http.refusal import refusal
from xlaserve.wire.http.request_head import (
    MAX_HEAD_BYTES,
    MAX_HEADERS,
    Ambiguous,
    TooMuch,
    check_head,
    unreadable,
    without_upgrade,
)

MAX_PIPELINED: Final = 16
"""Requests that one connection may have sent before the first of them is answered."""
MAX_PARTS: Final = 2**13
"""Chunks of a body that may arrive at once, in 256 KiB: to take each takes a microsecond."""
HEAD_TIMEOUT_S: Final = 10.0
"""How long a connection may take for a request's head, from its first byte."""
LINGER_S: Final = 10.0
"""How long the rest of a body is read whose answer was sent: clients that are cut off don't read it."""
CONNECTION: Final = "xlaserve.connection"
"""The key of a request's `Connection` in its ASGI scope."""


class Connection(HttpToolsProtocol):
    """A client's connection, and the call that is answered on it."""

    server_state: Connections

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: Connections,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.call: asyncio.Task[Any] | None = None
        """The task that answers a request, to be cancelled where its client has gone."""
        self.address = ""
        """The client's, or its network: what it is counted for."""
        self._answering: RequestResponseCycle | None = None
        """The request that is answered, or was last; `cycle` is the one that arrived last."""
        self.is_awaited = True
        """Whether a drain waits for the request that is answered."""
        self._begun = 0
        """Requests without an answer whose first byte came before the server drained."""
        self._is_in_head = self._is_in_body = False
        self._is_deaf = False
        """Whether nothing more is read: the connection ends with the answers that are due."""
        self._read_timer: asyncio.TimerHandle | None = None
        """Ends the connection unless a head, or what is left of a body, arrives."""
        self._write_timer: asyncio.TimerHandle | None = None
        """Ends the connection unless its client reads."""
        self._headers_left = self._head_bytes_left = 0
        self._parts_left = 0
        self._overhead_bytes = 0
        """Bytes received of the request that are not its body, less the bytes of its body."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accepts the connection, unless there are too many."""
        self.address = network_of((transport.get_extra_info("peername") or ("",))[0])
        if not self.server_state.add(self):
            self.transport, self.flow = transport, FlowControl(transport)
            self.close_at_once()
            return
        super().connection_made(transport)
        self._expect(HEAD_TIMEOUT_S)

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancels the call: nobody waits for its answer."""
        self._expect_no_more()
        self._stop_write_timer()
        self._unset_keepalive_if_required()
        self.server_state.discard(self)
        super().connection_lost(exc)
        if self.call is not None:
            self.call.cancel()

    def eof_received(self) -> None:
        """Closes the connection: a client that has gone looks the same as one that only sends no more."""

    def data_received(self, data: bytes) -> None:
        """Feeds the parser."""
        if self._is_deaf or self.transport.is_closing():
            return
        self._unset_keepalive_if_required()
        self._overhead_bytes += len(data)
        self._parts_left = MAX_PARTS
        self._feed(data)
        if self._is_deaf:
            return
        if self._is_in_body:
            self._wait()
        if self._overhead_bytes > MAX_HEAD_BYTES:
            self._refuse(TooMuch())
        elif self._read_timer is None and not self._is_in_body and (self._is_in_head or self._is_idle):
            self._expect(HEAD_TIMEOUT_S)

    def on_message_begin(self) -> None:
        """Starts counting."""
        super().on_message_begin()
        if not (self._is_in_head or self.server_state.is_draining):  # else it is read again
            self._begun += 1
        self._is_in_head = True
        self._headers_left, self._head_bytes_left = MAX_HEADERS, MAX_HEAD_BYTES

    def on_url(self, url: bytes) -> None:
        """Takes a part of the request's target."""
        self._count_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Takes a header. A trailer is dropped: proxies let any pass, and it would replace a header."""
        self._headers_left -= 1
        self._count_head(len(name) + len(value))
        if self._is_in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Hands the request to the application."""
        if len(self.pipeline) >= MAX_PIPELINED:
            raise TooMuch
        check_head(self.parser.get_method(), self.url, self.headers, self.parser.get_http_version())
        if self.parser.should_upgrade():
            return  # `_feed` has the head read again
        # A client of HTTP/1.0 knows no 100 (Continue), and would take it for the answer.
        self.expect_100_continue &= self.parser.get_http_version() != "1.0"
        self.scope["extensions"] = {CONNECTION: self}  # type: ignore[dict-item]
        super().on_headers_complete()
        self._is_in_head, self._is_in_body = False, True
        self._expect_no_more()
        self._overhead_bytes = 0
        self.server_state.idle.pop(self, None)

    def on_body(self, body: bytes) -> None:
        """Takes a part of the body."""
        self._overhead_bytes -= 2 * len(body)
        self._parts_left -= 1
        if self._parts_left < 0:
            raise TooMuch
        cycle = self.cycle
        if cycle.response_complete:
            return
        cycle.body += body
        if len(cycle.body) > HIGH_WATER_LIMIT:
            self.flow.pause_reading()
        if not cycle.message_event.is_set():
            cycle.message_event.set()

    def on_message_complete(self) -> None:
        """Ends the request, though not its call."""
        if self.parser.should_upgrade():
            return
        self._is_in_body = False
        self.server_state.waiting.pop(self, None)
        self._expect_no_more()
        self._overhead_bytes = 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Makes room for the next request. What is left of this one's body is read and dropped, for some time."""
        self._begun = max(0, self._begun - 1)
        if self.transport.is_closing():
            self._expect_reader()
        elif self._is_in_body and self._answering is self.cycle:
            self._expect(LINGER_S)
        super().on_response_complete()
        if self._is_idle and not self.transport.is_closing():
            self.server_state.idle[self] = None

    def pause_writing(self) -> None:
        """Waits for the client to read, for some time."""
        self._expect_reader()
        super().pause_writing()

    def resume_writing(self) -> None:
        """Writes on."""
        self._stop_write_timer()
        self.server_state.waiting.pop(self, None)
        super().resume_writing()

    def timeout_keep_alive_handler(self) -> None:
        """Closes an idle connection."""
        self._close()

    def shutdown(self) -> None:
        """Closes the connection with the answer to the request that arrived last."""
        super().shutdown()
        self.server_state.idle.pop(self, None)

    @property
    def has_begun(self) -> bool:
        """Whether the request that is answered, or is to be answered next, began before the server drained."""
        return self._begun > 0

    @property
    def can_answer(self) -> bool:
        """Whether an answer can be sent at once in place of the one that the call was to give."""
        cycle = self._answering
        return cycle is not None and not cycle.response_started

    @property
    def awaits_leave(self) -> bool:
        """Whether the client waits for leave to send the request's body, which it may not send after an answer."""
        return self._answering is not None and self._answering.waiting_for_100_continue

    def certificate_names(self) -> Iterator[str]:
        """Yields the names in the client's certificate, which was verified; none where it showed none."""
        tls = self.transport.get_extra_info("ssl_object")
        return names_of((tls and tls.getpeercert()) or {})

    def abort(self) -> None:
        """Ends the connection at once, where the call ends without an answer."""
        if self._answering is not None and not self._answering.disconnected:
            self._answering.disconnected = True
            self.close_at_once()

    def close_at_once(self) -> None:
        """Ends the connection, and drops what its client has not read."""
        self._is_deaf = True
        self.server_state.discard(self)
        self.transport.abort()

    def _wait(self) -> None:
        self.server_state.waiting.setdefault(self, self.loop.time())

    @property
    def _is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answering = cycle
        super()._start_asgi_task(cycle, app)

    def _count_head(self, size_bytes: int) -> None:
        self._head_bytes_left -= size_bytes
        if self._headers_left < 0 or self._head_bytes_left < 0:
            raise TooMuch

    def _feed(self, data: bytes) -> None:
        while data and not self._is_deaf:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:  # to a protocol that is not spoken here: it is ignored
                head = without_upgrade(self.parser.get_method(), self.url, self.headers, self.parser.get_http_version())
                data = head + data[upgrade.args[0] :]
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn has it
            except httptools.HttpParserError as error:
                self._refuse(error.__context__ or Ambiguous(unreadable(str(error), data)))
            else:
                return

    def _refuse(self, error: BaseException) -> None:
        """Reads no more. Says why, unless answers to earlier requests are due, which are sent first."""
        self._is_deaf = True
        self._expect_no_more()
        due: RequestResponseCycle | None = self.cycle
        is_begun = self._is_in_body
        if is_begun and self.pipeline:  # it waits behind others, and is not answered
            self.pipeline.popleft()
            due, is_begun = self.pipeline[0][0] if self.pipeline else self._answering, False
        if due is not None and not due.response_complete:
            if not is_begun:
                due.keep_alive = False
                return
            due.disconnected = True
            due.message_event.set()
            if due.response_started:
                self.close_at_once()
                return
        self.transport.write(refusal(error, self.server_state))
        self._close()

    def _close(self) -> None:
        """Closes the connection once its client has read what was sent, which may take some time."""
        self.transport.close()
        self._expect_reader()

    def _expect(self, within_s: float) -> None:
        self._expect_no_more()
        self._read_timer = self.loop.call_later(within_s, self._give_up)

    def _give_up(self) -> None:
        if self.flow.read_paused:  # it can't send
            self._expect(HEAD_TIMEOUT_S)
        else:
            self.close_at_once()

    def _expect_no_more(self) -> None:
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None

    def _expect_reader(self) -> None:
        self._wait()
        self._stop_write_timer()
        self._write_timer = self.loop.call_later(self.server_state.max_transfer_s, self.close_at_once)

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
