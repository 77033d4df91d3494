"""How a name service is asked, over real sockets."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPException
from itertools import count, repeat
from socketserver import StreamRequestHandler, ThreadingTCPServer

import pytest

from xlaserve_client import name_service
from xlaserve_client.name_service import Listed, Listing, NameService, follow

EXPECTED = 'expected {"servers"'
ASKED = b"GET /v1/servers HTTP/1.1"


@contextmanager
def answering(answer: Callable[[str], bytes]) -> Iterator[NameService]:
    """Answers each request line with bytes."""

    class Handler(StreamRequestHandler):
        def handle(self) -> None:
            with suppress(OSError):  # who asked has gone
                line = self.rfile.readline().decode().strip()
                while self.rfile.readline().strip():
                    pass
                self.wfile.write(answer(line))

    with ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}).start()
        yield NameService("127.0.0.1", server.server_address[1])
        server.shutdown()


def said(body: str, status: str = "200 OK", headers: str = "") -> bytes:
    return f"HTTP/1.1 {status}\r\n{headers}content-length: {len(body)}\r\n\r\n{body}".encode()


class Heard:
    """Remembers what the name service said."""

    def __init__(self, enough: int) -> None:
        self.listings: list[Listing] = []
        self.problems: list[str] = []
        self.is_enough = asyncio.Event()
        self._enough = enough

    def update(self, listing: Listing) -> None:
        self.listings.append(listing)
        self._count()

    def service_failed(self, problem: str) -> None:
        self.problems.append(problem)
        self._count()

    def _count(self) -> None:
        if len(self.listings) + len(self.problems) >= self._enough:
            self.is_enough.set()


async def heard(service: NameService, enough: int) -> Heard:
    """Follows until so much was heard or missed."""
    listener = Heard(enough)
    task = asyncio.create_task(follow(service, listener))
    try:
        await asyncio.wait_for(listener.is_enough.wait(), 20)
    finally:
        task.cancel()
        await asyncio.wait((task,))
    return listener


@pytest.mark.parametrize(
    ("target", "url"),
    [
        ("fleet://head:7000", "http://head:7000/v1/servers"),
        ("fleet://10.0.0.1:7000/", "http://10.0.0.1:7000/v1/servers"),
        ("fleet://[::1]:7000", "http://[::1]:7000/v1/servers"),
    ],
)
def test_a_fleet_is_named_by_its_name_service(target: str, url: str) -> None:
    service = NameService.parse(target)
    assert (service.url, service.target) == (url, target.rstrip("/"))


@pytest.mark.parametrize(
    "target",
    ["fleet://", "fleet://head", "fleet://head:0", "fleet://head:65536", "fleet://a:1,b:2", "fleet://::1:7000"],
)
def test_anything_else_is_refused_with_what_was_expected(target: str) -> None:
    with pytest.raises(ValueError, match=r"^target: expected fleet://HOST:PORT, got "):
        NameService.parse(target)


async def test_servers_are_listed_with_their_state_and_unknown_fields_ignored() -> None:
    def answer(line: str) -> bytes:
        assert line == ASKED.decode()
        return said(
            '{"servers": [{"address": "10.0.0.3:1", "state": "ready", "id": "a", "http": "10.0.0.3:2"},'
            '{"address": "[::1]:2", "state": "draining", "id": "b"}, {"address": "h:3", "state": "other"}],'
            '"generation": 7, "more": {}}'
        )

    with answering(answer) as service:
        listed = (Listed("10.0.0.3:1", "a", True), Listed("[::1]:2", "b", False), Listed("h:3", "", False))
        assert await service.ask() == Listing(7, listed)


async def test_an_answer_may_come_in_chunks() -> None:
    def answer(line: str) -> bytes:
        body = b'{"servers": [], "generation": 3}'
        chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (body[:9], body[9:]))
        return b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"

    with answering(answer) as service:
        assert await service.ask() == Listing(3, ())


@pytest.mark.parametrize(
    ("data", "error", "what"),
    [
        (b"", HTTPException, ""),
        (b"SSH-2.0-OpenSSH\r\n", HTTPException, "SSH"),
        (
            said("go away", "503 Oh"),
            ValueError,
            "expected status 200, got 503 Oh: go away",
        ),
        (said("[]"), ValueError, EXPECTED),
        (said("{}"), ValueError, EXPECTED),
        (said('{"servers": [{"address": "h", "state": "ready"}], "generation": 1}'), ValueError, EXPECTED),
        (said('{"servers": [{"address": 5, "state": "ready"}], "generation": 1}'), ValueError, EXPECTED),
        (said('{"servers": [{"address": "h:1"}], "generation": 1}'), ValueError, EXPECTED),
        (said('{"servers": [], "generation": "x"}'), ValueError, EXPECTED),
        (said('{"servers": [], "generation": 1e999}'), ValueError, EXPECTED),
        (said("[" * 100_000), ValueError, EXPECTED),
        (said('{"servers": [], "generation": 1}')[:-5], HTTPException, ""),
    ],
    ids=[
        "nothing",
        "ssh",
        "503",
        "list",
        "no servers",
        "no port",
        "number",
        "no state",
        "generation",
        "infinite generation",
        "deep",
        "cut off",
    ],
)
async def test_what_is_no_answer_is_refused(data: bytes, error: type[Exception], what: str) -> None:
    def answer(line: str) -> bytes:
        return data

    with answering(answer) as service:
        with pytest.raises(error) as caught:
            await service.ask()
        assert what in str(caught.value)
        (problem,) = (await heard(service, 1)).problems
        assert problem


async def test_a_name_service_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(name_service, "ANSWER_S", 0.1)
    is_over = threading.Event()

    def answer(line: str) -> bytes:
        is_over.wait(20)
        return b""

    with answering(answer) as service:
        assert (await heard(service, 2)).problems == ["no answer within 0.1 s"] * 2
        is_over.set()


async def test_each_change_is_asked_for_after_the_one_before() -> None:
    lines: list[str] = []

    def answer(line: str) -> bytes:
        lines.append(line.split()[1])
        return said(f'{{"servers": [], "generation": {len(lines)}}}')

    with answering(answer) as service:
        found = await heard(service, 3)
    assert [listing.generation for listing in found.listings] == [1, 2, 3]
    assert lines[:3] == ["/v1/servers", "/v1/servers?after=1&wait_s=20", "/v1/servers?after=2&wait_s=20"]


async def test_after_a_failure_it_is_asked_anew_with_growing_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses_s: list[float] = []
    lines: list[str] = []
    sleep = asyncio.sleep

    async def note(pause_s: float) -> None:
        pauses_s.append(pause_s)
        await sleep(0)

    def answer(line: str) -> bytes:
        lines.append(line.split()[1])
        is_right = len(lines) in (1, 12, 13)
        return said(f'{{"servers": [], "generation": {20 - len(lines)}}}') if is_right else said("", "500 Oh")

    monkeypatch.setattr(asyncio, "sleep", note)
    with answering(answer) as service:
        found = await heard(service, 14)
    assert lines[:3] == ["/v1/servers", "/v1/servers?after=19&wait_s=20", "/v1/servers"]
    assert lines[11:13] == ["/v1/servers", "/v1/servers?after=8&wait_s=20"]
    assert [listing.generation for listing in found.listings[:3]] == [19, 8, 7]  # it was restarted, and counts anew
    bounds_s = [min(name_service.FIRST_PAUSE_S * 2**n, name_service.MAX_PAUSE_S) for n in range(10)]
    # The first pause, and those before the last, come after an answer.
    assert all(bound_s / 2 <= pause_s <= bound_s for pause_s, bound_s in zip(pauses_s[1:11], bounds_s, strict=True))
    assert pauses_s[13] <= name_service.FIRST_PAUSE_S  # after an answer they begin again


@pytest.mark.parametrize(
    ("generations", "least_s"),
    [(repeat(1), name_service.MIN_POLL_S), (count(), name_service.MIN_PAUSE_S)],
    ids=["always the same", "another generation each time"],
)
async def test_one_that_does_not_wait_is_not_asked_all_the_time(
    monkeypatch: pytest.MonkeyPatch, generations: Iterator[int], least_s: float
) -> None:
    pauses_s: list[float] = []
    sleep = asyncio.sleep

    async def note(pause_s: float) -> None:
        pauses_s.append(pause_s)
        await sleep(0)

    def answer(line: str) -> bytes:
        return said(f'{{"servers": [], "generation": {next(generations)}}}')

    monkeypatch.setattr(asyncio, "sleep", note)
    with answering(answer) as service:
        await heard(service, 4)
    # The first answer is news in both.
    assert len(pauses_s) >= 3
    assert all(0 <= pause_s <= least_s for pause_s in pauses_s[1:])
    assert max(pauses_s[1:]) > least_s / 2
