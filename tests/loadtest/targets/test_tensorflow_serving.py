from __future__ import annotations

import base64
import json
import math
import struct
from dataclasses import replace

import numpy as np
import pytest
from tests.loadtest.liar import lying, response

from xlaserve_loadtest.record.requests import Status
from xlaserve_loadtest.schedule.payload import PayloadError, Request
from xlaserve_loadtest.schedule.tensors import Tensor
from xlaserve_loadtest.targets import tensorflow_serving as tfs
from xlaserve_loadtest.targets import tensorflow_serving_rest as rest
from xlaserve_loadtest.targets.answers import Checker
from xlaserve_loadtest.targets.target import ModelInfo, Reply, TargetError
from xlaserve_proto import open_inference_pb2 as oip
from xlaserve_proto import tensorflow_messages_pb2 as pb

OUTPUTS = (Tensor("classes", "INT64", (-1,)), Tensor("scores", "FP32", (-1, 2)))
INFO = ModelInfo(
    "digits",
    None,
    OUTPUTS,
    {"signature": "serving_default"},
    "liar",
    inputs=(Tensor("hint", "BYTES", (-1,)), Tensor("pixels", "UINT8", (-1, 2))),
)
ONE = replace(INFO, inputs=INFO.inputs[1:], outputs=OUTPUTS[1:])


def request(*names: str, images: int = 2) -> Request:
    message = oip.ModelInferRequest(model_name="digits")
    if "hint" in names:
        message.inputs.add(name="hint", datatype="BYTES", shape=[images])
        message.raw_input_contents.append(b"".join(struct.pack("<I", 3) + b"a\x00b" for _ in range(images)))
    if "pixels" in names:
        message.inputs.add(name="pixels", datatype="UINT8", shape=[images, 2])
        message.raw_input_contents.append(bytes(range(2 * images)))
    return Request(message.SerializeToString(), images, "")


def tensor(dtype: int, shape: tuple[int, ...], **values: object) -> pb.TensorProto:
    dims = [pb.TensorShapeProto.Dim(size=side) for side in shape]
    return pb.TensorProto(dtype=dtype, tensor_shape=pb.TensorShapeProto(dim=dims), **values)  # type: ignore[arg-type]


def test_a_request_has_tensors_of_bytes_and_numbers_and_the_pixels_last() -> None:
    made = tfs.encode(replace(request("pixels"), stamp_at=0), ONE)
    message = pb.PredictRequest.FromString(made.data)
    assert (message.model_spec.name, message.model_spec.signature_name) == ("digits", "serving_default")
    assert message.inputs["pixels"].tensor_content == bytes(range(4))
    assert made.stamp_at == len(made.data) - 8
    assert made.data.endswith(bytes(range(4)))
    text = pb.PredictRequest.FromString(tfs.encode(request("hint", "pixels"), INFO).data).inputs["hint"]
    assert [*text.string_val] == [b"a\x00b"] * 2


@pytest.mark.parametrize(
    "scores",
    [
        tensor(pb.DT_FLOAT, (2, 2), float_val=[0.25, 0.75] * 2),
        tensor(pb.DT_FLOAT, (2, 2), tensor_content=np.array([0.25, 0.75] * 2, "<f4").tobytes()),
    ],
)
def test_answers_hold_lists_or_contents(scores: pb.TensorProto) -> None:
    response = pb.PredictResponse(model_spec=pb.ModelSpec(name="digits"))
    response.outputs["scores"].CopyFrom(scores)
    response.outputs["classes"].CopyFrom(tensor(pb.DT_INT64, (2,), int64_val=[3, 4]))
    checker = Checker([INFO], tfs.read)
    data = response.SerializeToString()
    assert checker.reply(data, request("pixels")).status is Status.OK
    classes, numbers = checker.outputs(data, request("pixels"))
    assert (classes.tolist(), numbers.tolist()) == ([3, 4], [[0.25, 0.75]] * 2)


def test_half_precision_is_listed_as_bits() -> None:
    response = pb.PredictResponse()
    bits = np.array([0.5, 1.5], "<f2").view("<u2").tolist()
    response.outputs["scores"].CopyFrom(tensor(pb.DT_HALF, (1, 2), half_val=bits))
    info = replace(ONE, outputs=(Tensor("scores", "FP16", (-1, 2)),))
    (scores,) = Checker([info], tfs.read).outputs(response.SerializeToString(), request("pixels", images=1))
    assert scores.tolist() == [[0.5, 1.5]]


@pytest.mark.parametrize(
    ("scores", "reason"),
    [
        (tensor(pb.DT_FLOAT, (2, 3), float_val=[0.5] * 6), "expected outputs"),
        (tensor(pb.DT_DOUBLE, (2, 2), double_val=[0.5] * 4), "expected outputs"),
        (tensor(pb.DT_FLOAT, (2, 2), float_val=[0.5] * 3), "has 3 elements"),
        (tensor(pb.DT_FLOAT, (2, 2), tensor_content=bytes(15)), "has 15 bytes"),
        (tensor(pb.DT_FLOAT, (2, 2), float_val=[math.nan] * 4), "expected finite numbers"),
    ],
)
def test_a_lie_is_no_answer(scores: pb.TensorProto, reason: str) -> None:
    response = pb.PredictResponse()
    response.outputs["scores"].CopyFrom(scores)
    reply = Checker([ONE], tfs.read).reply(response.SerializeToString(), request("pixels"))
    assert (reply.status, reason in reply.detail) == (Status.INVALID_REPLY, True), reply.detail
    assert Checker([ONE], tfs.read).reply(b"\xff", request("pixels")).status is Status.INVALID_REPLY


def signatures(*names: str) -> pb.SignatureDefMap:
    found = pb.SignatureDefMap()
    for name in names:
        dims = [pb.TensorShapeProto.Dim(size=side) for side in (-1, 32, 24, 3)]
        info = pb.TensorInfo(dtype=pb.DT_UINT8, tensor_shape=pb.TensorShapeProto(dim=dims))
        found.signature_def[name].inputs["pixels"].CopyFrom(info)
    return found


@pytest.mark.parametrize(("names", "chosen"), [(["a", "serving_default"], "serving_default"), (["b", "a"], "a")])
def test_a_model_is_as_its_signature_says(names: list[str], chosen: str) -> None:
    info = tfs.model_info("tfs://h:1", "digits", signatures(*names), 3, INFO.transport)
    assert (info.size, info.takes_images, info.modes) == ((32, 24), True, ())
    assert info.properties == {"signature": chosen, "version": "3"}
    with pytest.raises(TargetError, match="tfs://h:1: digits has no signature"):
        tfs.model_info("tfs://h:1", "digits", signatures(), 3, INFO.transport)


def test_there_are_no_modes() -> None:
    for encode in (tfs.encode, rest.encode):
        with pytest.raises(PayloadError, match="has no modes: leave out the mode xla"):
            encode(replace(request("pixels"), mode="xla"), ONE)


def test_rows_hold_images_in_base64_and_name_inputs_if_there_are_several() -> None:
    body = rest.encode(request("pixels"), ONE).data.partition(b"\r\n\r\n")[2]
    assert json.loads(body) == {"signature_name": "serving_default", "instances": [[0, 1], [2, 3]]}
    body = rest.encode(request("hint", "pixels", images=1), INFO).data.partition(b"\r\n\r\n")[2]
    hint = {"b64": base64.b64encode(b"a\x00b").decode()}
    assert json.loads(body)["instances"] == [{"hint": hint, "pixels": [0, 1]}]
    with pytest.raises(PayloadError, match="input pixels has no batch"):
        rest.encode(request("pixels"), replace(ONE, inputs=(Tensor("pixels", "UINT8", (2, 2)),)))


async def ask(answer: bytes, info: ModelInfo) -> Reply:
    async with lying(answer) as liar:
        address = liar.address.replace("http", "tfs+http")
        async with rest.target(5.0).connect([info], [address]) as connection:
            reply = await connection.send(rest.encode(request("pixels"), replace(info, inputs=ONE.inputs)))
    assert liar.got[0].head.startswith(b"POST /v1/models/digits:predict HTTP/1.1\r\n")
    return reply


@pytest.mark.parametrize(
    ("predictions", "info"),
    [
        ([[0.25, 0.75]] * 2, ONE),
        ([{"scores": [0.25, 0.75], "classes": 3}] * 2, INFO),
    ],
)
async def test_rows_of_values_and_of_objects_are_answers(predictions: object, info: ModelInfo) -> None:
    assert (await ask(response(json.dumps({"predictions": predictions}).encode()), info)).status is Status.OK


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"predictions": [[0.25, 0.75]]}, "expected outputs"),
        ({"predictions": [[0.25, 0.75], [0.5]]}, "expected outputs"),
        ({"predictions": [["0.25", "0.75"]] * 2}, 'output scores, FP32: expected numbers, got "0.25"'),
        ({"predictions": [["a", "b"]] * 2}, "output scores"),
        ({"predictions": [[0.25, None]] * 2}, "expected finite numbers"),
        ({"predictions": [{"classes": [1, 2]}] * 2}, "expected the outputs of the signature"),
        ({"predictions": []}, "expected outputs"),
        ({"outputs": [[0.25, 0.75]] * 2}, "expected a list of predictions"),
        ({"predictions": [[0.25, 0.75]] * 2, "error": "full"}, "HTTP 200 with an error: full"),
    ],
)
async def test_a_lie_in_rows_is_no_answer(body: object, reason: str) -> None:
    reply = await ask(response(json.dumps(body).encode()), ONE)
    assert (reply.status, reason in reply.detail) == (Status.INVALID_REPLY, True), reply.detail
