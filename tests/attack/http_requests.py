"""Requests of HTTP that are wrong by a little or by much; valid ones are answered meanwhile, by both protocols."""

from __future__ import annotations

import base64
import json
import random
import struct
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Final

from tests.attack import http1, samples
from tests.attack.client import PATIENCE_S
from tests.attack.connections import SHORT_CONNECTIONS, check_serving, serving
from tests.attack.registry import OK, Round, attack

from xlaserve.admission.calls import CROWDED_TRANSFER_S

CONNECTIONS: Final = 400
OTHERS: Final = "127.0.0.2"
"""An address of clients that mean no harm."""
NOOP: Final = "/v2/models/noop/infer"
DIGITS: Final = "/v2/models/digits/infer"
PREDICT: Final = "/v1/models/digits:predict"
CLASSIFY: Final = "/v1/models/digits:classify"
SEGMENT: Final = b"x" * 65_536
CLOSED: Final = "closed"
REFUSED: Final = {OK, "400", "404", "405", "408", "413", "415", "429", "431", "501", "503", "504", CLOSED}
"""How a request that may be wrong may end: any status but 500, or the connection is closed."""
ODD: Final[tuple[Any, ...]] = (
    *(None, True, False, 0, 1, -1, 2**31, 2**63, -(2**63), 10**400, 0.5, 1e308, float("nan"), float("inf"), "", "\0"),
    *("\ud800", "x" * 70_000, [], {}, [[]], [None], {"a": {}}, [[[[[[[[1]]]]]]]], [1] * 5000, ["x"] * 5000),
    [{}] * 9000,
)
KEYS: Final = ("binary_data_size", "sequence_id", "x", "binary_data", "timeout")


def infer(rng: random.Random, digits: list[int]) -> http1.Request:
    """Asks for digits by the Open Inference Protocol, in any of the ways of its REST."""
    files, pixels = [samples.digit_files()[digit] for digit in digits], samples.digit_pixels()[digits]
    shape, raw = [len(digits)], b""
    tensor: dict[str, Any]
    if rng.random() < 0.5:
        tensor = {"name": "image", "datatype": "BYTES", "shape": shape}
        raw = b"".join(struct.pack("<I", len(file)) + file for file in files)
        tensor["data"] = [base64.b64encode(file).decode() for file in files]
    else:
        datatype, code = rng.choice((("UINT8", "u1"), ("INT32", "<i4"), ("FP32", "<f4")))
        tensor = {"name": "pixels", "datatype": datatype, "shape": [*shape, samples.SIDE, samples.SIDE, 3]}
        raw, tensor["data"] = pixels.astype(code).tobytes(), pixels.reshape(-1).tolist()
    body = {"inputs": [tensor], "parameters": {"mode": rng.choice(("xla", "graph"))}, "id": str(rng.random())}
    if rng.random() < 0.5:
        return http1.Request("POST", DIGITS, body)
    del tensor["data"]
    tensor["parameters"] = {"binary_data_size": len(raw)}
    return http1.Request("POST", DIGITS, body, raw)


def predict(rng: random.Random, digits: list[int]) -> http1.Request:
    """Asks for digits as clients of TensorFlow Serving do."""
    images: list[Any] = [{"b64": base64.b64encode(samples.digit_files()[digit]).decode()} for digit in digits]
    name = "image"
    if rng.random() < 0.5:
        name, images = "pixels", samples.digit_pixels()[digits].astype(rng.choice((int, float))).tolist()
    if rng.random() < 0.3:
        return http1.Request("POST", PREDICT, {"inputs": rng.choice((images, {name: images}))})
    return http1.Request("POST", PREDICT, {"instances": rng.choice((images, [{name: image} for image in images]))})


def check(digits: list[int]) -> Callable[[bytes], str | None]:
    """Checks that an answer's top classes are those of the digits."""

    def check(data: bytes) -> str | None:
        answer = json.loads(data)
        rows = answer.get("predictions") or answer["outputs"]
        if "model_name" in answer:
            rows = [rows[0]["data"][10 * row : 10 * row + 10] for row in range(len(digits))]
        found = [row.index(max(row)) for row in rows]
        return None if found == digits else f"expected the digits {digits}, got {found}"

    return check


def mutate(value: Any, rng: random.Random) -> Any:
    """Returns a value of JSON with one part changed, removed or added."""
    if rng.random() < 0.15:
        return rng.choice(ODD)
    if isinstance(value, dict) and value:
        key = rng.choice(list(value))
        if rng.random() < 0.15:
            return {name: one for name, one in value.items() if name != key}
        if rng.random() < 0.1:
            return {
                **value,
                rng.choice(KEYS): rng.choice(ODD),
            }
        return {**value, key: mutate(value[key], rng)}
    if isinstance(value, list) and value:
        index = rng.randrange(len(value))
        return [*value[:index], mutate(value[index], rng), *value[index + 1 :]]
    return rng.choice(ODD)


@attack(allowed=REFUSED, weight=2)
def http_mutated_requests(round: Round) -> None:
    """REST requests with fields changed and bytes damaged, among valid ones, which must be answered correctly."""
    rng, number = round.random, 0
    with serving(round) as client, http1.Client(round.server.http) as connection:
        while round.has_time:
            number += 1
            digits = samples.digits(rng)
            request = rng.choice((infer, predict))(rng, digits)
            if rng.random() < 0.3:
                outcome, body, wrong = connection.ask(request)
                wrong = wrong or (check(digits)(body) if outcome == OK else None)
                round.count(outcome, f"request {number}, right", frozenset({OK, "429"}), wrong)
            else:
                kind = rng.randrange(4)
                if kind == 0:
                    request = request._replace(raw=samples.damage(request.raw, rng) if request.raw else b"x")
                elif kind == 1:
                    request = request._replace(damaged=samples.damage(json.dumps(request.body).encode(), rng))
                elif kind == 2:
                    length = rng.choice(("0", "-1", "1e9", "99999999999", "7", "x" * 999, "\xff", ""))
                    request = request._replace(json_length=length)
                else:
                    for _ in range(rng.choice((1, 1, 2, 3))):
                        request = request._replace(body=mutate(request.body, rng))
                outcome, _, wrong = connection.ask(request)
                round.count(outcome, f"request {number}, mutated", wrong=wrong)
            if number % 50 == 0:
                check_serving(round, client)


def _in_base64(data: bytes, rng: random.Random) -> str:
    """Returns an image as somebody's client writes it into JSON."""
    text = rng.choice((base64.b64encode, base64.urlsafe_b64encode))(data).decode()
    if rng.random() < 0.5:
        text = text.rstrip("=")
    if rng.random() < 0.5:
        width, end = rng.choice((60, 76)), rng.choice(("\n", "\r\n"))
        text = end.join(text[start : start + width] for start in range(0, len(text), width))
    return rng.choice(("", "data:image/png;base64,", "DATA:;charset=utf-8;base64,")) + text


@attack(allowed=REFUSED)
def http_base64(round: Round) -> None:
    """Base64 in every form, which must be read; long text that is almost base64, or made of escapes."""
    rng, number = round.random, 0
    texts = (
        "A" * 4_000_001,
        "A" * 2_000_000 + "%" + "A" * 2_000_000,
        "A" * 99 + "\\n" * 2**20,
        "A" * 99 + "\\u0041" * 2**19,
        "A" * 99 + "\\" * 2**20,
        "=" * 2**20,
        "data:" + "A" * 2**20,
        "data:;base64," + "-" * 2**20 + "\\",
    )
    with http1.Client(round.server.http) as connection:
        while round.has_time:
            number += 1
            digits = samples.digits(rng)
            if rng.random() < 0.6:
                images = [{"b64": _in_base64(samples.digit_files()[digit], rng)} for digit in digits]
                outcome, body, fault = connection.ask(http1.Request("POST", PREDICT, {"instances": images}))
                fault = fault or (check(digits)(body) if outcome == OK else None)
                round.count(outcome, f"request {number}, right", frozenset({OK, "429"}), fault)
            else:
                body = b'{"instances": [{"b64": "%b"}]}' % rng.choice(texts).encode()
                outcome, _, fault = connection.ask(http1.Request("POST", PREDICT, damaged=body))
                round.count(outcome, f"request {number}, almost base64", frozenset({"400", "413", "429"}), fault)


@attack(allowed=REFUSED)
def http_forms(round: Round) -> None:
    """Forms without an end, of a hundred thousand parts, with huge headers; files in other fields, and none at all."""
    part = b'--B\r\nContent-Disposition: form-data; name="%b"%b\r\n\r\n%b\r\n'
    png = samples.digit_files()[3]
    valid = part % (b"image", b'; filename="a.png"', png)
    bodies = (
        (valid, frozenset({"400"})),
        (valid + b"--B--\r\n", frozenset({OK})),
        (valid * 3 + b"--B--", frozenset({OK})),
        (part % (b"image", b"", b"") * 100_000 + b"--B--", None),
        (part % (b"x", b"", b"") * 100_000 + b"--B--", None),
        (b"--B\r\n" + b"a: b\r\n" * 100_000, None),
        (b"--B\r\na: " + b"b" * 1_000_000, None),
        (b"\r\n--B" * 1_000_000, None),
        (b"--B\r\n\r\n" + b"\r\n--" * 2_000_000 + b"\r\n--B--", None),
        (part % (b"other", b'; filename="a.png"', png) + b"--B--", None),
        (part % (b"image", b'; filename="a.png"', b"") + b"--B--", None),
        (part % (b"image", b"", valid.replace(b"--B", b"--C")) + b"--B--", None),
        (b"", None),
        (bytes(20_000_000), None),
    )
    types = ("multipart/form-data; boundary=B",) * 6 + ("multipart/form-data", "multipart/form-data; boundary=", "\xff")
    number = 0
    with serving(round) as client, http1.Client(round.server.http) as connection:
        while round.has_time:
            body, allowed = bodies[number % len(bodies)]
            number += 1
            content_type = types[0] if number <= len(bodies) else round.random.choice(types)
            if content_type != types[0]:
                allowed = None
            request = http1.Request("POST", CLASSIFY, damaged=body, headers=(f"Content-Type: {content_type}",))
            outcome, _, wrong = connection.ask(request)
            round.count(outcome, f"form {number}", allowed, wrong)
            check_serving(round, client)


@attack(allowed=REFUSED)
def http_garbage(round: Round) -> None:
    """Bytes that are no HTTP, heads without end, lengths that lie, requests that break off; slow ones stay open."""
    rng = round.random
    head = b"POST " + NOOP.encode() + b" HTTP/1.1\r\nHost: localhost\r\n"
    whole = head + b"Content-Length: 2\r\n\r\n{}"
    kinds: tuple[Callable[[], bytes], ...] = (
        lambda: rng.randbytes(rng.choice((1, 10, 1000, 100_000))),
        lambda: b"GET /" + b"a" * rng.choice((1000, 70_000, 2_000_000)) + b" HTTP/1.1\r\n\r\n",
        lambda: head + b"".join(b"x%d: y\r\n" % number for number in range(100_000)) + b"\r\n",
        lambda: head + b"x: " + b"y" * 5_000_000,
        lambda: head + b"Content-Length: 99\r\n\r\n{}",
        lambda: head + b"Content-Length: 1\r\n\r\n{}GET /v2 HTTP/1.1\r\n\r\n",
        lambda: head + b"Content-Length: 18446744073709551616\r\n\r\n{}",
        lambda: head + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
        lambda: head + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 30_000,
        lambda: head + b"Transfer-Encoding: chunked\r\n\r\n1;" + b"x" * 100_000,
        lambda: head + b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n" + SEGMENT,
        lambda: head + b"Transfer-Encoding: chunked\r\n\r\n100000000\r\n" + SEGMENT * 500,
        lambda: b"GET /v2/health/live HTTP/1.1\r\n\r\n" * 5000,
        lambda: b"GET /v2/models/%00%2e%2e/\xe9 HTTP/1.1\r\nX-\xe9: \xff\r\n\r\n",
        lambda: b"GET /v2 HTTP/1.1\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n" * 10,
        lambda: b"CONNECT a:1 HTTP/1.1\r\n\r\n" + rng.randbytes(100),
        lambda: whole[: rng.randrange(len(whole) + 1)],
        lambda: samples.damage(whole * 3, rng),
        lambda: head + b"Content-Length: 2\r\nExpect: 100-continue\r\n\r\n",
        lambda: b"\r\n" * rng.choice((1, 50_000)),
    )
    number = 0
    with serving(round) as client, ExitStack() as held:
        while round.has_time:
            number += 1
            connection = held.enter_context(http1.Connection(round.server.http))
            data = kinds[number % len(kinds)]()
            is_open = connection.send(data)
            end = rng.randrange(4)
            if end == 0:
                connection.half_close()
            elif end == 1:
                connection.reset()
            elif end == 2:
                outcome, wrong = connection.outcome(within_s=0.05)
                round.count(outcome, f"bytes {number}", wrong=wrong)
            round.count(OK if is_open else CLOSED, f"connection {number}")
            if number % 20 == 0:
                check_serving(round, client)
            if number % (SHORT_CONNECTIONS if round.is_short else CONNECTIONS) == 0:
                held.close()


@attack(allowed={"400"})
def http_1_0_expects_leave(round: Round) -> None:
    """HTTP/1.0 with `Expect: 100-continue`, whose bodies come later: the first that is sent back is the answer."""
    head = f"POST {NOOP} HTTP/1.0\r\nHost: localhost\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n".encode()
    with serving(round) as client:
        while round.has_time:
            with http1.Connection(round.server.http) as connection:
                connection.send(head)
                time.sleep(round.random.uniform(0.0, 0.05))
                connection.send(b"{}")
                outcome, wrong = connection.outcome(within_s=PATIENCE_S)
                round.count(outcome, "HTTP/1.0 that expects leave", wrong=wrong)
        check_serving(round, client)


@attack(allowed={OK, CLOSED, "429"}, most_mib=1000)
def http_unread_answers(round: Round) -> None:
    """Clients that pipeline requests with large answers, and read none; others are served, by both protocols."""
    pixels = {"name": "pixels", "datatype": "UINT8", "shape": [8, 224, 224, 3]}
    raw = bytes(8 * 224 * 224 * 3)
    body = {"inputs": [{**pixels, "parameters": {"binary_data_size": len(raw)}}]}
    listed = http1.Request("POST", NOOP, body, raw).to_bytes()
    described = http1.Request("GET", "/openapi.json").to_bytes() * 16
    number = 0
    with serving(round) as client, ExitStack() as held:
        while round.has_time:
            number += 1
            connection = held.enter_context(http1.Connection(round.server.http, window_bytes=2048))
            is_open = connection.send(round.random.choice((listed, described, described + listed)))
            round.count(OK if is_open else CLOSED, f"connection {number}")
            if number % 10 == 0:
                check_serving(round, client)
                with http1.Client(round.server.http) as asking:
                    digits = samples.digits(round.random)
                    outcome, answer, wrong = asking.ask(infer(round.random, digits))
                    wrong = wrong or (check(digits)(answer) if outcome == OK else None)
                    round.count(outcome, "a valid request meanwhile", frozenset({OK, "429"}), wrong)
            if number % (SHORT_CONNECTIONS if round.is_short else CONNECTIONS) == 0:
                held.close()


@attack(allowed={OK, CLOSED})
def http_slow_clients(round: Round) -> None:
    """More connections than there may be, each sending its head or its body byte by byte; others still get in.

    Their own address may have nothing but bodies, which give way once they have taken CROWDED_TRANSFER_S.
    """
    head = f"POST {NOOP} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n".encode()
    count = SHORT_CONNECTIONS if round.is_short else 3 * CONNECTIONS
    with serving(round) as client, ExitStack() as held:
        connections = [held.enter_context(http1.Connection(round.server.http)) for _ in range(count)]
        for number, connection in enumerate(connections):
            connection.send(head if number % 2 else head + b"\r\n")
        give_way_at = time.monotonic() + CROWDED_TRANSFER_S + 1.0
        while round.has_time:
            for connection in connections:
                connection.send(b"x")
            time.sleep(0.2)
            check_serving(round, client)
            early = {CLOSED} if time.monotonic() < give_way_at else set()
            for source, allowed in ((None, {OK, *early}), (OTHERS, {OK})):
                with http1.Client(round.server.http, source) as asking:
                    outcome, _, wrong = asking.ask(http1.Request("GET", "/v2/health/live"))
                    round.count(outcome, f"a valid request meanwhile from {source}", frozenset(allowed), wrong)
