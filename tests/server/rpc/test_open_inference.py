from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from xlaserve.config import Mode, PixelRange
from xlaserve.frame import whole
from xlaserve.model.task import Classification, Detection, Embedding, Segmentation, Task
from xlaserve.model.version import Served
from xlaserve.pipeline import Answer, Pending, Request
from xlaserve.rpc import infer_message, open_inference, parts
from xlaserve_proto import open_inference_pb2 as pb

SIDE = 40
IMAGES = 30
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
    return infer_message.parse(request.SerializeToString())


def served_with(task: Task) -> Served:
    settings = SimpleNamespace(name="m", version="1", pixel_range=PixelRange.LEVELS)
    model = SimpleNamespace(task=task)
    return cast(Served, SimpleNamespace(settings=settings, model=model, inputs=frozenset({(SIDE, SIDE)})))


def parse(request: Any, task: Task) -> Request:
    return open_inference._parse(request, served_with(task), 9.0, 0.0)


def respond(request: Any, task: Task, outputs: tuple[Any, ...], rendered: Any = ()) -> pb.ModelInferResponse:
    seconds = {"decode_s": 0.0, "queue_s": 0.0, "gather_s": 0.0, "execute_s": 0.0, "render_s": 0.0}
    images = len(outputs[0])
    answer = Answer(served_with(task), Mode.XLA, images, outputs, [whole(SIDE, SIDE)] * images, rendered, **seconds)
    return pb.ModelInferResponse.FromString(parts.to_bytes(open_inference._respond(request, answer)))


def on_threads(request: Any, task: Task, outputs: tuple[Any, ...]) -> Any:
    """What the pipeline's threads make of each image; None where the event loop makes the response."""
    render = parse(request, task).render
    if render is None:
        return None
    frame = whole(SIDE, SIDE)
    return [render(tuple(output[row : row + 1] for output in outputs), frame) for row in range(len(outputs[0]))]


@pytest.mark.parametrize("name", TASKS)
def test_many_typed_values_are_written_on_threads_and_are_the_same(name: str) -> None:
    task, outputs = TASKS[name]
    request = message(IMAGES, False)
    rendered = on_threads(request, task, outputs)
    assert rendered is not None
    assert respond(request, task, outputs, rendered) == respond(request, task, outputs)


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
    assert parse(request, task).render is None
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


def test_a_streams_response_holds_the_parts_of_the_other() -> None:
    whole_response = pb.ModelInferResponse(model_name="m", raw_output_contents=[b"abc"])
    number = pb.ModelInferResponse.RAW_OUTPUT_CONTENTS_FIELD_NUMBER
    made = parts.Parts(pb.ModelInferResponse(model_name="m"), parts.record(number, memoryview(b"abc")))
    streamed = pb.ModelStreamInferResponse.FromString(parts.to_bytes(open_inference._streamed(made)))
    assert streamed == pb.ModelStreamInferResponse(infer_response=whole_response)
    assert open_inference._streamed(whole_response) == streamed
