from __future__ import annotations

import asyncio

import pytest
from tests.loadtest.liar import HANG_UP, NEVER, Step, lying, response

from xlaserve_loadtest.addresses import Address
from xlaserve_loadtest.targets.http_client import HttpConnections, HttpError

REQUEST = b"POST / HTTP/1.1\r\ncontent-length: 2\r\n\r\n", b"hi"
OK = response(b"fine")
HEAD = b"HTTP/1.1 200 OK\r\n"


def client(address: str) -> HttpConnections:
    return HttpConnections(Address.parse(address), None, None)


async def until_closed(http: HttpConnections) -> None:
    while any(exchange.is_open for exchange in http._idle):  # noqa: ASYNC110
        await asyncio.sleep(0.001)


@pytest.mark.parametrize(
    ("steps", "connections"),
    [
        ([OK], 1),
        ([OK[:9], 0.01, OK[9:-2], 0.01, OK[-2:]], 1),
        ([HEAD + b"Transfer-Encoding: chunked\r\n\r\n2\r\nfi\r\n", 0.01, b"2\r\nne\r\n0\r\n\r\n"], 1),
        ([b"HTTP/1.1 100 Continue\r\n\r\n", OK], 1),
        ([HEAD + b"\r\nfi", 0.01, b"ne", HANG_UP], 2),
        ([response(b"fine", connection="close")], 2),
        ([b"HTTP/1.0 200 OK\r\ncontent-length: 4\r\n\r\nfine"], 2),
        ([OK + b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\nsecond"], 2),
        ([OK + b"HTTP/1.1 200 OK\r\ncont"], 2),
    ],
    ids=["whole", "pieces", "chunks", "continue", "until the end", "close", "HTTP/1.0", "two answers", "more"],
)
async def test_an_answer_arrives_whole_however_it_is_sent(steps: list[Step], connections: int) -> None:
    async with lying(*steps) as liar:
        http = client(liar.address)
        for _ in range(2):
            answer = await http.request(*REQUEST)
            assert (answer.status, answer.body) == (200, b"fine")
        http.close()
        assert [got.body for got in liar.got] == [b"hi", b"hi"]
        assert liar.connections == connections


@pytest.mark.parametrize(
    ("steps", "reason"),
    [
        ([HANG_UP], "the server closed the connection"),
        ([HEAD + b"content-length: 9\r\n\r\nfi", HANG_UP], "in the middle of an answer"),
        ([HEAD + b"transfer-encoding: chunked\r\n\r\n9\r\nfi", HANG_UP], "in the middle of an answer"),
        ([HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\n"], "not HTTP"),
        ([b"SSH-2.0-OpenSSH\r\n"], "not HTTP"),
        ([HEAD + b"content-length: -1\r\n\r\n"], "not HTTP"),
        ([b"HTTP/1.1 101 Switching Protocols\r\nupgrade: h2c\r\nconnection: upgrade\r\n\r\n"], "another protocol"),
    ],
)
async def test_an_invalid_answer_is_reported_and_its_connection_replaced(steps: list[Step], reason: str) -> None:
    async with lying(script=lambda number: [OK] if number else steps) as liar:
        http = client(liar.address)
        with pytest.raises(HttpError, match=reason):
            await http.request(*REQUEST)
        assert (await http.request(*REQUEST)).body == b"fine"
        http.close()
        assert liar.connections == 2


async def test_a_connection_that_was_closed_while_idle_is_not_used() -> None:
    async with lying(OK, HANG_UP) as liar:
        http = client(liar.address)
        for _ in range(3):
            assert (await http.request(*REQUEST)).body == b"fine"
            await until_closed(http)
        assert len(liar.got) == liar.connections == 3


async def test_what_comes_unasked_ends_an_idle_connection() -> None:
    async with lying(script=lambda number: [OK, 0.02, response(b"late", "408 Request Timeout")]) as liar:
        http = client(liar.address)
        for _ in range(2):
            assert (await http.request(*REQUEST)).body == b"fine"
            await until_closed(http)
        http.close()


async def test_a_request_that_is_called_off_closes_its_connection() -> None:
    async with lying(NEVER) as liar:
        http = client(liar.address)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await http.request(*REQUEST)
        await liar.closed.wait()


async def test_there_are_as_many_connections_as_requests_under_way() -> None:
    async with lying(0.01, OK) as liar:
        http = client(liar.address)
        for _ in range(3):
            await asyncio.gather(*(http.request(*REQUEST) for _ in range(5)))
        http.close()
        assert (len(liar.got), liar.connections) == (15, 5)


async def test_nobody_who_listens_is_said() -> None:
    with pytest.raises(HttpError, match=r"127\.0\.0\.1"):
        await client("http://127.0.0.1:1").request(*REQUEST)
