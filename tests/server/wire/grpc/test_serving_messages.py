from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.fakes import served_with

from xlaserve.config import Mode
from xlaserve.engine.timings import Timings
from xlaserve.errors import InvalidArgument, UnsupportedFeature
from xlaserve.images.frame import whole
from xlaserve.models.task import Classification, Detection, Segmentation, Task
from xlaserve.models.version import Served
from xlaserve.pipeline.pipeline import Answer, Request
from xlaserve.wire.grpc import serving_messages as messages
from xlaserve.wire.grpc.tensor_protos import LISTING
from xlaserve.wire.grpc.wire_format import MAX_FIELDS, MAX_REST_BYTES
from xlaserve.wire.shared import inference
from xlaserve.wire.shared.output_tensors import WantedOutput, output_tensors
from xlaserve_proto import tensorflow_messages_pb2 as pb

SIDE = 40
IMAGES = 30
RANDOM = np.random.default_rng(0)
TASKS: dict[str, tuple[Task, tuple[Any, ...]]] = {
    "scores": (Classification(1000), (RANDOM.random((IMAGES, 1000), np.float32),)),
    "small maps": (Segmentation(3), (RANDOM.integers(0, 3, (IMAGES, SIDE, SIDE), np.uint8),)),
    "large maps": (Segmentation(700), (RANDOM.integers(-1, 700, (IMAGES, SIDE, SIDE), np.int32),)),
    "boxes": (
        Detection(9, max_detections=900),
        (
            RANDOM.random((IMAGES, 900, 4), np.float32),
            RANDOM.random((IMAGES, 900), np.float32),
            RANDOM.integers(-1, 9, (IMAGES, 900), np.int32),
            RANDOM.integers(0, 900, IMAGES).astype(np.int32),
        ),
    ),
}


def predict(*outputs: str, count: int = IMAGES) -> Any:
    request = pb.PredictRequest(output_filter=outputs)
    image = request.inputs["image"]
    image.dtype = pb.DT_STRING
    image.tensor_shape.dim.add(size=count)
    image.string_val.extend([b"image"] * count)
    return messages.PARSERS["PredictRequest"](request.SerializeToString())


def parse(message: Any, served: Served) -> tuple[Request, Sequence[WantedOutput]]:
    call: Any = SimpleNamespace(served=served, deadline=9.0, began=1.0)
    return inference.parse(messages.infer_request(message), call, LISTING)


def respond(wanted: Sequence[WantedOutput], served: Served, answer: Answer) -> pb.PredictResponse:
    wire = messages.respond_predict(output_tensors(wanted, served, answer, LISTING), served)
    return pb.PredictResponse.FromString(b"".join(wire))


def answer(task: Task, outputs: tuple[Any, ...], rendering: Any = None, count: int = IMAGES) -> Answer:
    frames = [whole(SIDE, SIDE)] * count
    rendered = []
    if rendering is not None:
        render = rendering.renderer(task)
        rendered = [render(tuple(one[row : row + 1] for one in outputs), frames[row]) for row in range(count)]
    return Answer(Mode.GRAPH, count, outputs, frames, rendered, Timings(), 0.0)


@pytest.mark.parametrize("name", TASKS)
def test_predict_answers_the_outputs_however_they_are_rendered(name: str) -> None:
    task, outputs = TASKS[name]
    served = served_with(task, SIDE)
    request, wanted = parse(predict(), served)
    assert request.deadline == 9.0
    assert (request.rendering is None) == (name == "scores")
    for rendering in (None, request.rendering):
        response = respond(wanted, served, answer(task, outputs, rendering))
        assert {spec.name for spec in task.outputs} == set(response.outputs)
        for spec, values in zip(task.outputs, outputs, strict=True):
            found = response.outputs[spec.name]
            numbers = found.float_val if spec.datatype == "FP32" else found.int_val
            np.testing.assert_array_equal(np.array(numbers).reshape([d.size for d in found.tensor_shape.dim]), values)
        assert (response.model_spec.name, response.model_spec.version.value) == ("m", 1)


def test_predict_answers_the_outputs_that_are_named() -> None:
    task, outputs = TASKS["boxes"]
    served = served_with(task, SIDE)
    _, wanted = parse(predict("count", "scores"), served)
    response = respond(wanted, served, answer(task, outputs))
    assert set(response.outputs) == {"count", "scores"}
    for wrong in (("other",), ("count", "count")):
        with pytest.raises(InvalidArgument):
            parse(predict(*wrong), served)


def test_several_inputs_are_refused() -> None:
    request = pb.PredictRequest()
    for name in ("pixels", "image"):
        request.inputs[name].dtype = pb.DT_UINT8
    parsed: Any = messages.PARSERS["PredictRequest"](request.SerializeToString())
    with pytest.raises(InvalidArgument, match="one tensor"):
        parse(parsed, served_with(Classification(10)))


def features(*pairs: tuple[str, pb.Feature]) -> pb.Example:
    return pb.Example(features=pb.Features(feature=[pb.Features.Entry(key=key, value=value) for key, value in pairs]))


def of_bytes(*values: bytes) -> pb.Feature:
    return pb.Feature(bytes_list=pb.BytesList(value=values))


def classify(*examples: pb.Example) -> Any:
    request = pb.ClassificationRequest(input=pb.Input(example_list=pb.ExampleList(examples=examples)))
    return messages.PARSERS["ClassificationRequest"](request.SerializeToString())


def test_each_example_has_its_own_image_whatever_else_it_has() -> None:
    number = pb.Feature(int64_list=pb.Int64List(value=[3]))
    message = classify(
        features(("image", of_bytes(b"one"))),
        features(("format", of_bytes(b"jpeg")), ("label", number), ("image/encoded", of_bytes(b"two" * 9000))),
        features(("image", of_bytes(b"three")), ("names", of_bytes(b"a", b"b")), ("none", of_bytes())),
    )
    images: Any = messages.parse_classify(message, served_with(Classification(10)), 9.0).images
    assert [*map(bytes, images)] == [b"one", b"two" * 9000, b"three"]


@pytest.mark.parametrize(
    ("examples", "field"),
    [
        ((), "input"),
        ((pb.Example(),), "examples"),
        ((features(("other", of_bytes(b"one"))),), "examples"),
        ((features(("image", of_bytes(b"one")), ("image/encoded", of_bytes(b"two"))),), "examples"),
        ((features(("image", of_bytes())),), "examples.image"),
        ((features(("image", of_bytes(b"one", b"two"))),), "examples.image"),
        ((features(("image", pb.Feature(float_list=pb.FloatList(value=[1.0])))),), "examples"),
    ],
)
def test_examples_without_exactly_one_image_are_refused(examples: tuple[pb.Example, ...], field: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        messages.parse_classify(classify(*examples), served_with(Classification(10)), 9.0)
    assert refused.value.field == field


def test_a_context_and_other_tasks_are_refused() -> None:
    request = pb.ClassificationRequest()
    request.input.example_list_with_context.examples.add()
    parsed: Any = messages.PARSERS["ClassificationRequest"](request.SerializeToString())
    with pytest.raises(UnsupportedFeature):
        messages.parse_classify(parsed, served_with(Classification(10)), 9.0)
    with pytest.raises(InvalidArgument, match="classification"):
        messages.parse_classify(classify(features(("image", of_bytes(b"one")))), served_with(Segmentation(3)), 9.0)


@pytest.mark.parametrize("count", [1, 50])
def test_the_likeliest_classes_are_answered_however_they_are_rendered(count: int) -> None:
    task = Classification(1000, tuple(f"class {index}" for index in range(1000)))
    scores = RANDOM.random((count, 1000), np.float32)
    served = served_with(task)
    message = classify(*[features(("image", of_bytes(b"one")))] * count)
    request = messages.parse_classify(message, served, 9.0)
    assert (request.rendering is None) == (count == 1)
    for rendering in (None, request.rendering):
        wire = messages.respond_classify(served, answer(task, (scores,), rendering, count))
        found = pb.ClassificationResponse.FromString(b"".join(wire))
        assert [[one.label for one in row.classes] for row in found.result.classifications] == [
            [f"class {index}" for index in np.argsort(-row)[:5]] for row in scores
        ]
        assert found.result.classifications[0].classes[0].score == scores[0].max()
        assert found.model_spec.signature_name == "serving_default"


@pytest.mark.parametrize("name", messages.PARSERS)
def test_other_bytes_are_no_message(name: str) -> None:
    assert messages.PARSERS[name](b"\xff" * 20_000) is None
    assert messages.PARSERS[name](b"\x0a\x05ab") is None


def test_long_lists_of_several_inputs_are_each_viewed() -> None:
    request, count = pb.PredictRequest(output_filter=["count"]), 100_000
    for level, name in enumerate(("left", "right"), start=1):
        request.inputs[name].CopyFrom(pb.TensorProto(dtype=pb.DT_INT32, int_val=[level] * count))
        request.inputs[name].tensor_shape.dim.add(size=count)
    message: Any = messages.PARSERS["PredictRequest"](request.SerializeToString())
    assert not any(tensor.int_val for tensor in message.fields.inputs.values())
    given = {one.name: one.numbers((count,), np.dtype(np.int32)) for one in messages.infer_request(message).inputs}
    assert {name: (len(numbers), set(numbers.tolist())) for name, numbers in given.items()} == {
        "left": (count, {1}),
        "right": (count, {2}),
    }


def test_inputs_count_together_towards_the_bounds_of_a_message() -> None:
    def of_name(name: str) -> pb.PredictRequest:
        tensor = pb.TensorProto(dtype=pb.DT_DOUBLE, double_val=[1.0] * (MAX_REST_BYTES // 16 - 20))
        return pb.PredictRequest(inputs={name: tensor})

    parse_predict = messages.PARSERS["PredictRequest"]
    left, right, third = (of_name(name).SerializeToString() for name in ("left", "right", "third"))
    assert parse_predict(left + right) is not None
    with pytest.raises(InvalidArgument, match=f"at most {MAX_REST_BYTES} bytes"):
        parse_predict(left + right + third)
    empty = pb.PredictRequest(inputs={"": pb.TensorProto(tensor_content=b"")}).SerializeToString()
    with pytest.raises(InvalidArgument, match=f"at most {MAX_FIELDS} fields"):
        parse_predict(empty * (MAX_FIELDS // 2 + 1))
