from __future__ import annotations

import pickle
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from tests.fakes import served_with

from xlaserve.config import Mode
from xlaserve.engine.timings import Timings
from xlaserve.errors import InvalidArgument
from xlaserve.images.frame import whole
from xlaserve.models.task import Classification, Detection, Embedding, Segmentation, Task
from xlaserve.models.version import Served
from xlaserve.pipeline.pipeline import Answer, Request
from xlaserve.pipeline.request_inputs import Pending
from xlaserve.wire.grpc import infer_message, open_inference_service, open_inference_tensors
from xlaserve.wire.grpc.open_inference_tensors import LISTING
from xlaserve.wire.shared import inference
from xlaserve.wire.shared.output_tensors import WantedOutput, output_tensors
from xlaserve_proto import open_inference_pb2 as pb

SIDE = 40
IMAGES = 40
RANDOM = np.random.default_rng(0)
TASKS: dict[str, tuple[Task, tuple[Any, ...]]] = {
    "scores": (Classification(1000), (RANDOM.random((IMAGES, 1000), np.float32),)),
    "labels": (Classification(1000, tuple(map(str, range(1000)))), (RANDOM.random((IMAGES, 1000), np.float32),)),
    "vectors": (Embedding(600), (RANDOM.random((IMAGES, 600), np.float32),)),
    "small maps": (Segmentation(3), (RANDOM.integers(0, 3, (IMAGES, SIDE, SIDE), np.uint8),)),
    "large maps": (Segmentation(700), (RANDOM.integers(-1, 700, (IMAGES, SIDE, SIDE), np.int32),)),
    "boxes": (
        Detection(9, max_detections=300),
        (
            RANDOM.random((IMAGES, 300, 4), np.float32),
            RANDOM.random((IMAGES, 300), np.float32),
            RANDOM.integers(-1, 9, (IMAGES, 300), np.int32),
            RANDOM.integers(0, 300, IMAGES).astype(np.int32),
        ),
    ),
}


def message(images: int, raw: bool, *outputs: str, classes: int = 0, datatype: str = "UINT8") -> Any:
    request = pb.ModelInferRequest(model_name="m", id="i")
    request.inputs.add(name="pixels", datatype=datatype, shape=(images, SIDE, SIDE, 3))
    if raw:
        size_bytes = 1 if datatype == "UINT8" else 4
        request.raw_input_contents.append(bytes(images * SIDE * SIDE * 3 * size_bytes))
    else:
        request.inputs[0].contents.uint_contents.extend([0] * (images * SIDE * SIDE * 3))
    for output in outputs:
        request.outputs.add(name=output)
    if classes:
        request.outputs.add(name="scores").parameters["classification"].int64_param = classes
    return infer_message.InferMessages().parse(request.SerializeToString())


def call_of(served: Served, deadline: float = 9.0) -> Any:
    return SimpleNamespace(served=served, deadline=deadline, began=1.0)


def parse_for(request: Any, call: Any) -> tuple[Request, Sequence[WantedOutput]]:
    return inference.parse(open_inference_tensors.infer_request(request), call, LISTING)


def parse(request: Any, task: Task) -> Request:
    parsed, _ = parse_for(request, call_of(served_with(task, SIDE)))
    return parsed


def respond(request: Any, task: Task, outputs: tuple[Any, ...], rendered: Any = ()) -> pb.ModelInferResponse:
    images = len(outputs[0])
    answer = Answer(Mode.XLA, images, outputs, [whole(SIDE, SIDE)] * images, rendered, Timings(), at=0.0)
    served = served_with(task, SIDE)
    _, wanted = parse_for(request, call_of(served))
    tensors = output_tensors(wanted, served, answer, LISTING)
    return pb.ModelInferResponse.FromString(
        b"".join(open_inference_service._respond(request.head.id, tensors, served, answer))
    )


def on_threads(request: Any, task: Task, outputs: tuple[Any, ...]) -> Any:
    """What the pipeline's threads make of each image; None where the event loop makes the response."""
    rendering = parse(request, task).rendering
    if rendering is None:
        return None
    render = pickle.loads(pickle.dumps(rendering)).renderer(task)
    frame = whole(SIDE, SIDE)
    return [render(tuple(output[row : row + 1] for output in outputs), frame) for row in range(len(outputs[0]))]


@pytest.mark.parametrize("name", ["small maps", "large maps", "boxes"])
def test_many_typed_integers_are_written_on_threads_and_are_the_same(name: str) -> None:
    task, outputs = TASKS[name]
    request = message(IMAGES, False)
    rendered = on_threads(request, task, outputs)
    assert rendered is not None
    assert respond(request, task, outputs, rendered) == respond(request, task, outputs)


def test_floats_are_sent_as_they_lie_in_memory_however_many_they_are() -> None:
    task, (scores,) = TASKS["scores"]
    assert on_threads(message(IMAGES, False), task, (scores,)) is None
    (tensor,) = output_tensors(
        [WantedOutput(0, task.outputs[0])],
        served_with(task),
        Answer(Mode.XLA, IMAGES, (scores,), [], (), Timings(), at=0.0),
        LISTING,
    )
    assert any(np.shares_memory(np.frombuffer(part, np.uint8), scores) for part in tensor.values)


def test_only_the_outputs_that_were_asked_for_are_written_on_threads() -> None:
    task, outputs = TASKS["boxes"]
    request = message(IMAGES, False, "classes", "boxes")
    response = respond(request, task, outputs, on_threads(request, task, outputs))
    assert [output.name for output in response.outputs] == ["boxes", "classes"]
    assert response == respond(request, task, outputs)


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("layout", [np.ascontiguousarray, np.asfortranarray])
def test_large_raw_outputs_are_the_bytes_of_their_arrays(name: str, layout: Any) -> None:
    task, outputs = TASKS[name]
    request = message(IMAGES, True)
    assert parse(request, task).rendering is None
    # Once more than protobuf is given, once less.
    for repeats in (1, 4):
        arrays = tuple(layout(np.concatenate([output] * repeats)) for output in outputs)
        response = respond(request, task, arrays)
        assert list(response.raw_output_contents) == [array.tobytes() for array in arrays]
        assert [tuple(output.shape) for output in response.outputs] == [array.shape for array in arrays]
        assert [output.name for output in response.outputs] == [spec.name for spec in task.outputs]


@pytest.mark.parametrize("raw", [True, False])
@pytest.mark.parametrize("name", ["scores", "labels"])
@pytest.mark.parametrize("classes", [400, 1000, 10**9])
def test_many_classes_are_written_on_threads_and_are_the_same(name: str, raw: bool, classes: int) -> None:
    task, outputs = TASKS[name]
    request = message(IMAGES, raw, classes=classes)
    rendered = on_threads(request, task, outputs)
    assert rendered is not None
    assert respond(request, task, outputs, rendered) == respond(request, task, outputs)


@pytest.mark.parametrize("raw", [True, False])
def test_a_small_answer_is_made_on_the_event_loop(raw: bool) -> None:
    task, outputs = TASKS["labels"]
    one = tuple(output[:1] for output in outputs)
    for classes in (0, 5):
        assert on_threads(message(1, raw, classes=classes), task, one) is None


@pytest.mark.parametrize("datatype", ["FP32", "INT32"])
def test_many_pixels_of_other_types_are_left_to_a_thread(datatype: str) -> None:
    task = Classification(3)
    assert isinstance(parse(message(300, True, datatype=datatype), task).images, Pending)
    assert isinstance(parse(message(3, True, datatype=datatype), task).images, np.ndarray)
    assert isinstance(parse(message(300, True), task).images, np.ndarray)


@pytest.mark.parametrize("raw", [True, False])
@pytest.mark.parametrize("name", TASKS)
def test_a_response_says_what_protobuf_would(name: str, raw: bool) -> None:
    task, outputs = TASKS[name]
    for arrays in (outputs, tuple(output[:1] for output in outputs)):
        expected = pb.ModelInferResponse(model_name="m", model_version="1", id="i")
        expected.parameters["mode"].string_param = "xla"
        for spec, values in zip(task.outputs, arrays, strict=True):
            datatype, field = {"f": ("FP32", "fp32_contents"), "i": ("INT32", "int_contents")}.get(
                values.dtype.kind, ("UINT8", "uint_contents")
            )
            tensor = expected.outputs.add(name=spec.name, datatype=datatype, shape=values.shape)
            if raw:
                expected.raw_output_contents.append(values.tobytes())
            else:
                getattr(tensor.contents, field).extend(values.ravel().tolist())
        assert respond(message(len(arrays[0]), raw), task, arrays) == expected


def test_a_response_says_where_the_time_went() -> None:
    stamp = open_inference_service._stamp(Timings(1.0, 2.0, 3.0, 4.0, 5.0, 6.0))
    parameters = pb.ModelInferResponse.FromString(stamp).parameters
    stages = ("decode_s", "queue_s", "gather_s", "execute_s", "encode_s", "total_s")
    assert {name: value.double_param for name, value in parameters.items()} == dict(
        zip(stages, range(1, 7), strict=True)
    )


@pytest.mark.parametrize(
    ("deadline", "timeout_us", "expected"), [(9.0, 0, 9.0), (9.0, 500_000, 1.5), (1.25, 500_000, 1.25)]
)
def test_the_earlier_of_deadline_and_timeout_holds_for_each_request(
    deadline: float, timeout_us: int, expected: float
) -> None:
    request = pb.ModelInferRequest(model_name="m")
    request.inputs.add(name="pixels", datatype="UINT8", shape=(1, SIDE, SIDE, 3))
    request.raw_input_contents.append(bytes(SIDE * SIDE * 3))
    if timeout_us:
        request.parameters["timeout"].int64_param = timeout_us
    messages, served = infer_message.InferMessages(), served_with(Classification(3), SIDE)
    for began in (1.0, 2.0):  # the second is known
        parsed: Any = messages.parse(request.SerializeToString())
        call: Any = SimpleNamespace(served=served, deadline=deadline + began - 1, began=began)
        request_of_model, _ = parse_for(parsed, call)
        assert request_of_model.deadline == expected + began - 1
        open_inference_tensors.learn_shape(parsed, request_of_model.images)


def test_thousands_of_outputs_or_inputs_are_refused_without_reading_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are read on the event loop."""
    task, read = Classification(3), Mock(wraps=infer_message.parameter_items)
    monkeypatch.setattr(open_inference_tensors, "parameter_items", read)
    with pytest.raises(InvalidArgument, match="outputs: expected scores"):
        parse(message(1, True, *["scores"] * 4000), task)
    assert read.call_count < 10

    request = pb.ModelInferRequest(inputs=[pb.ModelInferRequest.InferInputTensor()] * 4000)
    made = Mock(wraps=open_inference_tensors._Input)
    monkeypatch.setattr(open_inference_tensors, "_Input", made)
    with pytest.raises(InvalidArgument, match="inputs: expected one tensor"):
        parse(infer_message.InferMessages().parse(request.SerializeToString()), task)
    assert 1 < made.call_count < 10


def test_requests_that_are_alike_are_checked_against_each_model() -> None:
    """What is kept of a request says nothing of the model that it asked for."""
    request = pb.ModelInferRequest(model_name="m")
    request.inputs.add(name="pixels", datatype="UINT8", shape=(1, SIDE, SIDE, 3))
    request.raw_input_contents.append(bytes(SIDE * SIDE * 3))
    request.outputs.add(name="scores")
    messages = infer_message.InferMessages()
    for task, is_right in ((Classification(3), True), (Embedding(3), False), (Classification(3), True)):
        parsed: Any = messages.parse(request.SerializeToString())
        if is_right:
            assert isinstance(parse(parsed, task).images, np.ndarray)
        else:
            with pytest.raises(InvalidArgument):
                parse(parsed, task)
