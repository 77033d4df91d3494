"""Connections that promise more than they keep."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Final

from tests.attack import http2, samples
from tests.attack.client import INFERENCE, VISION, Client
from tests.attack.http2 import CONTINUATION, DATA, END_HEADERS, END_STREAM, HEADERS, PING, RST_STREAM, SETTINGS
from tests.attack.registry import OK, Round, attack

INFER: Final = f"{INFERENCE}ModelInfer"
CONNECTIONS: Final = 300
SHORT_CONNECTIONS: Final = 60
RECOVERS_S: Final = 10.0
"""How long a server may be away after a call that ends grpcio's."""
LISTENS_AGAIN: Final = "listening again"
"""What the log says of it."""
GARBAGE: Final = (
    b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"\x16\x03\x01\x02\0\x01\0\x01\xfc\x03\x03" + bytes(500),  # TLS
    b"\0" * 10_000,
    http2.PREFACE + b"\xff" * 10_000,
    http2.PREFACE + http2.frame(SETTINGS, 0, 0, b"\0\4\xff\xff\xff\xff"),
    http2.PREFACE + http2.frame(SETTINGS, 0, 0) + http2.frame(DATA, 0, 1, b"no headers"),
    http2.PREFACE + http2.frame(SETTINGS, 0, 0) + http2.frame(99, 255, 7, b"what is this"),
    http2.PREFACE[:10],
)


@contextmanager
def serving(round: Round) -> Iterator[Client]:
    """Gives a client; whenever it is asked, valid requests must be answered by `check_serving`."""
    with Client(round.server.grpc) as client:
        yield client


def check_serving(round: Round, client: Client) -> None:
    """Accounts for a valid request, which must be answered despite other connections."""
    valid = samples.noop([round.random.randrange(256)])
    call = client.send_until_answered(valid.method, valid.message.SerializeToString(), round.attack.outage_s)
    round.settle(call, "a valid request meanwhile", allowed=frozenset({OK}), check=valid.check)


def call(stream: int, data: bytes, *, path: str = INFER) -> bytes:
    """Returns the frames of a whole call, in frames of at most 16 KiB."""
    whole = http2.message(data)
    parts = [whole[at : at + 16_384] for at in range(0, len(whole), 16_384)]
    frames = [http2.frame(DATA, 0, stream, part) for part in parts[:-1]]
    last = http2.frame(DATA, END_STREAM, stream, parts[-1])
    return b"".join((http2.frame(HEADERS, END_HEADERS, stream, http2.headers(path)), *frames, last))


@attack(allowed={OK, "refused"})
def hang_ups_in_a_message(round: Round) -> None:
    """Calls that break off anywhere: in the preface, in headers, in a message, before its answer; closed or reset."""
    with serving(round) as client:
        data = samples.noop([5]).message.SerializeToString()
        number = 0
        while round.has_time:
            number += 1
            whole = call(1, data)
            with http2.Connection(round.server.grpc) as connection:
                is_open = connection.send(whole[: round.random.randrange(len(whole) + 1)])
                time.sleep(round.random.choice((0.0, 0.0, 0.001, 0.01)))
                if round.random.random() < 0.5:
                    connection.reset()
            round.count(OK if is_open else "refused", f"hang-up {number}")
            if number % 20 == 0:
                check_serving(round, client)


@attack(allowed={OK, "refused"})
def half_open_connections(round: Round) -> None:
    """Connections that say nothing, or half a call, and stay; the server goes on to answer others."""
    beginnings = (
        b"",
        http2.PREFACE,
        http2.PREFACE + http2.frame(SETTINGS, 0, 0),
        http2.PREFACE + http2.frame(SETTINGS, 0, 0) + call(1, samples.noop([5]).message.SerializeToString())[:5000],
        http2.PREFACE + http2.frame(SETTINGS, 0, 0) + http2.frame(HEADERS, 0, 1, http2.headers(INFER)),
    )
    with serving(round) as client, ExitStack() as opened:
        for number in range(SHORT_CONNECTIONS if round.is_short else CONNECTIONS):
            connection = opened.enter_context(http2.Connection(round.server.grpc, greets=False))
            round.count(OK if connection.send(beginnings[number % len(beginnings)]) else "refused", f"{number}")
            if number % 20 == 0:
                check_serving(round, client)
        check_serving(round, client)


@attack(allowed={OK, "refused"}, outage_s=RECOVERS_S)
def garbage_frames(round: Round) -> None:
    """What is no HTTP/2, no gRPC, or lies about its length."""
    with serving(round) as client:
        number = 0
        while round.has_time:
            number += 1
            # Damage may make a path unreadable, and then everybody is hung up on.
            with suppress(ConnectionError), http2.Connection(round.server.grpc, greets=False) as connection:
                kind = round.random.randrange(4)
                if kind == 0:
                    data = round.random.choice(GARBAGE)
                elif kind == 1:
                    data = samples.damage(
                        http2.PREFACE + http2.frame(SETTINGS, 0, 0) + call(1, b"x" * 100), round.random
                    )
                elif kind == 2:
                    lies = http2.message(
                        b"abc",
                        length=round.random.choice((0, 1, 2**31, 2**32 - 1)),
                        compressed=round.random.randrange(3),
                    )
                    data = http2.PREFACE + http2.frame(SETTINGS, 0, 0)
                    data += http2.frame(HEADERS, END_HEADERS, 1, http2.headers(INFER))
                    data += http2.frame(DATA, END_STREAM, 1, lies)
                else:
                    more = {"grpc_timeout": round.random.choice(("0n", "99999999H", "-1S", "x", "1" * 50))}
                    more |= {"grpc_encoding": round.random.choice(("gzip", "deflate", "nope", "identity"))}
                    data = http2.PREFACE + http2.frame(SETTINGS, 0, 0)
                    data += http2.frame(HEADERS, END_HEADERS, 1, http2.headers(f"{VISION}ListModels", **more))
                    data += http2.frame(DATA, END_STREAM, 1, http2.message(b"\0\1\2", compressed=1))
                round.count(OK if connection.send(data) else "refused", f"garbage {number}")
                if round.random.random() < 0.2:
                    connection.socket.settimeout(0.05)
                    with suppress(OSError):
                        connection.socket.recv(1000)
            if number % 50 == 0:
                check_serving(round, client)
        check_serving(round, client)


@attack(allowed={OK}, outage_s=RECOVERS_S)
def unreadable_paths(round: Round) -> None:
    """Calls whose path is no text: grpcio ends the whole server over them, which has to listen again at once."""
    before = round.server.log.count(LISTENS_AGAIN)

    def has_listened_again(times: int) -> bool:
        return round.server.log.count(LISTENS_AGAIN) == before + times

    with serving(round) as client:
        number = 0
        while round.has_time:
            number += 1
            path = b"/\xff" + round.random.randbytes(round.random.choice((0, 3, 60)))
            block = http2.headers("/PATH").replace(b"\x05/PATH", bytes([len(path)]) + path)
            with http2.Connection(round.server.grpc) as connection:
                connection.send(http2.frame(HEADERS, END_HEADERS, 1, block))
                connection.send(http2.frame(DATA, END_STREAM, 1, http2.message(b"")))
                # Until then the ended one may still answer.
                round.server.wait_for(partial(has_listened_again, number), "listen again", RECOVERS_S)
            check_serving(round, client)


@attack(allowed={OK, "refused"})
def floods_of_frames(round: Round) -> None:
    """Streams that are opened and reset at once, pings, settings, and headers that never end."""
    with serving(round) as client:
        number = 0
        while round.has_time:
            number += 1
            kind = number % 4
            with http2.Connection(round.server.grpc) as connection:
                is_open = True
                for index in range(200):
                    stream = 2 * index + 1
                    if kind == 0:
                        opened = http2.frame(HEADERS, END_HEADERS, stream, http2.headers(INFER))
                        data = opened + http2.frame(RST_STREAM, 0, stream, b"\0\0\0\x08")
                    elif kind == 1:
                        data = http2.frame(PING, 0, 0, bytes(8)) * 10
                    elif kind == 2:
                        data = http2.frame(SETTINGS, 0, 0, b"\0\4\0\0\xff\xff") * 10
                    elif index == 0:
                        data = http2.frame(HEADERS, 0, 1, http2.headers(INFER))
                    else:
                        data = http2.frame(CONTINUATION, 0, 1, http2.headers(INFER, **{f"x{index}": "y" * 4000}))
                    is_open = connection.send(data)
                    if not is_open:
                        break
            round.count(OK if is_open else "refused", f"flood {number} of kind {kind}")
            check_serving(round, client)


@attack(allowed={OK, "refused"})
def http_endpoint(round: Round) -> None:
    """Half-open connections, garbage and endless headers at /metrics; /healthz answers all the time."""
    lines = (
        b"",
        b"GET",
        b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n",
        b"GET /metrics HTTP/1.1\r\nX: " + b"y" * 70_000,
        b"POST /metrics HTTP/1.1\r\nContent-Length: 999999999\r\n\r\n",
        b"\xff\xfe\0garbage\r\n\r\n",
        b"GET /../../etc/passwd HTTP/1.1\r\n\r\n",
        b"GET /" + b"a" * 5000 + b" HTTP/9.9\r\n\r\n",
    )
    host, port = round.server.metrics.rsplit(":", 1)
    with ExitStack() as opened:
        for number in range(SHORT_CONNECTIONS if round.is_short else CONNECTIONS):
            connection = opened.enter_context(socket.create_connection((host, int(port)), timeout=10))
            try:
                connection.sendall(lines[number % len(lines)])
                round.count(OK, f"HTTP {number}")
            except OSError:
                round.count("refused", f"HTTP {number}")
            if number % 25 == 0:
                status, _ = round.server.get("/healthz", timeout_s=20)
                round.count(OK if status == 200 else f"HTTP {status}", "/healthz meanwhile", frozenset({OK}))
    status, _ = round.server.get("/metrics", timeout_s=20)
    round.count(OK if status == 200 else f"HTTP {status}", "/metrics afterwards", frozenset({OK}))
