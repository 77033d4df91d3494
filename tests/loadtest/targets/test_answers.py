from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from xlaserve_loadtest.record.requests import STAGES, Status
from xlaserve_loadtest.schedule.payload import Request
from xlaserve_loadtest.schedule.tensors import Tensor
from xlaserve_loadtest.targets import open_inference_rest, tensorflow_serving, tensorflow_serving_rest
from xlaserve_loadtest.targets.answers import Checker, NoAnswer, numbers_fault, stages_of
from xlaserve_loadtest.targets.http_client import HttpAnswer
from xlaserve_loadtest.targets.open_inference import read
from xlaserve_loadtest.targets.target import ModelInfo, Reply
from xlaserve_proto import open_inference_pb2 as oip
from xlaserve_proto import tensorflow_messages_pb2 as pb

REQUEST = Request(b"", 2, "xla")


def answer(
    *,
    model: str = "digits",
    mode: str = "xla",
    shape: Sequence[int] = (2, 10),
    raw_bytes: int = 80,
    name: str = "scores",
    raws: int = 1,
    typed: int = 0,
) -> bytes:
    message = oip.ModelInferResponse(model_name=model)
    message.parameters["mode"].string_param = mode
    message.parameters["queue_s"].double_param = 0.5
    message.outputs.add(name=name, datatype="FP32", shape=shape)
    message.outputs[0].contents.fp32_contents.extend([0.5] * typed)
    message.raw_output_contents.extend([bytes(raw_bytes)] * raws)
    return message.SerializeToString()


def numbers(bad: float, place: int = 0, *, is_typed: bool = False, rows: int = 2) -> bytes:
    values = np.zeros((rows, 10), "<f4")
    values.flat[place] = bad
    message = oip.ModelInferResponse(model_name="digits")
    output = message.outputs.add(name="scores", datatype="FP32", shape=values.shape)
    if is_typed:
        output.contents.fp32_contents.extend(values.reshape(-1).tolist())
    else:
        message.raw_output_contents.append(values.tobytes())
    return message.SerializeToString()


def checked_by(models: Sequence[ModelInfo]) -> Checker[bytes]:
    return Checker(models, read)


def check(data: bytes, info: ModelInfo) -> Reply:
    return checked_by([info]).reply(data, REQUEST)


@pytest.mark.parametrize("seconds", [1e300, -1e300, 10**400, "1", None], ids=lambda value: str(value)[:6])
def test_a_stage_that_can_be_no_time_is_left_out(seconds: object) -> None:
    assert np.isnan(stages_of({"queue_s": seconds})[STAGES.index("queue_s")])


def test_a_stage_in_a_message_that_can_be_no_time_is_left_out(model_info: ModelInfo) -> None:
    message = oip.ModelInferResponse.FromString(answer())
    message.parameters["queue_s"].double_param = 1e300
    reply = check(message.SerializeToString(), model_info)
    assert reply.status is Status.OK
    assert np.isnan(reply.stages[STAGES.index("queue_s")])


def test_a_right_answer_carries_the_stages_that_the_server_told(model_info: ModelInfo) -> None:
    result = check(answer(), model_info)
    assert result.status == Status.OK
    assert result.stages[STAGES.index("queue_s")] == 0.5
    assert np.isnan(result.stages[STAGES.index("total_s")])


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"\xff", "."),
        (b"", "expected outputs"),
        (answer(model="cats"), "expected an answer of digits, got one of cats"),
        (answer(mode="graph"), "asked for mode xla, was run in graph"),
        (answer(shape=(1, 10)), "expected outputs"),
        (answer(shape=(2, 9)), "expected outputs"),
        (answer(name="other"), "expected outputs"),
        (answer(raw_bytes=79), "has 79 bytes"),
        (answer(raws=0), "has 0 elements"),
        (answer(raws=0, typed=19), "has 19 elements"),
        (answer(raws=2), "1 outputs, and the contents of 2"),
        (numbers(np.nan), "expected finite numbers in output scores, got nan"),
        (numbers(np.inf, place=19), "expected finite numbers in output scores, got inf"),
        (numbers(np.nan, is_typed=True), "got nan"),
    ],
    ids=lambda value: value if isinstance(value, str) else "data",  # a map of Protobuf has no order
)
def test_a_wrong_answer_is_none(model_info: ModelInfo, data: bytes, reason: str) -> None:
    result = check(data, model_info)
    assert result.status == Status.INVALID_REPLY
    assert reason in result.detail


@pytest.mark.parametrize("model", ["", "digits", "digits-of-the-server"])
def test_servers_may_leave_out_the_models_name_or_use_their_own(model_info: ModelInfo, model: str) -> None:
    info = replace(model_info, own_name="digits-of-the-server")
    assert check(answer(model=model), info).status == Status.OK


def test_typed_numbers_are_an_answer_too(model_info: ModelInfo) -> None:
    assert check(answer(raws=0, typed=20), model_info).status == Status.OK


def test_minus_infinity_is_the_logarithm_of_0(model_info: ModelInfo) -> None:
    assert check(numbers(-np.inf), model_info).status == Status.OK


def test_a_side_that_was_left_open_may_have_any_length(model_info: ModelInfo) -> None:
    promised = replace(model_info, outputs=(Tensor("scores", "FP32", (-1, -1)),))
    assert check(answer(), promised).status == Status.OK
    assert check(answer(shape=(2, 10, 1)), promised).status == Status.INVALID_REPLY


def test_outputs_may_come_in_any_order(model_info: ModelInfo) -> None:
    info = replace(model_info, outputs=(Tensor("b", "FP32", (-1, 1)), Tensor("a", "FP32", (-1, 2))))
    message = oip.ModelInferResponse()
    for name, sides in (("a", 2), ("b", 1)):
        message.outputs.add(name=name, datatype="FP32", shape=[2, sides])
        message.raw_output_contents.append(np.full((2, sides), sides, "<f4").tobytes())
    assert check(message.SerializeToString(), info).status == Status.OK
    assert [output.tolist() for output in checked_by([info]).outputs(message.SerializeToString(), REQUEST)] == [
        [[1]] * 2,
        [[2, 2]] * 2,
    ]
    del message.outputs[1], message.raw_output_contents[1]
    assert "expected outputs" in check(message.SerializeToString(), info).detail


def test_a_server_that_declares_no_outputs_may_answer_any(model_info: ModelInfo) -> None:
    silent = replace(model_info, outputs=())
    assert check(answer(), silent).status == Status.OK
    assert len(checked_by([silent]).outputs(answer(), REQUEST)) == 1


def test_text_that_is_too_short_for_its_elements_is_no_answer(model_info: ModelInfo) -> None:
    info = replace(model_info, outputs=(Tensor("text", "BYTES", (-1,)),))
    message = oip.ModelInferResponse(raw_output_contents=[bytes(7)])
    message.outputs.add(name="text", datatype="BYTES", shape=[2])
    assert "has 7 bytes, too few" in check(message.SerializeToString(), info).detail


def test_the_numbers_of_every_answer_are_looked_at_whatever_came_before(model_info: ModelInfo) -> None:
    checker = checked_by([model_info])
    sent = [answer() if place % 100 else numbers(np.nan, place=19) for place in range(300)]
    statuses = [checker.reply(data, REQUEST).status for data in sent]
    assert statuses.count(Status.INVALID_REPLY) == 3
    assert {statuses[place] for place in (0, 100, 200)} == {Status.INVALID_REPLY}


def test_every_number_of_a_large_output_is_looked_at() -> None:
    values = np.zeros(100_000, "<f4")
    values[65_537] = np.inf
    assert numbers_fault("map", values) == "expected finite numbers in output map, got inf"
    values[65_537] = -np.inf
    assert numbers_fault("map", values) == ""
    assert numbers_fault("map", values[:0]) == ""


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize(
    "protocol", ["rest, binary", "rest, JSON", "serving, bytes", "serving, listed", "serving, JSON"]
)
def test_what_is_not_finite_is_an_error_in_every_protocol(model_info: ModelInfo, protocol: str, bad: float) -> None:
    checker, data = _answered(protocol, np.array([[0.5] * 10, [*[0.5] * 9, bad]], "<f4"))
    reply = checker([model_info]).reply(data, REQUEST)
    assert (reply.status, reply.detail) == (
        Status.INVALID_REPLY,
        f"expected finite numbers in output scores, got {bad}",
    )
    checker, data = _answered(protocol, np.full((2, 10), 0.5, "<f4"))
    assert checker([model_info]).reply(data, REQUEST).status == Status.OK


def _answered(protocol: str, values: np.ndarray[Any, Any]) -> tuple[Callable[..., Checker[Any]], Any]:
    """Returns the checker of a protocol, and an answer of these values in it."""
    if protocol.startswith("rest"):
        output = {"name": "scores", "datatype": "FP32", "shape": [2, 10]}
        if protocol.endswith("JSON"):
            body = json.dumps({"outputs": [{**output, "data": values.reshape(-1).tolist()}]}).encode()
            return partial(Checker, read=open_inference_rest.read), HttpAnswer(200, {}, body)
        head = json.dumps({"outputs": [{**output, "parameters": {"binary_data_size": values.nbytes}}]}).encode()
        headers = {open_inference_rest.JSON_LENGTH: str(len(head))}
        return partial(Checker, read=open_inference_rest.read), HttpAnswer(200, headers, head + values.tobytes())
    if protocol == "serving, JSON":
        body = json.dumps({"predictions": values.tolist()}).encode()
        return partial(Checker, read=tensorflow_serving_rest.read), HttpAnswer(200, {}, body)
    tensor = pb.TensorProto(dtype=pb.DT_FLOAT)
    tensor.tensor_shape.dim.extend(pb.TensorShapeProto.Dim(size=side) for side in values.shape)
    if protocol == "serving, bytes":
        tensor.tensor_content = values.tobytes()
    else:
        tensor.float_val.extend(values.reshape(-1).tolist())
    return (
        partial(Checker, read=tensorflow_serving.read),
        pb.PredictResponse(outputs={"scores": tensor}).SerializeToString(),
    )


def test_the_first_answer_of_each_model_is_checked(model_info: ModelInfo) -> None:
    checker = checked_by([model_info, model_info])
    assert checker.reply(answer(), REQUEST).status == Status.OK
    assert checker.reply(numbers(np.nan), replace(REQUEST, model=1)).status == Status.INVALID_REPLY


def test_a_large_output_is_looked_at_in_places_all_over_it(model_info: ModelInfo) -> None:
    rows = 50_000
    request = replace(REQUEST, images=rows)
    everywhere = np.full((rows, 10), np.nan, "<f4")
    everywhere[: rows - 1000] = 0
    message = oip.ModelInferResponse(raw_output_contents=[everywhere.tobytes()])
    message.outputs.add(name="scores", datatype="FP32", shape=[rows, 10])
    assert checked_by([model_info]).reply(message.SerializeToString(), request).status == Status.INVALID_REPLY


def test_outputs_come_out_as_numbers(model_info: ModelInfo) -> None:
    message = oip.ModelInferResponse.FromString(answer())
    message.raw_output_contents[0] = np.arange(20, dtype="<f4").tobytes()
    (scores,) = checked_by([model_info]).outputs(message.SerializeToString(), REQUEST)
    np.testing.assert_array_equal(scores, np.arange(20.0).reshape(2, 10))


def labelled(*labels: bytes, as_list: bool = False) -> bytes:
    message = oip.ModelInferResponse(model_name="digits")
    message.outputs.add(name="scores", datatype="FP32", shape=(2, 1))
    message.outputs.add(name="labels", datatype="BYTES", shape=(2, 1))
    if as_list:
        message.outputs[0].contents.fp32_contents.extend([0.5, 0.5])
        message.outputs[1].contents.bytes_contents.extend(labels)
    else:
        own = b"".join(len(label).to_bytes(4, "little") + label for label in labels)
        message.raw_output_contents.extend([bytes(np.full(2, 0.5, "<f4")), own])
    return message.SerializeToString()


@pytest.mark.parametrize("as_list", [False, True])
def test_strings_beside_numbers_are_compared_too(as_list: bool) -> None:
    info = ModelInfo(
        "digits", None, (Tensor("scores", "FP32", (-1, 1)), Tensor("labels", "BYTES", (-1, 1))), {}, "foreign"
    )
    checker = checked_by([info])
    outputs = partial(checker.outputs, request=REQUEST)
    scores, labels = outputs(labelled(b"cat", "schön".encode(), as_list=as_list))
    assert (scores.dtype.kind, labels.dtype.kind, labels.shape) == ("f", "i", (2, 1))
    assert np.array_equal(labels, outputs(labelled(b"cat", "schön".encode()))[1])
    assert (labels != outputs(labelled(b"dog", "schön".encode(), as_list=as_list))[1]).tolist() == [[True], [False]]


def test_strings_that_do_not_fill_their_shape_are_no_answer() -> None:
    info = ModelInfo(
        "digits", None, (Tensor("scores", "FP32", (-1, 1)), Tensor("labels", "BYTES", (-1, 1))), {}, "foreign"
    )
    with pytest.raises(NoAnswer, match="has 1 elements"):
        checked_by([info]).outputs(labelled(b"cat and dog"), REQUEST)
