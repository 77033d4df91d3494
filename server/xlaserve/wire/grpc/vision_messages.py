"""The typed API: wire messages to `pipeline.Request` and `pipeline.Answer` to wire messages."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from itertools import chain
from typing import Any, Final, Generic, NamedTuple, TypeVar

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from xlaserve.engine.inputs import Images
from xlaserve.engine.program import Outputs
from xlaserve.engine.timings import STAGES, Timings
from xlaserve.errors import InvalidArgument
from xlaserve.images import class_map
from xlaserve.images.decoder import Encoded
from xlaserve.images.frame import Frame
from xlaserve.images.image_input import ImageInput
from xlaserve.models.task import Classification, Detection, Embedding, Objects, Segmentation, Task, reading_of
from xlaserve.models.version import Served
from xlaserve.pipeline.pipeline import Answer, Render, Request
from xlaserve.wire.grpc import wire_format
from xlaserve.wire.grpc.wire_format import LARGE_BYTES
from xlaserve.wire.shared.inference import check_priority
from xlaserve.wire.shared.input_tensors import MAX_IMAGES
from xlaserve.wire.shared.objects import DEFAULT_TOP_K, METHODS, in_original, task_of, within
from xlaserve.wire.shared.output_tensors import MAX_INLINE_US, fits_inline
from xlaserve.wire.shared.parts import Part
from xlaserve_proto import vision_pb2 as pb

FieldsT = TypeVar(
    "FieldsT",
    pb.ClassifyRequest,
    pb.DetectRequest,
    pb.SegmentRequest,
    pb.EmbedRequest,
    pb.TranscribeRequest,
    pb.LocateRequest,
)
InferenceResponse = (
    pb.ClassifyResponse
    | pb.DetectResponse
    | pb.SegmentResponse
    | pb.EmbedResponse
    | pb.TranscribeResponse
    | pb.LocateResponse
)

IMAGES: Final = "images"
RGB: Final = "rgb"
SCORE_BYTES: Final = 4
IMAGE_US: Final = 60.0
DETECTION_US: Final = 0.25

_VIEWED: Final[wire_format.Fields] = {
    pb.ClassifyRequest.IMAGES_FIELD_NUMBER: IMAGES,
    pb.ClassifyRequest.PIXELS_FIELD_NUMBER: {pb.Pixels.RGB_FIELD_NUMBER: RGB},
}
_CLASSIFICATIONS: Final = pb.ClassifyResponse.CLASSIFICATIONS_FIELD_NUMBER
_CATEGORIES: Final = pb.Classification.CATEGORIES_FIELD_NUMBER
_DETECTIONS: Final = pb.Detections.DETECTIONS_FIELD_NUMBER
_TAIL: Final = np.dtype([("score", "<f4"), ("box", "<u2"), ("sides", [("tag", "u1"), ("value", "<f4")], 4)])
"""How each Detection ends: with the value of its score, and its box."""
_BOX: Final = pb.Detection.BOX_FIELD_NUMBER << 3 | 2 | _TAIL["sides"].itemsize << 8
_SIDES: Final = [number << 3 | 5 for number in pb.Box.DESCRIPTOR.fields_by_number]
_RESULTS: Final = pb.DetectResponse.RESULTS_FIELD_NUMBER
_MAPS: Final = pb.SegmentResponse.MAPS_FIELD_NUMBER
_EMBEDDINGS: Final = pb.EmbedResponse.EMBEDDINGS_FIELD_NUMBER
_VALUES: Final = pb.Embedding.VALUES_FIELD_NUMBER


class VisionMessage(NamedTuple, Generic[FieldsT]):
    """A request as it arrived."""

    fields: FieldsT
    """All of the message but what is viewed, which may be missing here."""
    images: Sequence[Encoded]
    rgb: Encoded | None
    """Data of `pixels`, where it is viewed."""


class Response(NamedTuple):
    """A response as it is sent."""

    fields: InferenceResponse
    """Its small fields."""
    pieces: Sequence[Part]
    """The others, as they stand on the wire."""


def view(message: type[FieldsT], data: bytes) -> VisionMessage[FieldsT] | None:
    """Returns the request, None where `data` can't be parsed.

    Raises InvalidArgument beyond a bound of `wire_format`.
    """
    try:
        if len(data) >= LARGE_BYTES:
            rest, views = wire_format.split(message, data, _VIEWED)
            return VisionMessage(message.FromString(rest), views.get(IMAGES, ()), views.get(RGB, [None])[-1])
        fields = message.FromString(data)
    except DecodeError:
        return None
    return VisionMessage(fields, fields.images, None)


PARSERS: Final[dict[str, Callable[[bytes], object | None]]] = {
    message: partial(view, getattr(pb, message)) for message in (f"{method}Request" for method in METHODS.values())
}
"""By the message of each method: they have images and pixels in fields of the same numbers."""


def parse_classify(request: VisionMessage[pb.ClassifyRequest], served: Served, deadline: float) -> Request:
    """Returns the `pipeline.Request`. Raises InvalidArgument, as the others do."""
    task = task_of(served, Classification)
    top_k = request.fields.top_k
    if top_k < 0:
        raise InvalidArgument("top_k", f"a number of classes, or 0 for {DEFAULT_TOP_K}", top_k)
    parsed = pipeline_request(request, served, deadline)
    kept = min(top_k or DEFAULT_TOP_K, task.classes)
    if fits_inline(parsed.images, kept, task.classes):
        return parsed
    return parsed._replace(rendering=Likeliest(kept))


class Likeliest(NamedTuple):
    """Renders classifications."""

    k: int

    def renderer(self, task: Task) -> Render:
        """Returns what gives one as it stands in a response."""
        return partial(_classification, reading_of(task, Classification), self.k)


def _classification(task: Classification, k: int, outputs: Outputs, frame: Frame) -> bytes:
    """Returns the classification of one image as it stands in a response."""
    (scores,) = outputs[task.at]
    top = task.best(scores, k)
    categories = _categories(task.classes, task.labels)
    # One by one they would take a microsecond each as messages.
    pairs = zip(map(categories.__getitem__, top.tolist()), scores[top].astype("<f4").view("V4").tolist(), strict=True)
    return b"".join(wire_format.record(_CLASSIFICATIONS, b"".join(chain.from_iterable(pairs))))


@lru_cache(maxsize=16)
def _categories(classes: int, labels: tuple[str, ...] | None) -> list[bytes]:
    """Returns for each class its Category as it stands in a Classification, up to the bytes of its score."""
    task = Classification(classes, labels)
    categories = []
    for index in range(classes):
        category = pb.Category(index=index, label=task.label(index), score=1.0).SerializeToString()
        # Fields stand in the order of their numbers, and the score's is the last.
        categories.append(b"".join(wire_format.record(_CATEGORIES, category))[:-SCORE_BYTES])
    return categories


def classifications(request: pb.ClassifyRequest, served: Served, answer: Answer) -> Response:
    """Returns the likeliest classes of each image."""
    if answer.rendered:
        return Response(pb.ClassifyResponse(), answer.rendered)
    task = task_of(served, Classification)
    response = pb.ClassifyResponse(
        classifications=[
            pb.Classification(
                categories=[
                    pb.Category(index=category.index, label=category.label, score=category.score) for category in row
                ]
            )
            for row in task.top(answer.outputs, request.top_k or DEFAULT_TOP_K)
        ]
    )
    return Response(response, ())


def parse_detect(request: VisionMessage[pb.DetectRequest], served: Served, deadline: float) -> Request:
    """Returns the `pipeline.Request`."""
    task = task_of(served, Detection)
    fields = request.fields
    if not math.isfinite(fields.min_score):
        raise InvalidArgument("min_score", "a number", fields.min_score)
    if fields.max_detections < 0:
        raise InvalidArgument("max_detections", "a number of objects, or 0 for all", fields.max_detections)
    parsed = pipeline_request(request, served, deadline)
    if len(parsed.images) * (IMAGE_US + task.max_detections * DETECTION_US) <= MAX_INLINE_US:
        return parsed
    return parsed._replace(rendering=DetectedObjects(fields.min_score, fields.max_detections))


class DetectedObjects(NamedTuple):
    """Renders detections."""

    min_score: float
    most: int
    """0 for all."""

    def renderer(self, task: Detection) -> Render:
        """Returns what gives those of one image as they stand in a response."""
        return lambda outputs, frame: _detected(task, self.most, frame, *task.objects(outputs, self.min_score))


def detections(request: pb.DetectRequest, served: Served, answer: Answer) -> Response:
    """Returns the objects of each image, their boxes in its own pixels."""
    rendered = answer.rendered
    if not rendered:
        task = task_of(served, Detection)
        objects = task.objects(answer.outputs, request.min_score)
        most = request.max_detections
        rendered = [_detected(task, most, *found) for found in zip(answer.frames, objects, strict=True)]
    return Response(pb.DetectResponse(), rendered)


def _detected(task: Detection, most: int, frame: Frame, objects: Objects) -> bytes:
    """Returns the objects of one image as they stand in a response.

    One by one they would take four microseconds each as messages, with the interpreter's lock all the while.
    """
    objects = in_original(objects, frame, most)
    tails = np.zeros(len(objects.scores), _TAIL)
    tails["score"] = objects.scores
    tails["box"] = _BOX
    tails["sides"]["tag"] = _SIDES
    tails["sides"]["value"] = objects.boxes
    indices = objects.classes.tolist()
    heads = {index: _head(index, task.label(index)) for index in set(indices)}
    pairs = zip(map(heads.__getitem__, indices), tails.view(f"V{_TAIL.itemsize}").tolist(), strict=True)
    size: bytes = pb.Detections(height=frame.height, width=frame.width).SerializeToString()
    return b"".join(wire_format.record(_RESULTS, b"".join(chain.from_iterable(pairs)), size))


@lru_cache(maxsize=4096)
def _head(index: int, label: str) -> bytes:
    """Returns a Detection as it stands in Detections, up to the bytes of its score."""
    named: bytes = pb.Detection(index=index, label=label, score=1.0).SerializeToString()
    # Fields stand in the order of their numbers.
    return b"".join(wire_format.record(_DETECTIONS, named, bytes(_TAIL.itemsize - SCORE_BYTES)))[: -_TAIL.itemsize]


def parse_segment(
    request: VisionMessage[pb.SegmentRequest], served: Served, deadline: float, max_bytes: int
) -> Request:
    """Returns the `pipeline.Request`, whose maps may have `max_bytes` together."""
    task_of(served, Segmentation)
    fields = request.fields
    if fields.encoding not in pb.SegmentRequest.Encoding.values():
        raise InvalidArgument("encoding", "ENCODING_PNG or ENCODING_RUN_LENGTHS", fields.encoding)
    as_runs = fields.encoding == pb.SegmentRequest.ENCODING_RUN_LENGTHS
    return pipeline_request(request, served, deadline)._replace(
        rendering=ClassMaps(as_runs, fields.pixel_counts, max_bytes)
    )


def class_maps(request: pb.SegmentRequest, served: Served, answer: Answer) -> Response:
    """Returns the class map of each image, of its own size."""
    return Response(pb.SegmentResponse(labels=task_of(served, Segmentation).labels or ()), answer.rendered)


class ClassMaps(NamedTuple):
    """Renders class maps, on several threads at a time, as long as they fit in a message together."""

    as_runs: bool
    has_counts: bool
    max_bytes: int

    def renderer(self, task: Task) -> Render:
        """Returns what gives one as it stands in a response. Raises ImageTooLarge where it is one too many."""
        segmentation = reading_of(task, Segmentation)

        def render(outputs: Outputs, frame: Frame) -> bytes:
            message = self._map(segmentation, segmentation.map_of(outputs), frame)
            return b"".join(wire_format.record(_MAPS, message.SerializeToString()))

        return within(render, self.max_bytes)

    def _map(self, task: Segmentation, classes: NDArray[Any], frame: Frame) -> pb.ClassMap:
        original = frame.map_to_original(classes)
        message = pb.ClassMap(height=frame.height, width=frame.width)
        if self.as_runs or self.has_counts:
            runs = class_map.runs(original)
        if self.as_runs:
            message.run_lengths = runs.to_bytes()
        else:
            message.png = class_map.to_png(original, task.classes)
        if self.has_counts:
            for index, pixels in runs.counts().items():
                message.counts.add(index=index, label=task.label(index), pixels=pixels)
        return message


def parse_embed(request: VisionMessage[pb.EmbedRequest], served: Served, deadline: float) -> Request:
    """Returns the `pipeline.Request`."""
    task_of(served, Embedding)
    return pipeline_request(request, served, deadline)


def embeddings(request: pb.EmbedRequest, served: Served, answer: Answer) -> Response:
    """Returns the vector of each image."""
    vectors = answer.outputs[task_of(served, Embedding).at].astype("<f4", copy=False)
    records = (wire_format.record(_EMBEDDINGS, *wire_format.record(_VALUES, vector.tobytes())) for vector in vectors)
    return Response(pb.EmbedResponse(), list(chain.from_iterable(records)))


def stamp(response: InferenceResponse, served: Served, answer: Answer, timings: Timings) -> None:
    """Writes what ran, and where the time went."""
    response.model, response.version, response.mode = served.settings.name, served.settings.version, answer.mode
    stages = response.timings
    for stage in STAGES:
        setattr(stages, stage, getattr(timings, stage))


def pipeline_request(message: VisionMessage[FieldsT], served: Served, deadline: float) -> Request:
    """Returns the `pipeline.Request`, without a rendering. Raises InvalidArgument."""
    fields = message.fields
    images = _images(message, served.model.image)
    return Request(fields.mode, images, deadline, priority=check_priority(fields.priority, "priority"))


def _images(message: VisionMessage[FieldsT], image: ImageInput) -> Images | list[Encoded]:
    encoded = len(message.images)
    if message.fields.HasField("pixels"):
        if encoded:
            raise InvalidArgument("pixels", "none alongside images", f"{encoded} images as well")
        pixels = message.fields.pixels
        return _pixels(pixels, pixels.rgb if message.rgb is None else message.rgb, image)
    if not 1 <= encoded <= MAX_IMAGES:
        raise InvalidArgument("images", f"at least one encoded image and at most {MAX_IMAGES}", encoded)
    return list(message.images)


def _pixels(pixels: pb.Pixels, rgb: Encoded, image: ImageInput) -> Images:
    shape = (pixels.images, pixels.height, pixels.width, image.channels)
    if min(shape) < 1:
        raise InvalidArgument("pixels", "images, height and width of at least 1", list(shape[:3]))
    if len(rgb) != math.prod(shape):
        raise InvalidArgument("pixels.rgb", f"{math.prod(shape)} bytes for {list(shape)}", f"{len(rgb)} bytes")
    levels = np.frombuffer(rgb, np.uint8).reshape(shape)
    return levels.astype(image.dtype) if image.is_deep else levels
