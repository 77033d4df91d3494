"""HTTP that is small to send and large to read, or that two servers would read in two ways."""

from __future__ import annotations

import gzip
import json
import re
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from http.client import HTTPConnection
from typing import Any, Final

from tests.attack import http1
from tests.attack.connections import check_serving, serving
from tests.attack.http_requests import CLASSIFY, CLOSED, DIGITS, NOOP, PREDICT, REFUSED
from tests.attack.registry import OK, Round, attack

LIVE: Final = "/v2/health/live"
SECOND: Final = f"GET {LIVE} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
MAX_PING_S: Final = 1.0
"""What others may wait while one request is read, on a machine that does much else: a bomb that works takes longer."""
GIVES_WAY_S: Final = 20.0
MAX_CONNECTIONS: Final = 40

_POST: Final = f"POST {LIVE} HTTP/1.1\r\nHost: localhost\r\n".encode()
_CHUNKED: Final = b"Transfer-Encoding: chunked\r\n"
TWO_READINGS: Final = (
    _POST + b"Content-Length: 0\r\n" + _CHUNKED + b"\r\n0\r\n\r\n",
    _POST + b"Content-Length: 0\r\nContent-Length: 44\r\n\r\n",
    _POST + b"Content-Length: 0, 44\r\n\r\n",
    _POST + b"Content-Length: +0\r\n\r\n",
    _POST + b"Content-Length: 0x0\r\n\r\n",
    _POST + b"Content-Length : 44\r\n\r\n",
    _POST + b"Content-Length: 0\r\n 44\r\n\r\n",
    _POST + b"Content-Length:\x0b44\r\n\r\n",
    _POST + b"Content-Length: 0\nTransfer-Encoding: chunked\r\n\r\n",
    _POST + b"X: y\rContent-Length: 44\r\n\r\n",
    _POST + b"Transfer-Encoding: xchunked\r\n\r\n",
    _POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    _POST + b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    _POST + _CHUNKED * 2 + b"\r\n0\r\n\r\n",
    _POST + b"Transfer-Encoding:\x0bchunked\r\n\r\n0\r\n\r\n",
    _POST + _CHUNKED + b"\r\n0 \r\n\r\n",
    _POST + _CHUNKED + b"\r\n-0\r\n\r\n",
    _POST + _CHUNKED + b"\r\n0x0\r\n\r\n",
    _POST + _CHUNKED + b"\r\n1\r\nab\r\n0\r\n\r\n",
    _POST + _CHUNKED + b"\r\n1\r\na\n0\r\n\r\n",
    _POST + _CHUNKED + b"\r\n10000000000000000\r\n",
    _POST.replace(b"HTTP/1.1", b"HTTP/1.0") + _CHUNKED + b"\r\n0\r\n\r\n",
    _POST.replace(b"HTTP/1.1", b"HTTP/1.9") + b"\r\n",
    _POST.replace(b"HTTP/1.1", b"HTTP/2.0") + b"\r\n",
    _POST.replace(b" HTTP/1.1", b"") + b"\r\n",
    _POST.replace(b"\r\n", b"\n") + b"\n",
    _POST + b"Host: other\r\n\r\n",
    _POST + b"\0: y\r\n\r\n",
    _POST + b"X\xff: y\r\n\r\n",
    _POST + b": y\r\n\r\n",
    _POST + b"Authorization: Bearer a\r\nAuthorization: Bearer b\r\n\r\n",
    b"POST " + LIVE.encode() + b" HTTP/1.1\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"CONNECT localhost:1 HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"CONNECT / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    _POST.replace(LIVE.encode(), b"http://other" + LIVE.encode()) + b"\r\n",
    _POST.replace(LIVE.encode(), LIVE.encode() + b"#x") + b"\r\n",
    _POST.replace(b"Host: localhost", b"Host: h/other") + b"\r\n",
    _POST + b"Content-Type: a/b\r\nContent-Type: c/d\r\n\r\n",
    _POST + _CHUNKED + b"\r\n1;a\na\r\n0\r\n\r\n",
    b"\x16\x03\x01\x02\0\x01\0\x01\xfc\x03\x03" + bytes(200),
)


@attack(allowed={"400", "431", CLOSED})
def http_heads_of_two_readings(round: Round) -> None:
    """Lengths that contradict each other, folded and bare lines: all refused, and what is behind them not read."""
    number = 0
    with serving(round) as client:
        while round.has_time or number < len(TWO_READINGS):
            head = TWO_READINGS[number % len(TWO_READINGS)]
            number += 1
            said = answers_to(round.server.http, head + SECOND)
            outcome = said[9:12].decode() or CLOSED
            answers = len(re.findall(rb"HTTP/1\.1 \d{3} ", said))
            round.count(outcome, repr(head[:120]), wrong=f"{answers} answers" if answers > 1 else None)
        check_serving(round, client)


@attack(allowed={OK, "404", "405"})
def bodies_behind_upgrades(round: Round) -> None:
    """Requests that ask for an upgrade, with the text of an unload as their body: one answer, and nothing unloaded."""
    unload = b"POST /v2/repository/models/noop/unload HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n"
    chunked = _CHUNKED + b"\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(unload), unload)
    sized = b"Content-Length: %d\r\n\r\n%b" % (len(unload), unload)
    with serving(round) as client:
        while round.has_time:
            verb, path = round.random.choice((b"GET", b"POST")), round.random.choice((LIVE, "/v2", CLASSIFY)).encode()
            protocol = round.random.choice((b"h2c", b"websocket", b"TLS/1.0"))
            head = b"%b %b HTTP/1.1\r\nHost: localhost\r\nConnection: close, Upgrade\r\n" % (verb, path)
            behind = round.random.choice((sized, chunked))
            said = answers_to(round.server.http, head + b"Upgrade: " + protocol + b"\r\n" + behind)
            answers = len(re.findall(rb"HTTP/1\.1 \d{3} ", said))
            outcome = said[9:12].decode().replace("200", OK)
            allowed = None if path != CLASSIFY.encode() else frozenset({"400", "405"})
            round.count(outcome, repr(head[:80]), allowed, f"{answers} answers" if answers != 1 else None)
        check_serving(round, client)


@attack(allowed={"400"})
def keys_that_come_twice(round: Round) -> None:
    """JSON that a proxy may read in another way: the same refusal for a short and a long body."""
    texts = (
        b'{"id":"a","id":"b","inputs":[]}',
        b'{"inputs":[],"parameters":{"mode":"graph","mode":"xla"}}',
        b'{"\\u0069nstances":[[1]],"instances":[[2]]}',
        b'{"instances":[[NaN]]}',
    )
    with serving(round) as client, http1.Client(round.server.http) as connection:
        while round.has_time:
            text, padding_bytes = round.random.choice(texts), round.random.choice((0, 70_000))
            path = round.random.choice((DIGITS, PREDICT, CLASSIFY))
            outcome, _, wrong = connection.ask(_json(path, text + b" " * padding_bytes))
            round.count(outcome, f"{text!r} and {padding_bytes} bytes", wrong=wrong)
        check_serving(round, client)


def answers_to(address: str, data: bytes) -> bytes:
    """Returns all that is said until the connection ends."""
    host, port = address.rsplit(":", 1)
    said = b""
    with socket.create_connection((host, int(port)), timeout=5) as connection, suppress(OSError):
        connection.sendall(data)
        while part := connection.recv(65_536):
            said += part
    return said


def _tensor(data: str, datatype: str = "UINT8", name: str = "pixels", shape: str = "[1,32,32,3]") -> bytes:
    return f'{{"inputs":[{{"name":"{name}","datatype":"{datatype}","shape":{shape},"data":{data}}}]}}'.encode(
        "utf-8", "surrogatepass"
    )


def _zipped(data: bytes, times: int = 1) -> bytes:
    for _ in range(times):
        data = gzip.compress(data, 9)
    return data


def _sized(size: Any) -> http1.Request:
    tensor = {"name": "pixels", "datatype": "UINT8", "shape": [1, 32, 32, 3], "parameters": {"binary_data_size": size}}
    return http1.Request("POST", DIGITS, {"inputs": [tensor]}, bytes(3072))


SIZES: Final[tuple[Any, ...]] = (-1, 0, 1, 3071, 3073, 2**31, 2**63, 1e3, "3072", None, [], 10**400)
BOMBS: Final[tuple[Callable[[], http1.Request], ...]] = (
    # Deep, wide, long.
    lambda: _json(DIGITS, b"[" * 1_000_000),
    lambda: _json(DIGITS, b'{"inputs":' * 500_000),
    lambda: _json(DIGITS, b'{"inputs":[' + b"[" * 60_000 + b"]" * 60_000 + b"]}"),
    lambda: _json(PREDICT, b'{"instances":' + b"[" * 20_000 + b"1" + b"]" * 20_000 + b"}"),
    lambda: _json(DIGITS, b"{" + b",".join(b'"k%d":0' % number for number in range(15_000)) + b"}"),
    lambda: _json(DIGITS, b'{"inputs":[' + b"{}," * 7_000_000 + b"{}]}"),
    lambda: _json(PREDICT, b'{"inputs":{' + b",".join(b'"k%d":[1]' % number for number in range(5000)) + b"}}"),
    lambda: _json(DIGITS, b'{"inputs":[],"inputs":[]}' + b" " * 20_000_000),
    lambda: _json(DIGITS, _tensor("[]", shape=f"[{','.join(['9223372036854775807'] * 3000)}]")),
    lambda: _json(DIGITS, _tensor("[]", shape="[4611686018427387904,4,1,3]")),
    # Numbers.
    lambda: _json(DIGITS, _tensor(f"[{','.join(['1e999999'] * 3072)}]", "FP32")),
    lambda: _json(DIGITS, _tensor(f"[{','.join(['NaN'] * 3072)}]", "FP32")),
    lambda: _json(DIGITS, _tensor("[" + "9" * 1_000_000 + "]")),
    lambda: _json(DIGITS, _tensor("[" + "9" * 5000 + "]")),
    lambda: _json(DIGITS, _tensor(f"[{','.join(['1' * 60] * 300_000)}]")),
    lambda: _json(PREDICT, b'{"instances":[' + b"1e5," * 5_000_000 + b"1]}"),
    lambda: _json(PREDICT, b'{"instances":[' + b"-" * 5_000_000 + b"]}"),
    # Strings where numbers belong, which NumPy would make all as long as the longest.
    lambda: _json(DIGITS, _tensor(json.dumps([" " * 30_000, *[""] * 8000]))),
    lambda: _json(PREDICT, json.dumps({"inputs": {"pixels": [" " * 30_000, *[""] * 8000]}}).encode()),
    lambda: _json(PREDICT, json.dumps({"instances": [[" " * 100_000, *[""] * 15_000]]}).encode()),
    lambda: _json(DIGITS, _tensor('["\ud800","\\ud800","\\u0000"]', "BYTES", "image", "[3]")),
    # Base64.
    lambda: _json(DIGITS, _tensor(f'["{"A" * 20_000_001}"]', "BYTES", "image", "[1]")),
    lambda: _json(DIGITS, _tensor(f'["{"AAA=" * 5_000_000}"]', "BYTES", "image", "[1]")),
    lambda: _json(DIGITS, _tensor(json.dumps(["=" * 2000] * 5000), "BYTES", "image", "[5000]")),
    lambda: _json(PREDICT, b'{"instances":[{"b64":"' + b"A" * 20_000_000 + b'","x":1}]}'),
    lambda: _json(DIGITS, b'{"inputs":[],"parameters":{"timeout":"' + b"A" * 20_000_000 + b'"}}'),
    lambda: _json(CLASSIFY, json.dumps({"image": "A" * 16_000_000, "mode": "A" * 4_000_000}).encode()),
    # Sizes that lie.
    *(partial(_sized, size) for size in SIZES),
    # Compressed.
    lambda: _json(DIGITS, _zipped(bytes(200_000_000)), "Content-Encoding: gzip"),
    lambda: _json(DIGITS, _zipped(bytes(20_000_000), 3), "Content-Encoding: gzip"),
    lambda: _json(DIGITS, _zipped(b"{}") * 100_000, "Content-Encoding: gzip"),
    lambda: _json(DIGITS, zlib.compress(bytes(50_000_000)), "Content-Encoding: deflate"),
    lambda: _json(DIGITS, zlib.compress(b"{}")[:-3], "Content-Encoding: deflate"),
    lambda: _json(DIGITS, b"\0\0\0\xff\xff" * 1_000_000, "Content-Encoding: deflate"),
    lambda: _json(DIGITS, b"{}", "Content-Encoding: " + "gzip, " * 5000),
    lambda: _json(DIGITS, b"{}", "Content-Encoding: br"),
    # Heads.
    lambda: http1.Request("POST", CLASSIFY, headers=('Content-Type: multipart/form-data; a="' + ";" * 60_000,)),
    lambda: http1.Request("POST", CLASSIFY, headers=("Content-Type: multipart/form-data" + "; a=b" * 12_000,)),
    lambda: http1.Request("POST", CLASSIFY + "?" + "a&" * 30_000),
    lambda: http1.Request("POST", CLASSIFY + "?top_k=" + "9" * 60_000),
    lambda: http1.Request("GET", "/v2?" + "%00" * 20_000),
    lambda: http1.Request("GET", "/metrics", headers=("Accept: " + "text/plain;q=0.1," * 3500,)),
    lambda: http1.Request("GET", "/" + "%2e%2e%2f" * 6000),
    lambda: http1.Request("GET", "/v2/models/" + "a/versions/" * 5000),
    lambda: http1.Request("GET", "/v1/models/" + ":predict" * 7000),
    lambda: http1.Request("GET", "/v2/health/live%0a"),
    lambda: http1.Request("GET", "/v2/models/digits%2fconfig"),
    *(partial(http1.Request, verb, LIVE) for verb in ("OPTIONS", "TRACE", "PUT", "DELETE", "PATCH", "PROPFIND")),
)


def _json(path: str, text: bytes, *headers: str) -> http1.Request:
    return http1.Request("POST", path, damaged=text, headers=("Content-Type: application/json", *headers))


@attack(allowed=REFUSED, weight=2)
def http_bombs(round: Round) -> None:
    """Requests that are small to send and large to read; nobody else waits for long meanwhile."""
    number = 0
    with serving(round) as client, http1.Client(round.server.http) as connection, _pinging(round) as worst_s:
        while round.has_time or (number < len(BOMBS) and not round.is_short):
            order = number if not round.is_short else round.random.randrange(len(BOMBS))
            request = BOMBS[order % len(BOMBS)]()
            number += 1
            outcome, _, wrong = connection.ask(request)
            said = repr(request.to_bytes()[:200])
            if (waited_s := worst_s()) > MAX_PING_S:
                wrong = f"others waited for {waited_s:.1f} s"
            round.count(outcome, said, wrong=wrong)
            if number % 10 == 0:
                check_serving(round, client)


@contextmanager
def _pinging(round: Round) -> Iterator[Callable[[], float]]:
    """Gives what returns the longest answer of the server's liveness since it was last called, in seconds."""
    worst, over, host = [0.0], threading.Event(), round.server.http

    def ping() -> None:
        connection = HTTPConnection(host, timeout=60)
        while not over.is_set():
            began = time.monotonic()
            connection.request("GET", LIVE)
            connection.getresponse().read()
            worst[0] = max(worst[0], time.monotonic() - began)
            over.wait(0.005)
        connection.close()

    def worst_s() -> float:
        found, worst[0] = worst[0], 0.0
        return found

    thread = threading.Thread(target=ping, daemon=True)
    thread.start()
    try:
        yield worst_s
    finally:
        over.set()
        thread.join()


@attack(allowed={OK}, site="own", is_short=False)
def http_slow_bodies(round: Round) -> None:
    """All connections are taken by bodies that trickle and by answers that are not read; new clients get in."""
    noop = {"name": "noop", "source": "builtin:noop", "modes": ["graph"], "buckets": [1, 8]}
    limits = {"max_connections": MAX_CONNECTIONS, "max_connections_per_address": MAX_CONNECTIONS}
    server = round.start({"models": [noop], **limits}).wait_until_ready()
    head = f"POST {NOOP} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n".encode()
    unread = http1.Request("GET", "/openapi.json").to_bytes() * 16
    with ExitStack() as held:
        slow: list[http1.Connection] = []
        while round.has_time:
            for _ in range(MAX_CONNECTIONS // 4):
                connection = held.enter_context(http1.Connection(server.http, window_bytes=2048))
                connection.send(unread if len(slow) % 3 == 0 else head)
                slow.append(connection)
            for connection in slow:
                connection.send(b"x")
            _check_gets_in(round, server.http)


def _check_gets_in(round: Round, address: str) -> None:
    give_up_at = time.monotonic() + GIVES_WAY_S
    outcome, wrong = CLOSED, None
    while outcome == CLOSED and time.monotonic() < give_up_at:
        with http1.Client(address) as asking:
            outcome, _, wrong = asking.ask(http1.Request("GET", LIVE))
        time.sleep(0.1 if outcome == CLOSED else 0)
    round.count(outcome, "a new client", wrong=wrong)
