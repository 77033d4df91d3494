from __future__ import annotations

import asyncio
import time

import pytest
from tests.loadtest.conftest import StartPuppet

from xlaserve_loadtest.record.requests import Status
from xlaserve_loadtest.schedule.payload import Request
from xlaserve_loadtest.schedule.tensors import Tensor
from xlaserve_loadtest.targets.answers import Checker
from xlaserve_loadtest.targets.open_inference import describe, size_of, target
from xlaserve_loadtest.targets.target import ModelInfo, Reply, TargetError
from xlaserve_proto import open_inference_pb2 as oip

MESSAGE = oip.ModelInferRequest(model_name="digits")
MESSAGE.parameters["mode"].string_param = "xla"
MESSAGE.inputs.add(name="pixels", datatype="UINT8", shape=[2, 32, 32, 3])
REQUEST = Request(MESSAGE.SerializeToString(), 2, "xla")


async def test_the_model_is_described(start_puppet: StartPuppet) -> None:
    info = await describe(start_puppet(), "digits")
    assert info.size == (32, 32)
    assert info.outputs[0].shape == (-1, 10)
    assert info.takes_images
    assert (info.server, info.properties) == ("puppet 1", {"modes": "xla,graph", "buckets": "1x32x32,8x32x32"})


async def test_a_model_of_several_sizes_has_no_size(start_puppet: StartPuppet) -> None:
    assert (await describe(start_puppet("--any-size"), "digits")).size is None


@pytest.mark.parametrize(
    ("buckets", "size"),
    [("1x32x24,8x32x24", (32, 24)), ("1x32x24,1x64x24", None), ("1,8", None), ("", None)],
)
def test_a_model_of_images_alone_has_the_size_of_its_buckets(buckets: str, size: tuple[int, int] | None) -> None:
    inputs = (Tensor("image", "BYTES", (-1, 1)),)
    assert size_of(inputs, {"buckets": buckets}) == size
    info = ModelInfo("m", None, (), {}, "s", inputs=inputs)
    assert info.takes_images


async def test_an_unknown_model_and_an_unreachable_target_are_explained(start_puppet: StartPuppet) -> None:
    with pytest.raises(TargetError, match="NOT_FOUND: no model nonsense"):
        await describe(start_puppet(), "nonsense")
    with pytest.raises(TargetError, match=r"127\.0\.0\.1:1: UNAVAILABLE"):
        await describe("127.0.0.1:1", "digits")


async def test_requests_are_answered_at_the_same_time(start_puppet: StartPuppet, model_info: ModelInfo) -> None:
    async with target(deadline_s=5).connect([model_info], [start_puppet()]) as connection:
        replies = await asyncio.gather(*(connection.send(REQUEST) for _ in range(20)))
        (scores,) = await connection.outputs(REQUEST)
    assert {reply.status for reply in replies} == {Status.OK}
    assert scores.shape == (2, 10)


async def test_load_is_spread_over_several_targets(start_puppet: StartPuppet, model_info: ModelInfo) -> None:
    addresses = [start_puppet("--fail-after", "5"), start_puppet("--fail-after", "5")]
    async with target(deadline_s=5).connect([model_info], addresses) as connection:
        replies = [await connection.send(REQUEST) for _ in range(12)]
    assert [reply.status for reply in replies] == [Status.OK] * 10 + [Status.INTERNAL] * 2
    assert [reply.target for reply in replies] == [0, 1] * 6


@pytest.mark.parametrize(
    ("flags", "status"),
    [
        (["--fail-after", "0"], Status.INTERNAL),
        (["--hang-after", "0"], Status.DEADLINE_EXCEEDED),
        (["--die-after", "1"], Status.UNAVAILABLE),
        (["--wrong-shape"], Status.INVALID_REPLY),
    ],
)
async def test_a_failure_is_a_reply(
    start_puppet: StartPuppet, model_info: ModelInfo, flags: list[str], status: Status
) -> None:
    async with target(deadline_s=0.5).connect([model_info], [start_puppet(*flags)]) as connection:
        reply = await connection.send(REQUEST)
        with pytest.raises(TargetError):
            await connection.outputs(REQUEST)
    assert reply.status == status
    assert reply.detail


async def test_an_answer_has_arrived_before_it_is_checked(
    start_puppet: StartPuppet, model_info: ModelInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks_ns: list[int] = []
    check = Checker.reply

    def slow(checker: Checker[bytes], data: bytes, request: Request) -> Reply:
        checks_ns.append(time.monotonic_ns())
        return check(checker, data, request)

    monkeypatch.setattr(Checker, "reply", slow)
    async with target(deadline_s=5).connect([model_info], [start_puppet("--delay-s", "0.02")]) as connection:
        sent_ns = time.monotonic_ns()
        reply = await connection.send(REQUEST)
    assert sent_ns + 20e6 <= reply.arrived_ns <= checks_ns[0]
