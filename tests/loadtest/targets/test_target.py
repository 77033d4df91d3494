from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from tests.loadtest.conftest import StartPuppet

from xlaserve_loadtest.record.lines import STAGES, Status
from xlaserve_loadtest.schedule.payload import Request
from xlaserve_loadtest.schedule.tensors import Tensor
from xlaserve_loadtest.targets.target import (
    GrpcTarget,
    ModelInfo,
    TargetError,
    describe,
    read_outputs,
    read_reply,
)
from xlaserve_proto import open_inference_pb2 as oip

MESSAGE = oip.ModelInferRequest(model_name="digits")
MESSAGE.parameters["mode"].string_param = "xla"
MESSAGE.inputs.add(name="pixels", datatype="UINT8", shape=[2, 32, 32, 3])
REQUEST = Request(MESSAGE.SerializeToString(), 2, "xla")


def reply(
    *,
    mode: str = "xla",
    shape: Sequence[int] = (2, 10),
    raw_bytes: int = 80,
    name: str = "scores",
    raws: int = 1,
    typed: int = 0,
) -> oip.ModelInferResponse:
    message = oip.ModelInferResponse(model_name="digits")
    message.parameters["mode"].string_param = mode
    message.parameters["queue_s"].double_param = 0.5
    message.outputs.add(name=name, datatype="FP32", shape=shape)
    message.outputs[0].contents.fp32_contents.extend([0.5] * typed)
    message.raw_output_contents.extend([bytes(raw_bytes)] * raws)
    return message


def test_a_right_reply_carries_the_stages_that_the_server_told(model_info: ModelInfo) -> None:
    result = read_reply(reply().SerializeToString(), REQUEST, model_info)
    assert result.status == Status.OK
    assert result.stages[STAGES.index("queue_s")] == 0.5
    assert result.stages[STAGES.index("total_s")] != result.stages[STAGES.index("total_s")]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"\xff", "."),
        (b"", "expected outputs"),
        (reply(mode="graph").SerializeToString(), "asked for mode xla, was run in graph"),
        (reply(shape=(1, 10)).SerializeToString(), "expected outputs"),
        (reply(shape=(2, 9)).SerializeToString(), "expected outputs"),
        (reply(name="other").SerializeToString(), "expected outputs"),
        (reply(raw_bytes=79).SerializeToString(), "has 79 bytes"),
        (reply(raws=0).SerializeToString(), "has 0 elements"),
        (reply(raws=0, typed=19).SerializeToString(), "has 19 elements"),
        (reply(raws=2).SerializeToString(), "1 outputs, and the contents of 2"),
    ],
    ids=lambda value: value if isinstance(value, str) else "data",  # a map of Protobuf has no order
)
def test_a_wrong_reply_is_not_taken_for_an_answer(model_info: ModelInfo, data: bytes, reason: str) -> None:
    result = read_reply(data, REQUEST, model_info)
    assert result.status == Status.INVALID_REPLY
    assert reason in result.detail


def test_typed_numbers_are_an_answer_too(model_info: ModelInfo) -> None:
    assert read_reply(reply(raws=0, typed=20).SerializeToString(), REQUEST, model_info).status == Status.OK


def test_a_side_that_was_left_open_may_have_any_length(model_info: ModelInfo) -> None:
    promised = replace(model_info, outputs=(Tensor("scores", "FP32", (-1, -1)),))
    assert read_reply(reply().SerializeToString(), REQUEST, promised).status == Status.OK
    other = reply(shape=(2, 10, 1)).SerializeToString()
    assert read_reply(other, REQUEST, promised).status == Status.INVALID_REPLY


def test_outputs_come_out_as_numbers() -> None:
    message = reply()
    message.raw_output_contents[0] = np.arange(20, dtype="<f4").tobytes()
    (scores,) = read_outputs(message.SerializeToString())
    np.testing.assert_array_equal(scores, np.arange(20.0).reshape(2, 10))


async def test_the_model_is_described(start_puppet: StartPuppet) -> None:
    info = await describe(start_puppet(), "digits")
    assert info.size == (32, 32)
    assert info.outputs[0].shape == (-1, 10)
    assert info.takes_images
    assert (info.server, info.properties) == ("puppet 1", {"modes": "xla,graph", "buckets": "1x32x32,8x32x32"})


async def test_a_model_of_several_sizes_has_no_size(start_puppet: StartPuppet) -> None:
    assert (await describe(start_puppet("--any-size"), "digits")).size is None


async def test_an_unknown_model_and_an_unreachable_target_are_explained(start_puppet: StartPuppet) -> None:
    with pytest.raises(TargetError, match="NOT_FOUND: no model nonsense"):
        await describe(start_puppet(), "nonsense")
    with pytest.raises(TargetError, match=r"127\.0\.0\.1:1: UNAVAILABLE"):
        await describe("127.0.0.1:1", "digits")


async def test_requests_are_answered_at_the_same_time(start_puppet: StartPuppet, model_info: ModelInfo) -> None:
    async with GrpcTarget(deadline_s=5).connect([model_info], [start_puppet()]) as connection:
        replies = await asyncio.gather(*(connection.send(REQUEST) for _ in range(20)))
        (scores,) = await connection.outputs(REQUEST)
    assert {reply.status for reply in replies} == {Status.OK}
    assert scores.shape == (2, 10)


async def test_load_is_spread_over_several_targets(start_puppet: StartPuppet, model_info: ModelInfo) -> None:
    addresses = [start_puppet("--fail-after", "5"), start_puppet("--fail-after", "5")]
    async with GrpcTarget(deadline_s=5).connect([model_info], addresses) as connection:
        replies = [await connection.send(REQUEST) for _ in range(12)]
    assert [reply.status for reply in replies] == [Status.OK] * 10 + [Status.INTERNAL] * 2


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
    async with GrpcTarget(deadline_s=0.5).connect([model_info], [start_puppet(*flags)]) as connection:
        reply = await connection.send(REQUEST)
        with pytest.raises(TargetError):
            await connection.outputs(REQUEST)
    assert reply.status == status
    assert reply.detail
