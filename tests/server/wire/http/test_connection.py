"""Connections, with the calls that they carry."""

from __future__ import annotations

import asyncio
import logging
from contextvars import ContextVar
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.server.wire.http.wire import (
    CROWDED_S,
    HIGH_WATER_BYTES,
    MAX_BODY_BYTES,
    MAX_TRANSFER_S,
    Host,
    request,
    settle,
)

from xlaserve.admission.caller import ADMIN
from xlaserve.admission.calls import CROWDED_TRANSFER_S
from xlaserve.errors import ShuttingDown
from xlaserve.planning.virtual_time import VirtualTimeLoop
from xlaserve.wire.http.connection import HEAD_TIMEOUT_S, LINGER_S, MAX_PIPELINED
from xlaserve.wire.http.http_calls import PIECE_BYTES
from xlaserve.wire.http.message import HttpAnswer
from xlaserve.wire.http.request_head import MAX_HEAD_BYTES, MAX_HEADERS
from xlaserve.wire.shared.parts import Part

UPGRADE: dict[str, Any] = {"connection": "Upgrade, HTTP2-Settings", "upgrade": "h2c", "http2_settings": "AAMAAABk"}
LARGE = HttpAnswer([bytes(HIGH_WATER_BYTES + 1), bytes(100)])


@pytest.fixture(autouse=True)
def quiet_log(caplog: pytest.LogCaptureFixture) -> object:
    """No client brings an error into the log."""
    with caplog.at_level(logging.ERROR):
        yield
    assert not caplog.records


@pytest.mark.usefixtures("virtual_time")
async def test_requests_are_answered_one_after_another_on_one_connection() -> None:
    host = Host()
    client = host.connect()
    for number in range(3):
        client.send(request("POST", "/", b"abc"))
        await settle()
        assert client.replies()[number].json() == {"number": number + 1, "body": "abc"}
    assert client.is_open


@pytest.mark.usefixtures("virtual_time")
async def test_a_request_may_come_byte_by_byte() -> None:
    host = Host()
    client = host.connect()
    client.send(*(bytes([octet]) for octet in request("POST", "/", b"abc")))
    await settle()
    assert [reply.json()["body"] for reply in client.replies()] == ["abc"]


@pytest.mark.usefixtures("virtual_time")
async def test_chunks_are_put_together() -> None:
    host = Host()
    client = host.connect()
    head = request("POST", transfer_encoding="chunked")
    client.send(head + b"3\r\nabc\r\n", b"2;x=y\r\nde\r\n0\r\nTrailer: x\r\n\r\n")
    await settle()
    assert client.replies()[0].json()["body"] == "abcde"
    client.send(request())
    await settle()
    assert len(client.replies()) == 2


@pytest.mark.usefixtures("virtual_time")
async def test_pipelined_requests_are_answered_in_their_order() -> None:
    host = Host()
    client = host.connect()
    client.send(b"".join(request("POST", "/", str(number).encode()) for number in range(MAX_PIPELINED)))
    await settle()
    await settle()
    assert [reply.json()["body"] for reply in client.replies()] == list(map(str, range(MAX_PIPELINED)))
    assert client.is_open


BROKEN_BODY = request("POST", transfer_encoding="chunked") + b"3\r\nabc!!!!"


@pytest.mark.parametrize("behind", [b"garbage\r\n\r\n", request() * 1000, BROKEN_BODY], ids=["head", "many", "body"])
@pytest.mark.usefixtures("virtual_time")
async def test_requests_before_what_is_refused_are_answered(behind: bytes) -> None:
    host = Host()
    host.method.go.clear()
    client = host.connect()
    client.send(request() + request() + behind)
    client.send(b"more")
    await settle()
    assert not client.received
    host.method.go.set()
    await settle()
    await settle()
    statuses = [reply.status for reply in client.replies()]
    assert statuses == [200] * len(statuses)
    assert 2 <= len(statuses) <= MAX_PIPELINED + 1
    assert not client.is_open


@pytest.mark.parametrize("bad", [b"\0\0\0\0", b"GET / HTTP/1.1\r\nA\0: b\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"])
@pytest.mark.usefixtures("virtual_time")
async def test_what_is_no_http_is_refused_in_json(bad: bytes) -> None:
    host = Host()
    client = host.connect()
    client.send(bad)
    await settle()
    (reply,) = client.replies()
    assert reply.status == 400
    said = reply.json()["error"]
    assert "grpc_port" in said if bad.startswith(b"PRI") else said.startswith("not HTTP/1.1: ")
    assert not client.is_open


@pytest.mark.parametrize(
    "head",
    [
        request("POST", "/", b"ab", transfer_encoding="chunked"),
        b"POST / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
        b"POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 99999999999999999999999\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length : 2\r\n\r\nab",
        b"POST / HTTP/1.1\r\nTransfer-Encoding: xchunked\r\n\r\n",
        b"CONNECT a:1 HTTP/1.1\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: h\r\nHost: h\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer a\r\nauthorization: Bearer b\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: h\r\nX: y\r\n folded\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 1\r\n 2\r\n\r\nabcdefghijkl",
        b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.0\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n1 \r\na\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n+1\r\na\r\n0\r\n\r\n",
        b"GET / HTTP/1.1\nHost: h\n\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET / HTTP/2.0\r\nHost: h\r\n\r\n",
        b"GET /\r\nHost: h\r\n\r\n",
        b"CONNECT / HTTP/1.1\r\nHost: h\r\n\r\n",
        b"CONNECT h:1 HTTP/1.1\r\nHost: h:1\r\nContent-Length: 3\r\n\r\nabc",
        b"GET http://other/ HTTP/1.1\r\nHost: h\r\n\r\n",
        b"GET http://h@other/ HTTP/1.1\r\nHost: h\r\n\r\n",
        b"GET /#a HTTP/1.1\r\nHost: h\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: h/other\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: other@h\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: h other\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: [::1].evil.example\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost:80.evil.example\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: h\r\nContent-Type: a/b\r\nContent-Type: c/d\r\nContent-Length: 0\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n1;a\na\r\n0\r\n\r\n",
    ],
)
@pytest.mark.usefixtures("virtual_time")
async def test_ambiguous_and_broken_heads_are_refused(head: bytes) -> None:
    host = Host()
    client = host.connect()
    client.send(head)
    await settle()
    assert [reply.status for reply in client.replies()] == [400]
    assert not client.is_open
    assert not host.method.requests


LENGTH = "content-length: expected a number of bytes, got another text"
CHUNKED = b"Transfer-Encoding: chunked\r\n"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (b"Content-Length: 2\r\nContent-Length: 2\r\n", "content-length: expected one, got two"),
        (b"Content-Length: 2\r\nContent-Length: 3\r\n", "content-length: expected one, got two"),
        *((b"Content-Length: " + text + b"\r\n", LENGTH) for text in (b"2, 2", b"two", b"-2", b"+2", b"")),
        (b"Content-Length: " + b"9" * 26 + b"\r\n", "content-length: expected less than 2^64 bytes, got more"),
        *(
            (head, "content-length and transfer-encoding: expected one of them, got both")
            for head in (b"Content-Length: 2\r\n" + CHUNKED, CHUNKED + b"Content-Length: 2\r\n")
        ),
    ],
)
@pytest.mark.usefixtures("virtual_time")
async def test_a_length_that_may_be_read_in_two_ways_is_named(fields: bytes, said: str) -> None:
    host = Host()
    client = host.connect()
    client.send(b"POST / HTTP/1.1\r\nHost: h\r\n" + fields + b"\r\n{}")
    await settle()
    (reply,) = client.replies()
    assert (reply.status, reply.json()) == (400, {"error": said})
    assert not client.is_open


@pytest.mark.usefixtures("virtual_time")
async def test_tls_where_there_is_none_is_told_to_whoever_can_read_it() -> None:
    host = Host()
    client = host.connect()
    client.send(bytes.fromhex("1603010200010001fc0303"))
    await settle()
    (reply,) = client.replies()
    assert reply.status == 400
    assert "tls_certificate" in reply.json()["error"]


@pytest.mark.usefixtures("virtual_time")
async def test_a_broken_body_is_refused_and_its_call_ended() -> None:
    host = Host()
    client = host.connect()
    client.send(request("POST", transfer_encoding="chunked") + b"3\r\nabc")
    await settle()
    client.send(b"!!!!")
    await settle()
    assert [reply.status for reply in client.replies()] == [400]
    assert not client.is_open
    assert not host.method.requests


@pytest.mark.parametrize("size", [1, 1000, 10**6])
@pytest.mark.usefixtures("virtual_time")
async def test_an_endless_head_is_refused(size: int) -> None:
    host = Host()
    client = host.connect()
    sent = 0
    for _ in range(MAX_HEAD_BYTES + 2):
        if not client.is_open:
            break
        client.send(b"GET /" if not sent else b"a" * size)
        sent += size
        await asyncio.sleep(0)
    assert [reply.status for reply in client.replies()] == [431]
    assert sent <= MAX_HEAD_BYTES + 2 * size
    assert not client.is_open


@pytest.mark.usefixtures("virtual_time")
async def test_a_head_has_a_size_and_a_number_of_headers() -> None:
    host = Host()
    cases: list[tuple[dict[str, Any], int]] = [
        ({f"x{number}": "y" for number in range(MAX_HEADERS - 1)}, 200),
        ({f"x{number}": "y" for number in range(MAX_HEADERS)}, 431),
        ({"x": "y" * (MAX_HEAD_BYTES - 100)}, 200),
        ({"x": "y" * MAX_HEAD_BYTES}, 431),
    ]
    for fields, status in cases:
        client = host.connect()
        client.send(request(**fields))
        await settle()
        assert [reply.status for reply in client.replies()] == [status]
        client.hang_up()
        await settle()


@pytest.mark.usefixtures("virtual_time")
async def test_what_surrounds_chunks_is_bounded() -> None:
    host = Host()
    client = host.connect()
    client.send(request("POST", transfer_encoding="chunked"), b"1;" + b"x" * (MAX_HEAD_BYTES + 10))
    await settle()
    assert [reply.status for reply in client.replies()] == [431]
    client = host.connect()
    client.send(request("POST", transfer_encoding="chunked"), b"0\r\n")
    for number in range(MAX_HEADERS + 1):
        client.send(b"t%d: x\r\n" % number)
    await settle()
    assert not client.is_open


@pytest.mark.parametrize("begun", [b"", b"G", b"GET / HTTP/1.1\r\nX: y", b"\r\n\r\n"])
@pytest.mark.usefixtures("virtual_time")
async def test_a_head_may_take_some_time_only(begun: bytes) -> None:
    host = Host()
    client, other = host.connect(), host.connect()
    other.send(request())
    await asyncio.sleep(1)
    for each in (client, other):
        each.send(begun)
    await asyncio.sleep(HEAD_TIMEOUT_S - 2)
    assert client.is_open and other.is_open
    await asyncio.sleep(2)
    assert not client.is_open
    if begun:
        assert not other.is_open


@pytest.mark.usefixtures("virtual_time")
async def test_a_slow_head_is_ended_even_as_it_comes() -> None:
    host = Host()
    client = host.connect()
    for octet in request(x="y" * 100):
        client.send(bytes([octet]))
        await asyncio.sleep(0.25)
        if not client.is_open:
            break
    assert not client.is_open
    assert not host.method.requests


@pytest.mark.usefixtures("virtual_time")
async def test_a_slow_head_behind_a_refused_body_is_ended() -> None:
    host = Host()
    client = host.connect()
    client.send(request("POST", content_length=str(MAX_BODY_BYTES + 5)))
    await settle()
    assert [reply.status for reply in client.replies()] == [413]
    client.send(bytes(MAX_BODY_BYTES + 5), b"GET / ")
    await asyncio.sleep(HEAD_TIMEOUT_S + 1)
    assert not client.is_open


@pytest.mark.usefixtures("virtual_time")
async def test_a_connection_serves_on_after_the_rest_of_a_refused_body() -> None:
    host = Host()
    client = host.connect()
    client.send(request("POST", content_length=str(MAX_BODY_BYTES + 5)))
    await settle()
    client.send(bytes(MAX_BODY_BYTES + 5))
    for _ in range(5):
        await asyncio.sleep(LINGER_S / 2)
        client.send(request())
    await settle()
    assert [reply.status for reply in client.replies()] == [413] + [200] * 5


@pytest.mark.usefixtures("virtual_time")
async def test_the_rest_of_a_refused_body_is_not_awaited_for_ever() -> None:
    host = Host()
    client = host.connect()
    client.send(request("POST", content_length=str(10**12)))
    for _ in range(20):
        await asyncio.sleep(1)
        client.send(bytes(1000)) if client.is_open else None
    assert not client.is_open


@pytest.mark.usefixtures("virtual_time")
async def test_a_slow_pipelined_body_is_awaited_while_another_is_answered() -> None:
    host = Host()
    client = host.connect()
    client.send(request() + request("POST", content_length="30"))
    for _ in range(30):
        await asyncio.sleep(1)
        client.send(b"x")
    await settle()
    assert [reply.json()["body"] for reply in client.replies()] == ["", "x" * 30]


@pytest.mark.usefixtures("virtual_time")
async def test_who_may_not_send_is_not_timed() -> None:
    host = Host()
    host.method.go.clear()
    client = host.connect()
    client.send(request() + request() + b"GET")
    assert not client.may_send
    await asyncio.sleep(5 * HEAD_TIMEOUT_S)
    host.method.go.set()
    await settle()
    assert client.may_send
    client.send(request()[3:])
    await settle()
    assert [reply.status for reply in client.replies()] == [200] * 3


@pytest.mark.usefixtures("virtual_time")
async def test_a_client_that_goes_cancels_its_call() -> None:
    host = Host()
    host.method.go.clear()
    client = host.connect()
    client.send(request("POST", "/", b"x" * 1000))
    await settle()
    assert host.message_memory.held_bytes == 1000
    client.hang_up()
    await settle()
    assert host.method.cancelled == 1
    assert host.message_memory.held_bytes == 0
    assert not host.connections.connections and not host.connections.idle and not host.connections.tasks


@pytest.mark.parametrize("settled", [0, 1, 20])
@pytest.mark.usefixtures("virtual_time")
async def test_a_body_that_ends_early_is_no_request(settled: int) -> None:
    host = Host()
    client = host.connect()
    client.send(request("POST", content_length="10") + b"half")
    for _ in range(settled):
        await asyncio.sleep(0)
    client.hang_up()
    await settle()
    assert not host.method.requests
    assert not host.connections.tasks


@pytest.mark.usefixtures("virtual_time")
@pytest.mark.parametrize("upgrade", [{}, UPGRADE])
async def test_leave_to_send_a_body_is_given_once_it_is_wanted(upgrade: dict[str, Any]) -> None:
    host = Host()
    client = host.connect()
    head = request("POST", content_length="3", expect="100-continue", **upgrade)
    client.send(head)
    await settle()
    assert client.received == b"HTTP/1.1 100 Continue\r\n\r\n"
    client.send(b"abc")
    await settle()
    assert client.replies()[0].json()["body"] == "abc"


@pytest.mark.usefixtures("virtual_time")
async def test_a_client_of_http_1_0_is_given_no_leave_to_send_a_body() -> None:
    host = Host()
    client = host.connect()
    head = request("POST", content_length="3", expect="100-continue").replace(b"HTTP/1.1", b"HTTP/1.0")
    client.send(head)
    await settle()
    assert client.received == b""
    client.send(b"abc")
    await settle()
    assert client.replies()[0].json()["body"] == "abc"
    assert not client.is_open


@pytest.mark.usefixtures("virtual_time")
async def test_a_connection_ends_where_a_body_was_not_let_in() -> None:
    host = Host()
    client = host.connect()
    client.send(request("POST", content_length=str(10**9), expect="100-continue"))
    await settle()
    (reply,) = client.replies()
    assert (reply.status, reply.headers["connection"]) == (413, "close")
    assert not client.is_open


@pytest.mark.usefixtures("virtual_time")
async def test_an_upgrade_is_ignored_and_nothing_behind_it_lost() -> None:
    host = Host()
    client = host.connect()
    client.send(request(connection="Upgrade, HTTP2-Settings", upgrade="h2c") + request("POST", "/", b"abc"))
    await settle()
    assert [reply.json()["body"] for reply in client.replies()] == ["", "abc"]


SMUGGLED = request("POST", "/unload", b"abc")


@pytest.mark.parametrize("fields", [UPGRADE, {"connection": "keep-alive, upgrade", "upgrade": "websocket"}])
@pytest.mark.parametrize("method", ["POST", "GET"])
@pytest.mark.parametrize("octets", [1, 1000])
@pytest.mark.usefixtures("virtual_time")
async def test_the_body_behind_an_upgrade_is_read_as_a_body(method: str, fields: dict[str, Any], octets: int) -> None:
    host = Host()
    client = host.connect()
    chunks = b"%x\r\n%b\r\n0\r\nX-Api-Key: k\r\n\r\n" % (len(SMUGGLED), SMUGGLED)
    sent = b"".join(
        (
            request(method, "/", SMUGGLED, **fields),
            request(method, transfer_encoding="chunked", **fields) + chunks,
            request("POST", "/", b"last"),
        )
    )
    client.send(*(sent[start : start + octets] for start in range(0, len(sent), octets)))
    await settle()
    await settle()
    smuggled = SMUGGLED.decode()
    assert [reply.json()["body"] for reply in client.replies()] == [smuggled, smuggled, "last"]
    assert client.is_open


@pytest.mark.usefixtures("virtual_time")
async def test_trailers_are_no_headers() -> None:
    host = Host()
    client = host.connect()
    trailers = b"X-Api-Key: k\r\nContent-Encoding: gzip\r\nHost: other\r\nExpect: 100-continue\r\n\r\n"
    client.send(request("POST", transfer_encoding="chunked") + b"3\r\nabc\r\n0\r\n" + trailers)
    await settle()
    assert client.replies()[0].json()["body"] == "abc"
    assert host.method.requests[0].headers == {"host": "h", "transfer-encoding": "chunked"}


@pytest.mark.usefixtures("virtual_time")
async def test_a_target_may_be_a_whole_address() -> None:
    host = Host()
    client = host.connect()
    client.send(request("POST", "http://h/path", b"abc"))
    await settle()
    assert client.replies()[0].json()["body"] == "abc"


@pytest.mark.usefixtures("virtual_time")
async def test_connections_beyond_the_most_are_closed_but_idle_ones_give_way() -> None:
    host = Host(max_connections=3)
    host.method.go.clear()
    busy, idle, idler = host.connect(), host.connect(), host.connect()
    busy.send(request())
    idler.send(b"GET")
    await settle()
    late = host.connect()
    await settle()
    assert (busy.is_open, idle.is_open, idler.is_open, late.is_open) == (True, False, True, True)
    late.send(request())
    idler.send(request()[3:])
    await settle()
    too_late = host.connect()
    await settle()
    assert not too_late.is_open
    host.method.go.set()
    await settle()
    assert [len(each.replies()) for each in (busy, late, idler)] == [1, 1, 1]
    assert len(host.connections.connections) == 3
    for each in (busy, late, idler):
        each.hang_up()
    await settle()
    assert not host.connections.connections and not host.connections.idle


@pytest.mark.usefixtures("virtual_time")
async def test_an_address_has_some_of_the_connections_and_its_idle_ones_give_way() -> None:
    host = Host(max_connections=8, max_per_address=2)
    host.method.go.clear()
    busy, idle = host.connect("192.0.2.1"), host.connect("192.0.2.1")
    busy.send(request())
    other = host.connect("192.0.2.2")
    await settle()
    late = host.connect("192.0.2.1")
    await settle()
    assert (busy.is_open, idle.is_open, other.is_open, late.is_open) == (True, False, True, True)
    late.send(request())
    await settle()
    too_late = host.connect("192.0.2.1")
    neighbours = [host.connect(f"2001:db8::{number}") for number in (1, 2)]
    for each in neighbours:
        each.send(request())
    await settle()
    assert not host.connect("2001:db8::3").is_open
    assert not too_late.is_open
    assert all(each.is_open for each in neighbours)
    host.method.go.set()
    await settle()
    late.hang_up()
    await settle()
    assert host.connect("192.0.2.1").is_open
    assert busy.is_open


@pytest.mark.usefixtures("virtual_time")
async def test_an_unread_answer_is_counted_and_ends_its_connection() -> None:
    host = Host()
    host.method.answer = LARGE
    client = host.connect()
    client.reads = False
    client.send(request())
    await settle()
    assert host.message_memory.held_bytes == LARGE.size_bytes
    await asyncio.sleep(MAX_TRANSFER_S - 1)
    assert client.is_open
    await asyncio.sleep(3)
    assert not client.is_open
    assert host.message_memory.held_bytes == 0
    assert not host.connections.tasks


@pytest.mark.usefixtures("virtual_time")
async def test_who_reads_gets_the_whole_of_a_large_answer() -> None:
    host = Host()
    host.method.answer = LARGE
    client = host.connect()
    client.reads = False
    client.send(request(connection="close"))
    await asyncio.sleep(MAX_TRANSFER_S / 2)
    client.read_on()
    await settle()
    assert [len(reply.body) for reply in client.replies()] == [LARGE.size_bytes]
    assert not client.is_open


@pytest.mark.parametrize("fields", [{}, {"connection": "close"}])
@pytest.mark.usefixtures("virtual_time")
async def test_small_answers_that_are_not_read_hold_no_connection_for_good(fields: dict[str, Any]) -> None:
    host = Host()
    client = host.connect()
    client.reads = False
    client.send(request(**fields))
    await asyncio.sleep(1000)
    assert not client.is_open
    assert not host.connections.connections


@pytest.mark.usefixtures("virtual_time")
async def test_calls_without_a_body_give_way_and_are_told(caplog: pytest.LogCaptureFixture) -> None:
    host = Host(max_calls=1)
    slow = host.connect()
    slow.send(request("POST", content_length="3"))
    await settle()
    early = host.connect()
    early.send(request())
    await settle()
    (reply,) = early.replies()
    assert (reply.status, reply.headers["retry-after"]) == (429, "1")
    await asyncio.sleep(CROWDED_S + 1)
    early.send(request())
    await settle()
    (told,) = slow.replies()
    assert told.status == 429
    assert "gave way" in told.json()["error"]
    assert not slow.is_open
    early.send(request())
    await settle()
    assert early.replies()[-1].status == 200
    assert ("method", "RESOURCE_EXHAUSTED") in host.refused


@pytest.mark.usefixtures("virtual_time")
async def test_unread_answers_give_way_to_new_calls() -> None:
    host = Host(max_calls=1)
    host.method.answer = LARGE
    slow, client = host.connect(), host.connect()
    slow.reads = False
    slow.send(request() * 3)
    await asyncio.sleep(CROWDED_S + 1)
    for _ in range(2):
        client.send(request())
        await settle()
    assert not slow.is_open
    assert client.replies()[-1].status == 200


@pytest.mark.usefixtures("virtual_time")
async def test_slow_bodies_and_unread_answers_give_way_to_new_connections() -> None:
    host = Host(max_connections=2, max_calls=100)
    host.method.answer = LARGE
    sending, reading = host.connect(), host.connect()
    reading.reads = False
    sending.send(request("POST", content_length="30"))
    await settle()
    reading.send(request())
    assert not host.connect().is_open
    await settle()
    for slow in (sending, reading):
        await asyncio.sleep(CROWDED_TRANSFER_S)
        sending.send(b"x" if sending.is_open else b"")
        host.connect().send(request("POST", content_length="30"))
        await settle()
        assert slow.was_aborted
    assert len(host.connections.connections) == 2


@pytest.mark.usefixtures("virtual_time")
async def test_a_connection_that_the_server_works_for_does_not_give_way() -> None:
    host = Host(max_connections=1)
    host.method.go.clear()
    client = host.connect()
    client.send(request("POST", "/", b"abc"))
    await asyncio.sleep(10 * CROWDED_TRANSFER_S)
    assert not host.connect().is_open
    host.method.go.set()
    await settle()
    assert client.replies()[0].status == 200


@pytest.mark.parametrize("octets", [1, 6])
@pytest.mark.usefixtures("virtual_time")
async def test_a_body_in_very_many_parts_is_refused_before_all_are_taken(octets: int) -> None:
    host = Host()
    client = host.connect()
    client.send(request("POST", transfer_encoding="chunked") + b"%x\r\n%b\r\n" % (octets, b"x" * octets) * 20_000)
    await settle()
    assert [reply.status for reply in client.replies()] == [431]
    assert not client.is_open
    assert host.message_memory.held_bytes == 0


@pytest.mark.usefixtures("virtual_time")
async def test_what_one_request_notes_is_not_seen_by_the_next_on_its_connection() -> None:
    noted: ContextVar[str] = ContextVar("noted", default="nothing")
    seen = []

    async def note(scope: Any, receive: Any, send: Any) -> None:
        seen.append(noted.get())
        noted.set("something")
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    host = Host(app=note)
    host.connect().send(request() * 3)
    await settle()
    assert seen == ["nothing"] * 3


@pytest.mark.usefixtures("virtual_time")
async def test_large_answers_leave_in_pieces() -> None:
    parts: list[Part] = [
        b"a",
        b"b" * (2 * PIECE_BYTES + 7),
        b"",
        memoryview(b"c" * PIECE_BYTES),
        b"d" * PIECE_BYTES,
        *[b"e"] * 300,
    ]
    host = Host()
    host.method.answer = HttpAnswer(parts)
    client = host.connect()
    written = []
    client.write, write = lambda data: (written.append(len(data)), write(data)), client.write  # type: ignore[method-assign, assignment, func-returns-value]
    client.send(request())
    await settle()
    assert client.replies()[0].body == b"".join(parts)
    assert max(written) <= PIECE_BYTES
    assert len(written) < 10


@pytest.mark.usefixtures("virtual_time")
async def test_a_server_that_stops_says_so_and_closes() -> None:
    host = Host()
    host.method.error = ShuttingDown("stopping")
    client = host.connect()
    client.send(request())
    await settle()
    (reply,) = client.replies()
    assert (reply.status, reply.headers["connection"]) == (503, "close")
    assert not client.is_open


@pytest.mark.usefixtures("virtual_time")
async def test_shutdown_waits_for_answers_to_all_that_was_pipelined() -> None:
    host = Host()
    host.method.go.clear()
    client, idle = host.connect(), host.connect()
    client.send(request() * 3)
    await settle()
    for connection in tuple(host.connections.connections):
        connection.shutdown()
    await settle()
    assert client.is_open and not idle.is_open
    host.method.go.set()
    await settle()
    await settle()
    assert len(client.replies()) == 3
    assert not client.is_open


@pytest.mark.usefixtures("virtual_time")
async def test_an_unexpected_error_tells_nothing_of_the_inside(caplog: pytest.LogCaptureFixture) -> None:
    host = Host()
    host.method.error = RuntimeError("secret at /home/x.py")
    client = host.connect()
    client.send(request())
    await settle()
    (reply,) = client.replies()
    assert reply.status == 500
    assert "secret" not in reply.json()["error"]
    assert [record.getMessage() for record in caplog.records] == ["unexpected error"]
    caplog.clear()


SEGMENTS = st.lists(
    st.one_of(
        st.binary(max_size=30),
        st.sampled_from(
            [
                request(),
                request("POST", "/", b"abc"),
                request("POST", content_length="20"),
                request("POST", transfer_encoding="chunked"),
                b"3\r\nabc\r\n",
                b"0\r\n\r\n",
                b"\r\n",
                request(connection="close"),
                request("HEAD"),
                request(upgrade="h2c", connection="upgrade"),
                request("POST", upgrade="h2c", connection="upgrade", transfer_encoding="chunked"),
                request("POST", expect="100-continue", content_length="3"),
                b"GET / HTTP/1.0\r\n\r\n",
            ]
        ),
    ),
    max_size=8,
)


@given(segments=SEGMENTS, hangs_up=st.booleans(), reads=st.booleans())
def test_no_bytes_leave_anything_behind(segments: list[bytes], hangs_up: bool, reads: bool) -> None:
    async def talk() -> None:
        host = Host()
        client = host.connect()
        client.reads = reads
        for segment in segments:
            if client.is_open and client.may_send and not client.is_closing():
                client.send(segment)
            await asyncio.sleep(0)
        if hangs_up and client.is_open:
            client.hang_up()
        await asyncio.sleep(1000)
        assert not client.is_open
        assert not host.connections.connections and not host.connections.idle and not host.connections.tasks
        assert host.message_memory.held_bytes == 0
        assert asyncio.all_tasks() == {asyncio.current_task()}

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(talk())


@pytest.mark.usefixtures("virtual_time")
async def test_a_server_that_leaves_ends_each_connection_with_an_answer() -> None:
    host = Host()
    client = host.connect()
    client.send(request())
    await settle()
    host.connections.is_leaving = True
    await settle()
    assert client.is_open
    client.send(request())
    await settle()
    kept, last = client.replies()
    assert (kept.status, last.status) == (200, 200)
    assert "connection" not in kept.headers
    assert last.headers["connection"] == "close"
    assert not client.is_open


@pytest.mark.parametrize("size", [1, 20, len(request("POST", content_length="3")), len(request("POST", "/", b"ab"))])
@pytest.mark.usefixtures("virtual_time")
async def test_a_request_has_begun_with_its_first_byte(size: int) -> None:
    host = Host()
    client, idle = host.connect(), host.connect()
    idle.send(request())
    await settle()
    whole = request("POST", "/", b"abc", connection="upgrade", upgrade="h2c")
    client.send(whole[:size])
    await settle()
    host.connections.is_draining = True
    assert (client.connection.has_begun, idle.connection.has_begun) == (True, False)
    client.send(whole[size:])
    idle.send(request())
    await settle()
    assert client.replies()[0].json()["body"] == "abc"
    assert (client.connection.has_begun, idle.connection.has_begun) == (False, False)


@pytest.mark.usefixtures("virtual_time")
async def test_requests_behind_one_that_has_begun_are_late() -> None:
    host = Host()
    host.method.go.clear()
    client = host.connect()
    client.send(request() * 2)
    await settle()
    host.connections.is_draining = True
    client.send(request())
    host.method.go.set()
    begun = []
    for _ in range(60):
        begun.append((len(client.replies()), client.connection.has_begun))
        await asyncio.sleep(0)
    assert {*begun} == {(0, True), (1, True), (2, False), (3, False)}


@pytest.mark.usefixtures("virtual_time")
async def test_a_load_is_not_waited_for() -> None:
    host = Host()
    host.method.go.clear()
    host = Host(app=host.calls.application("load", host.method, ADMIN))
    client = host.connect()
    client.send(request("POST", "/", b""))
    assert client.connection.is_awaited
    await settle()
    assert (client.connection.has_begun, client.connection.is_awaited) == (True, False)
    client.hang_up()
    await settle()
