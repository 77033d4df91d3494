"""The typed API: wire messages to domain requests and back."""

from __future__ import annotations

import math
from threading import Lock
from typing import Final, TypeVar

import numpy as np

from xlaserve import class_map
from xlaserve.engine.program import Images, Outputs
from xlaserve.errors import ImageTooLarge, InvalidArgument
from xlaserve.frame import Frame
from xlaserve.model.task import Classification, Detection, Embedding, Segmentation, Task
from xlaserve.model.version import Served
from xlaserve.pipeline import CHANNELS, Answer, Render, Request
from xlaserve.rpc.tensors import MAX_IMAGES
from xlaserve.telemetry.model import Timings
from xlaserve_proto import vision_pb2 as pb

InferenceRequest = pb.ClassifyRequest | pb.DetectRequest | pb.SegmentRequest | pb.EmbedRequest
InferenceResponse = pb.ClassifyResponse | pb.DetectResponse | pb.SegmentResponse | pb.EmbedResponse
TaskT = TypeVar("TaskT", bound=Task)

DEFAULT_TOP_K: Final = 5
METHODS: Final[dict[type[Task], str]] = {
    Classification: "Classify",
    Detection: "Detect",
    Segmentation: "Segment",
    Embedding: "Embed",
}


def parse_classify(request: pb.ClassifyRequest, served: Served, deadline: float, now: float) -> Request:
    """Returns the domain's request. Raises InvalidArgument, as the others do."""
    _task(served, Classification)
    if request.top_k < 0:
        raise InvalidArgument("top_k", f"a number of classes, or 0 for {DEFAULT_TOP_K}", request.top_k)
    return _request(request, deadline)


def classifications(request: pb.ClassifyRequest, answer: Answer) -> pb.ClassifyResponse:
    """Returns the likeliest classes of each image."""
    task = _task(answer.served, Classification)
    return pb.ClassifyResponse(
        classifications=[
            pb.Classification(
                categories=[
                    pb.Category(index=category.index, label=category.label, score=category.score) for category in row
                ]
            )
            for row in task.top(answer.outputs, request.top_k or DEFAULT_TOP_K)
        ]
    )


def parse_detect(request: pb.DetectRequest, served: Served, deadline: float, now: float) -> Request:
    """Returns the domain's request."""
    _task(served, Detection)
    if not math.isfinite(request.min_score):
        raise InvalidArgument("min_score", "a number", request.min_score)
    if request.max_detections < 0:
        raise InvalidArgument("max_detections", "a number of objects, or 0 for all", request.max_detections)
    return _request(request, deadline)


def detections(request: pb.DetectRequest, answer: Answer) -> pb.DetectResponse:
    """Returns the objects of each image, their boxes in its own pixels."""
    task = _task(answer.served, Detection)
    response = pb.DetectResponse()
    for objects, frame in zip(task.objects(answer.outputs, min_score=request.min_score), answer.frames, strict=True):
        boxes = frame.to_original(np.array([found.box for found in objects], np.float32).reshape(-1, 4))
        result = response.results.add(height=frame.height, width=frame.width)
        for found, (x_min, y_min, x_max, y_max) in zip(objects, boxes.tolist(), strict=True):
            if not (x_min < x_max and y_min < y_max):  # in the border, where there is no image
                continue
            if len(result.detections) == (request.max_detections or math.inf):
                break
            detection = result.detections.add(index=found.index, label=found.label, score=found.score)
            box = detection.box
            box.x_min, box.y_min, box.x_max, box.y_max = x_min, y_min, x_max, y_max
    return response


def parse_segment(request: pb.SegmentRequest, served: Served, deadline: float, max_bytes: int) -> Request:
    """Returns the domain's request, whose maps may be of `max_bytes` together."""
    task = _task(served, Segmentation)
    if request.encoding not in pb.SegmentRequest.Encoding.values():
        raise InvalidArgument("encoding", "ENCODING_PNG or ENCODING_RUN_LENGTHS", request.encoding)
    return _request(request, deadline, _MapMaker(request, task, max_bytes))


def class_maps(request: pb.SegmentRequest, answer: Answer) -> pb.SegmentResponse:
    """Returns the class map of each image, of its own size."""
    return pb.SegmentResponse(maps=answer.rendered, labels=_task(answer.served, Segmentation).labels or ())


class _MapMaker:
    """Renders class maps, on several threads at a time, as long as they fit in a message together."""

    def __init__(self, request: pb.SegmentRequest, task: Segmentation, max_bytes: int) -> None:
        self._as_runs = request.encoding == pb.SegmentRequest.ENCODING_RUN_LENGTHS
        self._counts = request.pixel_counts
        self._task = task
        self._max_bytes = max_bytes
        self._bytes = 0
        self._lock = Lock()

    def __call__(self, outputs: Outputs, frame: Frame) -> pb.ClassMap:
        """Returns the map of one image. Raises ImageTooLarge where it is one too many."""
        (classes,) = self._task.class_maps(outputs)
        original = frame.map_to_original(classes)
        message = pb.ClassMap(height=frame.height, width=frame.width)
        if self._as_runs or self._counts:
            runs = class_map.runs(original)
        if self._as_runs:
            message.run_lengths = runs.to_bytes()
        else:
            message.png = class_map.to_png(original, self._task.classes)
        if self._counts:
            for index, pixels in runs.counts().items():
                message.counts.add(index=index, label=self._task.label(index), pixels=pixels)
        with self._lock:
            self._bytes += message.ByteSize()
            if self._bytes > self._max_bytes:
                raise ImageTooLarge(
                    f"images: expected maps of at most {self._max_bytes} bytes together (max_message_bytes), got more; "
                    "send fewer or smaller images"
                )
        return message


def parse_embed(request: pb.EmbedRequest, served: Served, deadline: float, now: float) -> Request:
    """Returns the domain's request."""
    _task(served, Embedding)
    return _request(request, deadline)


def embeddings(request: pb.EmbedRequest, answer: Answer) -> pb.EmbedResponse:
    """Returns the vector of each image."""
    vectors = _task(answer.served, Embedding).vectors(answer.outputs)
    return pb.EmbedResponse(embeddings=[pb.Embedding(values=vector) for vector in vectors.tolist()])


def stamp(response: InferenceResponse, timings: Timings) -> None:
    """Writes where the time went."""
    response.timings.decode_s = timings.decode_s
    response.timings.queue_s = timings.queue_s
    response.timings.gather_s = timings.gather_s
    response.timings.execute_s = timings.execute_s
    response.timings.encode_s = timings.encode_s
    response.timings.total_s = timings.total_s


def _task(served: Served, kind: type[TaskT]) -> TaskT:
    """Returns the model's task where it is of this kind. Raises InvalidArgument with the method that serves it."""
    task = served.model.task
    if isinstance(task, kind):
        return task
    got = f"{served.settings.name}, a model for {task.name}; use {METHODS[type(task)]}"
    raise InvalidArgument("model", f"a model for {kind.name}", got)


def _request(message: InferenceRequest, deadline: float, render: Render | None = None) -> Request:
    return Request(message.mode, _images(message), deadline, render)


def _images(message: InferenceRequest) -> Images | list[bytes]:
    encoded = len(message.images)
    if message.HasField("pixels"):
        if encoded:
            raise InvalidArgument("pixels", "none beside images", f"{encoded} images as well")
        return _pixels(message.pixels)
    if not 1 <= encoded <= MAX_IMAGES:
        raise InvalidArgument("images", f"at least one encoded image and at most {MAX_IMAGES}", encoded)
    return list(message.images)


def _pixels(pixels: pb.Pixels) -> Images:
    shape = (pixels.images, pixels.height, pixels.width, CHANNELS)
    if min(shape) < 1:
        raise InvalidArgument("pixels", "images, height and width of at least 1", list(shape[:3]))
    rgb = pixels.rgb
    if len(rgb) != math.prod(shape):
        raise InvalidArgument("pixels.rgb", f"{math.prod(shape)} bytes for {list(shape)}", f"{len(rgb)} bytes")
    return np.frombuffer(rgb, np.uint8).reshape(shape)
