from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast, get_args

import numpy as np
import pytest
from google.protobuf.message import Message
from PIL import Image
from tests.fakes import served_with

from xlaserve.config import Color, Fit, Mode, OutputRole, TaskName
from xlaserve.engine.timings import Timings
from xlaserve.errors import ImageTooLarge, InvalidArgument
from xlaserve.images.frame import Frame, place, whole
from xlaserve.images.image_input import ImageInput, PixelType
from xlaserve.models.task import (
    DATATYPES,
    Classification,
    ClassSequence,
    Datatype,
    Detection,
    Embedding,
    ImageToImage,
    Keypoints,
    Regression,
    Segmentation,
    Task,
    Tensors,
    TensorSpec,
)
from xlaserve.models.version import Served
from xlaserve.pipeline.pipeline import Answer, Request
from xlaserve.wire.grpc import keypoint_messages, open_inference_tensors, sequence_messages, tensor_protos
from xlaserve.wire.grpc import vision_messages as messages
from xlaserve.wire.grpc.wire_format import LARGE_BYTES
from xlaserve.wire.shared.objects import METHODS
from xlaserve_proto import open_inference_pb2 as oip
from xlaserve_proto import vision_pb2 as pb

LABELS = ("cat", "dog")
TASKS: dict[str, Task] = {
    "Classify": Classification(2, LABELS),
    "Detect": Detection(2, LABELS, max_detections=3),
    "Segment": Segmentation(2, LABELS),
    "Embed": Embedding(4),
    "Locate": Keypoints(2, LABELS, has_scores=True),
    "Transcribe": ClassSequence(3, ("", *LABELS), steps=4, blank="first"),
}
DEADLINE = 9.0
WIDE = place(50, 100, input_height=64, input_width=64, fit=Fit.LETTERBOX)  # 32 rows from row 16 on, at 0.64


def answer(outputs: Sequence[Any], frames: Sequence[Frame], rendered: Sequence[Any] = ()) -> Answer:
    return Answer(Mode.XLA, len(frames), tuple(outputs), frames, rendered, Timings(), at=0.0)


PARSERS: dict[str, tuple[type[Any], Callable[[Any, Served], Request]]] = {
    "Classify": (pb.ClassifyRequest, lambda m, served: messages.parse_classify(m, served, DEADLINE)),
    "Detect": (pb.DetectRequest, lambda m, served: messages.parse_detect(m, served, DEADLINE)),
    "Segment": (pb.SegmentRequest, lambda m, served: messages.parse_segment(m, served, DEADLINE, 1000)),
    "Embed": (pb.EmbedRequest, lambda m, served: messages.parse_embed(m, served, DEADLINE)),
    "Locate": (pb.LocateRequest, lambda m, served: keypoint_messages.parse_locate(m, served, DEADLINE)),
    "Transcribe": (pb.TranscribeRequest, lambda m, served: sequence_messages.parse_transcribe(m, served, DEADLINE)),
}


def parse(method: str, *, task: Task | None = None, served: Served | None = None, **fields: Any) -> Request:
    message, parser = PARSERS[method]
    viewed = messages.PARSERS[message.DESCRIPTOR.name](message(**fields).SerializeToString())
    return parser(viewed, served or served_with(task or TASKS[method]))


M = TypeVar("M", bound=Message)


def sent(response: Any, message: type[M]) -> M:
    """What a client reads of a response."""
    return message.FromString(b"".join((*response.pieces, response.fields.SerializeToString())))


def test_every_task_has_a_setting_a_method_and_roles_for_its_outputs() -> None:
    kinds = get_args(Task)
    assert set(METHODS) == set(kinds) - {ImageToImage, Regression, Tensors} == set(map(type, TASKS.values()))
    assert {kind.name for kind in kinds} == set(get_args(TaskName))
    assert set(METHODS.values()) == set(PARSERS)
    for known in (DATATYPES.values(), open_inference_tensors.LISTING.fields, tensor_protos.LISTING.fields):
        assert set(get_args(Datatype)) == set(known)
    assert {f"TYPE_{datatype}" for datatype in get_args(Datatype)} <= set(oip.DataType.keys())
    tasks = (*TASKS.values(), Regression(1), ImageToImage(Color.RGB))
    outputs = {output.name for task in tasks for output in task.outputs}
    assert outputs == set(get_args(OutputRole))


@pytest.mark.parametrize("method", PARSERS)
def test_encoded_images_are_taken_as_they_are(method: str) -> None:
    for images in ([b"one", b"two"], [b"one", bytes(LARGE_BYTES)]):
        request = parse(method, images=images, mode="graph")
        assert (request.mode, request.images, request.deadline) == ("graph", images, DEADLINE)
    assert (request.rendering is not None) == (method == "Segment")


@pytest.mark.parametrize("dtype", ["uint16", "float32"])
def test_levels_become_pixels_of_the_models_depth(dtype: PixelType) -> None:
    levels = np.arange(24, dtype=np.uint8).reshape(1, 2, 4, 3)
    served = served_with(TASKS["Classify"])
    cast(Any, served.model).image = ImageInput(dtype=dtype)
    request = parse("Classify", served=served, pixels=pb.Pixels(images=1, height=2, width=4, rgb=levels.tobytes()))
    assert cast(Any, request.images).dtype == dtype
    np.testing.assert_array_equal(cast(Any, request.images), levels)


@pytest.mark.parametrize("method", PARSERS)
def test_pixels_are_taken_instead(method: str) -> None:
    for images in (2, 600):
        rgb = np.resize(np.arange(256, dtype=np.uint8), (images, 3, 4, 3))
        request = parse(method, pixels=pb.Pixels(images=images, height=3, width=4, rgb=rgb.tobytes()))
        np.testing.assert_array_equal(cast(Any, request.images), rgb)
    np.testing.assert_array_equal(cast(Any, request.images), rgb)


@pytest.mark.parametrize("method", PARSERS)
@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({}, "images: expected at least one encoded image and at most 4096, got 0"),
        ({"images": [b"x"], "pixels": pb.Pixels()}, "pixels: expected none alongside images, got 1 images as well"),
        ({"pixels": pb.Pixels()}, r"pixels: expected images, height and width of at least 1, got \[0, 0, 0\]"),
        (
            {"pixels": pb.Pixels(images=-1, height=-1, width=1, rgb=b"abc")},
            r"pixels: expected images, height and width of at least 1, got \[-1, -1, 1\]",
        ),
        (
            {"pixels": pb.Pixels(images=1, height=2, width=1, rgb=b"abc")},
            r"pixels.rgb: expected 6 bytes for \[1, 2, 1, 3\], got 3 bytes",
        ),
    ],
)
def test_images_that_are_none_are_refused(method: str, fields: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        parse(method, **fields)


@pytest.mark.parametrize("method", PARSERS)
@pytest.mark.parametrize("other", PARSERS)
def test_a_model_of_another_task_is_refused_with_the_method_to_use(method: str, other: str) -> None:
    if method == other:
        return
    wanted, got = TASKS[method].name, TASKS[other].name
    with pytest.raises(InvalidArgument) as refusal:
        parse(method, task=TASKS[other], images=[b"x"])
    assert str(refusal.value) == f"model: expected a model for {wanted}, got m, a model for {got}; use {other}"


NUMBERS = TensorSpec("numbers", "FP32", (-1, 2))


@pytest.mark.parametrize("task", [Tensors((NUMBERS,)), Regression(2)])
@pytest.mark.parametrize("method", PARSERS)
def test_a_model_whose_task_has_no_method_is_refused_with_the_one_for_all(method: str, task: Task) -> None:
    with pytest.raises(InvalidArgument) as refusal:
        parse(method, task=task, images=[b"x"])
    assert f"got m, a model for {task.name}; use ModelInfer" in str(refusal.value)


def test_methods_answer_from_the_only_reading_of_their_task() -> None:
    scores, vector = np.array([[0.25, 0.75]], np.float32), np.array([[1.0, 2.0]], np.float32)
    class_map = np.ones((1, 2, 2), np.uint8)
    readings = Classification(2, LABELS, at=1), Embedding(2, at=2), Segmentation(2, LABELS, at=3)
    task = Tensors((NUMBERS,) * 4, readings)
    served, outputs = served_with(task), (np.zeros((1, 3)), scores, vector, class_map)
    frame = whole(2, 2)
    request = parse("Classify", task=task, images=[b"x"])
    classified = messages.classifications(pb.ClassifyRequest(), served, answer(outputs, [frame]))
    (category, _) = sent(classified, pb.ClassifyResponse).classifications[0].categories
    assert (category.label, category.score) == ("dog", 0.75)
    rendered = pb.ClassifyResponse.FromString(messages.Likeliest(1).renderer(task)(outputs, frame))
    assert [found.label for found in rendered.classifications[0].categories] == ["dog"]
    embedded = messages.embeddings(pb.EmbedRequest(), served, answer(outputs, [frame]))
    assert [*sent(embedded, pb.EmbedResponse).embeddings[0].values] == [1, 2]
    request = parse("Segment", task=task, images=[b"x"], pixel_counts=True)
    assert isinstance(request.rendering, messages.ClassMaps)
    response = pb.SegmentResponse.FromString(request.rendering.renderer(task)(outputs, frame))
    assert [(count.label, count.pixels) for count in response.maps[0].counts] == [("dog", 4)]
    with pytest.raises(InvalidArgument, match="model: expected a model for detection, got m, a model for tensors"):
        parse("Detect", task=task, images=[b"x"])


def test_of_two_readings_of_its_task_a_method_takes_neither() -> None:
    task = Tensors((NUMBERS, NUMBERS._replace(name="others")), (Classification(2), Classification(2, at=1)))
    with pytest.raises(InvalidArgument, match="one output for classification, got numbers, others; use ModelInfer"):
        parse("Classify", task=task, images=[b"x"])


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"min_score": float("nan")}, "min_score: expected a number, got nan"),
        ({"min_score": float("inf")}, "min_score: expected a number, got inf"),
        ({"max_detections": -1}, "max_detections: expected a number of objects, or 0 for all, got -1"),
    ],
)
def test_wrong_bounds_on_detections_are_refused(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        parse("Detect", images=[b"x"], **fields)


def test_an_unknown_encoding_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="encoding: expected ENCODING_PNG or ENCODING_RUN_LENGTHS, got 7"):
        parse("Segment", images=[b"x"], encoding=7)


DETECTED = (
    np.array([[[0, 16, 32, 32], [-5, 0, 70, 99], [10, 0, 20, 15]], [[0] * 4] * 3], np.float32),
    np.array([[0.9, 0.5, 0.4], [0] * 3], np.float32),
    np.array([[1, 0, 0], [-1] * 3], np.int32),
    np.array([3, 0], np.int32),
)


def detect(**fields: Any) -> pb.DetectResponse:
    answered = answer(DETECTED, [WIDE, whole(64, 64)])
    served = served_with(TASKS["Detect"])
    return sent(messages.detections(pb.DetectRequest(**fields), served, answered), pb.DetectResponse)


def test_boxes_are_undone_from_the_letterbox_and_clipped_to_the_image() -> None:
    """The third object lies above the image, in the border, and is none."""
    first, second = detect().results
    assert [(d.index, d.label, round(d.score, 3)) for d in first.detections] == [(1, "dog", 0.9), (0, "cat", 0.5)]
    boxes = [(d.box.x_min, d.box.y_min, d.box.x_max, d.box.y_max) for d in first.detections]
    assert boxes == [(0, 0, 50, 25), (0, 0, 100, 50)]
    assert (first.height, first.width) == (50, 100)
    assert not second.detections


@pytest.mark.parametrize(("fields", "found"), [({"min_score": 0.6}, 1), ({"max_detections": 1}, 1), ({}, 2)])
def test_detections_are_bounded_by_the_request(fields: dict[str, Any], found: int) -> None:
    assert len(detect(**fields).results[0].detections) == found


def render(fields: dict[str, Any], classes: Any, frame: Frame, *, number: int = 2, max_bytes: int = 10_000) -> Any:
    task = Segmentation(number, LABELS if number == 2 else None)
    message = messages.VisionMessage(pb.SegmentRequest(**fields), [b"x"], None)
    request = messages.parse_segment(message, served_with(task), DEADLINE, max_bytes)
    rendering = pickle.loads(pickle.dumps(request.rendering))
    (class_map,) = pb.SegmentResponse.FromString(rendering.renderer(task)((classes[np.newaxis],), frame)).maps
    return class_map


HALVES = np.repeat(np.array([[0, 1]], np.uint8), 32, axis=1).repeat(64, axis=0)


@pytest.mark.parametrize("encoding", [pb.SegmentRequest.ENCODING_UNSPECIFIED, pb.SegmentRequest.ENCODING_PNG])
def test_a_class_map_is_a_grey_png_of_the_originals_size(encoding: Any) -> None:
    class_map = render({"encoding": encoding}, HALVES, WIDE)
    with Image.open(io.BytesIO(class_map.png)) as image:
        assert (image.format, image.mode, image.size) == ("PNG", "L", (100, 50))
        assert np.asarray(image).tolist() == [[0] * 50 + [1] * 50] * 50
    assert (class_map.height, class_map.width, list(class_map.counts)) == (50, 100, [])


def test_more_classes_than_a_byte_holds_make_a_png_of_16_bits() -> None:
    classes = np.array([[0, 300], [70, 999]], np.int32)
    class_map = render({"pixel_counts": True}, classes, whole(2, 2), number=1000)
    with Image.open(io.BytesIO(class_map.png)) as image:
        assert image.mode.startswith("I;16")
        assert np.asarray(image).tolist() == classes.tolist()
    assert [(c.index, c.label, c.pixels) for c in class_map.counts] == [(i, str(i), 1) for i in (0, 70, 300, 999)]


def test_run_lengths_are_pairs_that_end_with_their_row() -> None:
    classes = np.array([[0, 0, 1], [1, 1, 1], [1, 0, 1]], np.uint8)
    class_map = render({"encoding": pb.SegmentRequest.ENCODING_RUN_LENGTHS}, classes, whole(3, 3))
    pairs = np.frombuffer(class_map.run_lengths, "<u4").reshape(-1, 2).tolist()
    assert pairs == [[0, 2], [1, 1], [1, 3], [1, 1], [0, 1], [1, 1]]


def test_a_class_beyond_those_there_should_be_is_counted_as_it_is() -> None:
    """A model from elsewhere may mark what it ignores."""
    classes = np.array([[-1, 0], [-1, 70_000]], np.int32)
    class_map = render({"pixel_counts": True}, classes, whole(2, 2), number=1000)
    assert [(c.index, c.label, c.pixels) for c in class_map.counts] == [
        (-1, "-1", 2),
        (0, "0", 1),
        (70_000, "70000", 1),
    ]


def test_pixels_are_counted_by_class_at_the_originals_size() -> None:
    class_map = render({"pixel_counts": True}, HALVES, WIDE)
    assert [(c.index, c.label, c.pixels) for c in class_map.counts] == [(0, "cat", 2500), (1, "dog", 2500)]


def test_maps_that_do_not_fit_in_a_message_together_are_refused() -> None:
    fields = {"encoding": pb.SegmentRequest.ENCODING_RUN_LENGTHS}
    with pytest.raises(ImageTooLarge, match=r"at most 700 bytes together \(max_message_bytes\)"):
        render(fields, HALVES, WIDE, max_bytes=700)  # two runs of 8 bytes in each of 50 rows


def test_a_segmentation_carries_its_maps_and_the_names_of_classes() -> None:
    maps = [pb.ClassMap(height=1), pb.ClassMap(height=2)]
    frames = [whole(1, 1)] * 2
    rendered = [pb.SegmentResponse(maps=[one]).SerializeToString() for one in maps]
    response = messages.class_maps(pb.SegmentRequest(), served_with(TASKS["Segment"]), answer((), frames, rendered))
    segmented = sent(response, pb.SegmentResponse)
    assert (list(segmented.maps), list(segmented.labels)) == (maps, ["cat", "dog"])


def test_an_embedding_is_its_vector() -> None:
    vectors = np.array([[1, 2, 3, 4], [5, 6, 7, 8]], np.float32)
    response = sent(
        messages.embeddings(pb.EmbedRequest(), served_with(TASKS["Embed"]), answer((vectors,), [whole(1, 1)] * 2)),
        pb.EmbedResponse,
    )
    assert [list(embedding.values) for embedding in response.embeddings] == vectors.tolist()


def test_what_takes_long_to_write_is_written_on_threads_and_is_the_same() -> None:
    """The render functions run on the pipeline's threads; here they are called as those do."""
    generator = np.random.default_rng(0)
    scores = generator.random((40, 300), np.float32)
    scores[:, 7] = scores[:, 8] = 0.0
    frames = [whole(8, 8)] * 40
    named = Classification(300, tuple(map(str, range(300))))
    cases: list[tuple[str, Task, Any, dict[str, Any], Any]] = [
        ("Classify", Classification(300), (scores,), {"top_k": 300}, messages.classifications),
        ("Classify", named, (scores,), {"top_k": 50}, messages.classifications),
    ]
    for method, task, outputs, fields, respond in cases:
        message, _ = PARSERS[method]
        assert parse(method, task=task, images=[b"x"], **fields).rendering is None, (
            "that would take longer than it does"
        )
        rendering = parse(method, task=task, images=[b"x"] * 40, **fields).rendering
        assert rendering is not None
        render = pickle.loads(pickle.dumps(rendering)).renderer(task)
        rows = [render(tuple(output[row : row + 1] for output in outputs), frames[row]) for row in range(40)]
        response = getattr(pb, f"{method}Response")
        on_threads = sent(respond(message(**fields), served_with(task), answer(outputs, frames, rows)), response)
        assert on_threads == sent(respond(message(**fields), served_with(task), answer(outputs, frames)), response)


def test_detections_are_written_as_by_protobuf_and_large_ones_on_threads() -> None:
    """See the test above."""
    generator = np.random.default_rng(0)
    task = Detection(300, max_detections=30)
    frames = [whole(8, 8)] * 40
    boxes = np.sort(generator.random((40, 30, 2, 2), np.float32) * 8, axis=2).reshape(40, 30, 4)
    scores = generator.random((40, 30), np.float32)
    classes = generator.integers(-1, 310, (40, 30)).astype(np.int32)
    counts = generator.integers(0, 31, 40).astype(np.int32)
    outputs = (boxes, scores, classes, counts)
    wanted = pb.DetectResponse()
    for row in range(40):
        result = wanted.results.add(height=8, width=8)
        for number in range(counts[row]):
            if scores[row, number] >= np.float32(0.3):
                sides = dict(zip(("x_min", "y_min", "x_max", "y_max"), boxes[row, number].tolist(), strict=True))
                index, score = int(classes[row, number]), float(scores[row, number])
                result.detections.add(index=index, label=str(index), score=score, box=pb.Box(**sides))
    assert parse("Detect", task=task, images=[b"x"], min_score=0.3).rendering is None
    rendering = parse("Detect", task=task, images=[b"x"] * 40, min_score=0.3).rendering
    assert rendering is not None
    render = pickle.loads(pickle.dumps(rendering)).renderer(task)
    rows = [render(tuple(output[row : row + 1] for output in outputs), frames[row]) for row in range(40)]
    for rendered in (rows, []):
        request = pb.DetectRequest(min_score=0.3)
        response = messages.detections(request, served_with(task), answer(outputs, frames, rendered))
        assert sent(response, pb.DetectResponse) == wanted


@pytest.mark.parametrize("method", PARSERS)
def test_messages_beyond_all_bounds_are_refused_before_protobuf_sees_them(method: str) -> None:
    message, _ = PARSERS[method]
    view = messages.PARSERS[message.DESCRIPTOR.name]
    for data in (b"\x12\x00" * 30_000, message(model="m" * 100_000).SerializeToString()):
        with pytest.raises(InvalidArgument):
            view(data)
    assert view(b"\x12\xff\xff\x7f" + bytes(20_000)) is None


@pytest.mark.parametrize("method", PARSERS)
def test_a_priority_is_taken_as_triton_has_it(method: str) -> None:
    had = [parse(method, images=[b"image"], priority=priority).priority for priority in range(4)]
    assert had == [2, 1, 2, 3]
    for wrong in (4, -1):
        with pytest.raises(InvalidArgument, match=rf"^priority: .* got {wrong}$"):
            parse(method, images=[b"image"], priority=wrong)


@pytest.mark.parametrize("count", [1, 300])
def test_keypoints_come_back_in_the_originals_pixels(count: int) -> None:
    points = np.array([[[32, 32, 0.75], [0, 16, 0.25]]] * count, np.float32)
    served, request = served_with(TASKS["Locate"]), pb.LocateRequest(min_score=0.5)
    parsed = parse("Locate", images=[b"x"] * count, min_score=0.5)
    frames, rendered = [WIDE] * count, list[Any]()
    if parsed.rendering is not None:
        render = cast(Any, parsed.rendering).renderer(TASKS["Locate"])
        rendered = [render((points[:1],), WIDE)] * count
    assert bool(rendered) == (count > 1)
    found = sent(keypoint_messages.located(request, served, answer((points,), frames, rendered)), pb.LocateResponse)
    one = pb.Keypoint(index=0, label="cat", score=0.75, x=50, y=25)
    assert [*found.results] == [pb.Keypoints(keypoints=[one], height=50, width=100)] * count


def test_keypoints_without_scores_have_none() -> None:
    task = Keypoints(2)
    served, points = served_with(task), np.array([[[32, 32], [-64, 0]]], np.float32)
    request = pb.LocateRequest(min_score=0.5)
    found = sent(keypoint_messages.located(request, served, answer((points,), [WIDE])), pb.LocateResponse)
    first, second = found.results[0].keypoints
    assert (first.HasField("score"), first.label, first.x, first.y) == (False, "0", 50, 25)
    assert (second.x, second.y) == (-100, -25), "beyond the image"


@pytest.mark.parametrize("min_score", [np.nan, np.inf])
def test_the_least_score_of_keypoints_is_a_number(min_score: float) -> None:
    with pytest.raises(InvalidArgument, match="min_score"):
        parse("Locate", images=[b"x"], min_score=min_score)


@pytest.mark.parametrize("count", [1, 300])
def test_a_sequence_is_its_text_and_classes(count: int) -> None:
    scores = np.array([[[0, 0.5, 0.25], [0.75, 0, 0], [0, 0.25, 0.5], [0, 0.25, 0.5]]] * count, np.float32)
    parsed, rendered = parse("Transcribe", images=[b"x"] * count), list[Any]()
    if parsed.rendering is not None:
        rendered = [cast(Any, parsed.rendering).renderer(TASKS["Transcribe"])((scores[:1],), WIDE)] * count
    assert bool(rendered) == (count > 1)
    given = answer((scores,), [WIDE] * count, rendered)
    response = sequence_messages.transcriptions(pb.TranscribeRequest(), served_with(TASKS["Transcribe"]), given)
    categories = [pb.Category(index=1, label="cat", score=0.5), pb.Category(index=2, label="dog", score=0.5)]
    wanted = pb.Transcription(text="catdog", score=0.09375, categories=categories)
    assert [*sent(response, pb.TranscribeResponse).transcriptions] == [wanted] * count
