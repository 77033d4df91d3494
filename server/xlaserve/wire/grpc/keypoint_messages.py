"""The messages of Locate."""

from __future__ import annotations

import math
from typing import Final, NamedTuple

from numpy.typing import NDArray

from xlaserve.engine.program import Outputs, Value
from xlaserve.errors import InvalidArgument
from xlaserve.images.frame import Frame
from xlaserve.models.task import Keypoints, Task, reading_of
from xlaserve.models.version import Served
from xlaserve.pipeline.pipeline import Answer, Render, Request
from xlaserve.wire.grpc import wire_format
from xlaserve.wire.grpc.vision_messages import Response, VisionMessage, pipeline_request
from xlaserve.wire.shared import objects
from xlaserve.wire.shared.objects import task_of
from xlaserve.wire.shared.output_tensors import MAX_INLINE_US
from xlaserve_proto import vision_pb2 as pb

IMAGE_US: Final = 50.0
KEYPOINT_US: Final = 3.0

_RESULTS: Final = pb.LocateResponse.RESULTS_FIELD_NUMBER


def parse_locate(request: VisionMessage[pb.LocateRequest], served: Served, deadline: float) -> Request:
    """Returns the `pipeline.Request`. Raises InvalidArgument."""
    task = task_of(served, Keypoints)
    min_score = request.fields.min_score
    if not math.isfinite(min_score):
        raise InvalidArgument("min_score", "a number", min_score)
    parsed = pipeline_request(request, served, deadline)
    if len(parsed.images) * (IMAGE_US + task.classes * KEYPOINT_US) <= MAX_INLINE_US:
        return parsed
    return parsed._replace(rendering=LocatedKeypoints(min_score))


class LocatedKeypoints(NamedTuple):
    """Renders keypoints."""

    min_score: float

    def renderer(self, task: Task) -> Render:
        """Returns what gives those of one image as they stand in a response."""
        keypoints = reading_of(task, Keypoints)

        def render(outputs: Outputs, frame: Frame) -> bytes:
            (points,) = keypoints.points(outputs)
            message = _message(keypoints, points, frame, self.min_score)
            return b"".join(wire_format.record(_RESULTS, message.SerializeToString()))

        return render


def located(request: pb.LocateRequest, served: Served, answer: Answer) -> Response:
    """Returns the keypoints of each image, in its own pixels."""
    if answer.rendered:
        return Response(pb.LocateResponse(), answer.rendered)
    task = task_of(served, Keypoints)
    pairs = zip(task.points(answer.outputs), answer.frames, strict=True)
    results = [_message(task, points, frame, request.min_score) for points, frame in pairs]
    return Response(pb.LocateResponse(results=results), ())


def _message(task: Keypoints, points: NDArray[Value], frame: Frame, min_score: float) -> pb.Keypoints:
    found = [
        pb.Keypoint(index=one.index, label=task.label(one.index), score=one.score, x=one.x, y=one.y)
        for one in objects.located(task, points, frame, min_score)
    ]
    return pb.Keypoints(keypoints=found, height=frame.height, width=frame.width)
