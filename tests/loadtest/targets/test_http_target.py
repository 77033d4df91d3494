from __future__ import annotations

import asyncio
import json
import random
import time
import zlib
from collections.abc import Sequence
from dataclasses import replace

import pytest
from tests.loadtest.liar import HANG_UP, NEVER, Step, lying, response

from xlaserve_loadtest.record.requests import STAGES, Status
from xlaserve_loadtest.schedule.payload import PayloadError, Request
from xlaserve_loadtest.schedule.tensors import Tensor
from xlaserve_loadtest.targets import open_inference_rest as rest
from xlaserve_loadtest.targets.answers import Checker
from xlaserve_loadtest.targets.channel import Transport
from xlaserve_loadtest.targets.http_client import HttpAnswer
from xlaserve_loadtest.targets.target import ModelInfo, Reply, TargetError
from xlaserve_proto import open_inference_pb2 as oip

PIXELS = bytes(range(2 * 2 * 3))
MESSAGE = oip.ModelInferRequest(model_name="digits", raw_input_contents=[PIXELS])
MESSAGE.inputs.add(name="pixels", datatype="UINT8", shape=[1, 2, 2, 3])
MADE = Request(MESSAGE.SerializeToString(), 1, "")
INFO = ModelInfo(
    "digits", (2, 2), (Tensor("scores", "FP32", (-1, 2)),), {}, "liar 1", extensions=("binary_tensor_data",)
)
SCORES = b"\x00\x00\x80>\x00\x00@?"  # 0.25 and 0.75


def binary(scores: bytes = SCORES, *, shape: Sequence[int] = (1, 2), size: int = 8, more: str = "") -> bytes:
    output = {"name": "scores", "datatype": "FP32", "shape": shape, "parameters": {"binary_data_size": size}}
    head = json.dumps({"outputs": [output], "parameters": {"mode": "graph", "queue_s": 0.5}}) + more
    return response(head.encode() + scores, inference_header_content_length=str(len(head)))


def listed(data: object, **more: object) -> bytes:
    output = {"name": "scores", "datatype": "FP32", "shape": [1, 2], "data": data}
    return response(json.dumps({"model_name": "digits", "outputs": [output], **more}).encode())


async def ask(address: str, *, info: ModelInfo = INFO, deadline_s: float = 5.0) -> Reply:
    async with rest.target(deadline_s).connect([info], [address]) as connection:
        return await connection.send(rest.encode(MADE, info))


@pytest.mark.parametrize("answer", [binary(), listed([0.25, 0.75]), listed([[0.25, 0.75]])])
async def test_a_right_answer_is_one_in_binary_and_in_json(answer: bytes) -> None:
    async with lying(answer) as liar:
        assert (await ask(liar.address)).status is Status.OK
        async with rest.target(5.0).connect([INFO], [liar.address]) as connection:
            (scores,) = await connection.outputs(rest.encode(MADE, INFO))
    assert scores.tolist() == [[0.25, 0.75]]


async def test_an_answer_has_arrived_before_it_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    checks_ns: list[int] = []
    check = Checker.reply

    def slow(checker: Checker[HttpAnswer], answer: HttpAnswer, request: Request) -> Reply:
        checks_ns.append(time.monotonic_ns())
        return check(checker, answer, request)

    monkeypatch.setattr(Checker, "reply", slow)
    async with lying(0.02, binary()) as liar:
        sent_ns = time.monotonic_ns()
        reply = await ask(liar.address)
    assert sent_ns + 20e6 <= reply.arrived_ns <= checks_ns[0]


async def test_the_servers_own_stages_are_read() -> None:
    async with lying(binary()) as liar:
        assert (await ask(liar.address)).stages[STAGES.index("queue_s")] == 0.5


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (binary(shape=(1, 3)), "expected outputs"),
        (binary(SCORES[:4], size=4), "has 4 bytes"),
        (binary(SCORES[:4]), "output scores has 8 bytes, and 4 follow"),
        (binary(SCORES * 2), "8 bytes follow the outputs"),
        (binary(more="}"), "expected JSON"),
        (binary(b"\x00\x00\xc0\x7f" * 2), "expected finite numbers"),
        (response(b"{}", inference_header_content_length="soon"), "not an answer"),
        (listed([0.25]), "has 1 elements"),
        (listed([0.25, None]), "expected finite numbers"),
        (listed(["a", "b"]), "output scores, FP32"),
        (listed(["0.25", "0.75"]), 'output scores, FP32: expected numbers, got "0.25"'),
        (listed([0.25, "0.75"]), 'output scores, FP32: expected numbers, got "0.75"'),
        (listed([0.25, True]), "output scores, FP32: expected numbers, got true"),
        (listed([0.25, 0.75], model_name="cats"), "expected an answer of digits, got one of cats"),
        (listed(7), "not an answer"),
        (response(b'{"outputs": 7}'), "not an answer"),
        (response(b"[]"), "expected an object"),
        (response(b'{"error": "full"}'), "HTTP 200 with an error: full"),
        (listed([0.25, 0.75], error="full"), "HTTP 200 with an error: full"),
        (response(b"<html>"), "expected JSON, got b'<html>'"),
        (response(zlib.compress(b"{}"), content_encoding="deflate"), "expected JSON"),
    ],
)
async def test_a_lie_is_no_answer(answer: bytes, reason: str) -> None:
    async with lying(answer) as liar:
        reply = await ask(liar.address)
    assert (reply.status, reason in reply.detail) == (Status.INVALID_REPLY, True), reply.detail


@pytest.mark.parametrize(
    ("steps", "status", "detail"),
    [
        ([response(b'{"error": "no"}', "400 Bad Request")], Status.INVALID_ARGUMENT, "HTTP 400: no"),
        ([response(b"who?", "401 Unauthorized")], Status.UNAUTHENTICATED, "HTTP 401: who?"),
        (
            [response(b'{"error": "full"}', "503 Service Unavailable", retry_after="7")],
            Status.UNAVAILABLE,
            "HTTP 503: full (retry after 7)",
        ),
        ([response(b"", "429 Too Many Requests")], Status.RESOURCE_EXHAUSTED, "HTTP 429: "),
        ([response(b"[1]", "500 Internal Server Error")], Status.INTERNAL, "HTTP 500: [1]"),
        ([response(b"", "418 I'm a teapot")], Status.UNKNOWN, "HTTP 418: "),
        ([response(b"", "302 Found", location="http://elsewhere")], Status.UNKNOWN, "HTTP 302: "),
        ([NEVER], Status.DEADLINE_EXCEEDED, "the client's deadline"),
        ([HANG_UP], Status.UNAVAILABLE, "the server closed the connection"),
        ([binary()[:-3], HANG_UP], Status.UNAVAILABLE, "the connection was closed in the middle of an answer"),
    ],
)
async def test_a_failure_is_named_as_over_grpc(steps: list[Step], status: Status, detail: str) -> None:
    async with lying(*steps) as liar:
        assert await ask(liar.address, deadline_s=0.3) == Reply(status, detail=detail)


async def test_connections_closed_at_random_lose_requests_but_mix_none_up() -> None:
    chance = random.Random(7)

    def script(number: int) -> Sequence[Step]:
        answer = listed([0.25, 0.75], id=str(number))
        steps: list[Sequence[Step]] = [[answer], [answer, HANG_UP], [answer[: len(answer) // 2], HANG_UP]]
        return steps[chance.randrange(3)]

    async with lying(script=script) as liar, rest.target(5.0).connect([INFO], [liar.address]) as connection:
        request = rest.encode(MADE, INFO)

        async def slot() -> list[Status]:
            return [(await connection.send(request)).status for _ in range(50)]

        statuses = [status for own in await asyncio.gather(*(slot() for _ in range(4))) for status in own]
    assert set(statuses) == {Status.OK, Status.UNAVAILABLE}
    assert {got.body for got in liar.got} == {request.data.partition(b"\r\n\r\n")[2]}


async def test_several_servers_take_turns_and_one_that_is_gone_fails_alone() -> None:
    async with lying(binary()) as liar:
        addresses = [liar.address, "http://127.0.0.1:1"]
        async with rest.target(5.0).connect([INFO], addresses) as connection:
            replies = [await connection.send(rest.encode(MADE, INFO)) for _ in range(4)]
    assert [(reply.status, reply.target) for reply in replies] == [(Status.OK, 0), (Status.UNAVAILABLE, 1)] * 2


async def test_a_request_carries_headers_mode_and_binary_tensors() -> None:
    info = replace(INFO, name="a/b", transport=Transport(headers=(("authorization", "me"), ("host", "models.test"))))
    async with lying(binary()) as liar, rest.target(5.0).connect([info], [liar.address]) as connection:
        await connection.send(rest.encode(replace(MADE, mode="graph"), info))
    head, body = liar.got[0]
    lines = head.decode().split("\r\n")
    assert lines[0] == "POST /v2/models/a%2Fb/infer HTTP/1.1"
    assert {"host: models.test", "authorization: me"} < set(lines)
    assert body.endswith(PIXELS)
    said = json.loads(body[: -len(PIXELS)])
    assert said["parameters"] == {"mode": "graph", "binary_data_output": True}
    assert said["inputs"][0]["parameters"] == {"binary_data_size": len(PIXELS)}


async def test_a_server_without_the_extension_gets_json() -> None:
    info = replace(INFO, extensions=())
    async with lying(listed([0.25, 0.75])) as liar:
        assert (await ask(liar.address, info=info)).status is Status.OK
    assert json.loads(liar.got[0].body)["inputs"][0]["data"] == [*PIXELS]


async def test_requests_are_compressed_once() -> None:
    info = replace(INFO, transport=Transport(compression="deflate"))
    async with lying(binary()) as liar:
        await ask(liar.address, info=info)
    assert b"content-encoding: deflate" in liar.got[0].head
    assert zlib.decompress(liar.got[0].body).endswith(PIXELS)


def test_a_request_can_be_made_unlike_others_where_it_ends_with_its_image() -> None:
    stamped = replace(MADE, stamp_at=0)
    assert rest.encode(stamped, INFO).stamped(1).data[:-8] == rest.encode(stamped, INFO).data[:-8]
    assert rest.encode(stamped, INFO).stamped(1).data.endswith((1).to_bytes(8, "little"))
    for info in (replace(INFO, extensions=()), replace(INFO, transport=Transport(compression="gzip"))):
        with pytest.raises(PayloadError, match="--distinct: over HTTP expected binary tensors, without --compression"):
            rest.encode(stamped, info)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (response(b'{"error": "no model"}', "404 Not Found"), "NOT_FOUND: HTTP 404: no model"),
        (response(b"hello"), "GET /v2: expected JSON"),
        (response(b'{"inputs": 7, "outputs": []}'), "the metadata of digits are not as the protocol has them"),
    ],
)
async def test_metadata_that_can_not_be_had_are_said(answer: bytes, reason: str) -> None:
    async with lying(answer) as liar:
        with pytest.raises(TargetError, match=reason):
            await rest.describe(liar.address, "digits")
    with pytest.raises(TargetError, match="UNAVAILABLE"):
        await rest.describe("http://127.0.0.1:1", "digits")
