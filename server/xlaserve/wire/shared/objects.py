"""Methods by task: the model that a method is for, and the places of objects in the original image."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from threading import Lock
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from xlaserve.engine.program import Outputs
from xlaserve.errors import ImageTooLarge, InvalidArgument
from xlaserve.images.frame import Frame
from xlaserve.models.task import (
    Classification,
    ClassSequence,
    Detection,
    Embedding,
    ImageToImage,
    Keypoints,
    Objects,
    Segmentation,
    Task,
    TaskT,
    reading_of,
    readings_of,
)
from xlaserve.models.version import Served
from xlaserve.pipeline.pipeline import Render

DEFAULT_TOP_K: Final = 5
METHODS: Final[dict[type[Task], str]] = {
    Classification: "Classify",
    Detection: "Detect",
    Segmentation: "Segment",
    Embedding: "Embed",
    ClassSequence: "Transcribe",
    Keypoints: "Locate",
}
"""The method of each task that has one of its own."""
ANY_TASK: Final = "ModelInfer, :predict over HTTP, or xlaserve-client infer"
"""The calls that answer with the outputs of a model of any task."""


def task_of(served: Served, kind: type[TaskT]) -> TaskT:
    """Returns the model's task where it is of this kind, or the only such reading of its outputs.

    Raises InvalidArgument with the method that serves the model, also for models of other inputs than one image.
    """
    model, task = served.model, served.model.task
    if not model.is_of_one_image:
        got = f"{served.settings.name}, whose inputs are {', '.join(model.names)}; use {ANY_TASK}"
        raise InvalidArgument("model", "a model of one image", got)
    with suppress(LookupError):
        return reading_of(task, kind)
    if names := [task.outputs[reading.at].name for reading in readings_of(task) if isinstance(reading, kind)]:
        raise InvalidArgument("model", f"one output for {kind.name}", f"{', '.join(names)}; use {ANY_TASK}")
    any_task = f":transform, {ANY_TASK}" if isinstance(task, ImageToImage) else ANY_TASK
    got = f"{served.settings.name}, a model for {task.name}; use {METHODS.get(type(task), any_task)}"
    raise InvalidArgument("model", f"a model for {kind.name}", got)


def in_original(objects: Objects, frame: Frame, most: int = 0) -> Objects:
    """Returns the objects with their boxes in the original's pixels, `most` at most; 0 for all."""
    boxes = frame.to_original(objects.boxes)
    is_inside = (boxes[:, :2] < boxes[:, 2:]).all(axis=1)  # else it is in the border, where there is no image
    kept = np.flatnonzero(is_inside)[: most or None]
    return Objects(boxes[kept], objects.classes[kept], objects.scores[kept])


@dataclass(frozen=True, slots=True)
class Located:
    """A keypoint in the original's pixels."""

    index: int
    score: float | None
    """None where the model gives none."""
    x: float
    y: float


def located(task: Keypoints, points: NDArray[Any], frame: Frame, min_score: float) -> list[Located]:
    """Returns the keypoints of one image, `points` of `Keypoints.points`, whose scores are at least `min_score`."""
    kept = task.above(points, min_score)
    scores = points[kept, 2].tolist() if task.has_scores else [None] * len(kept)
    places = frame.points_to_original(points[kept, :2]).tolist()
    return [Located(index, score, *place) for index, score, place in zip(kept.tolist(), scores, places, strict=True)]


def within(render: Callable[[Outputs, Frame], bytes], max_bytes: int) -> Render:
    """Returns `render`, for several threads, that raises ImageTooLarge beyond `max_bytes` for all images together."""
    rendered_bytes = 0
    lock = Lock()

    def bounded(outputs: Outputs, frame: Frame) -> bytes:
        nonlocal rendered_bytes
        rendered = render(outputs, frame)
        with lock:
            rendered_bytes += len(rendered)
            if rendered_bytes > max_bytes:
                raise ImageTooLarge(
                    f"images: expected answers of at most {max_bytes} bytes together (max_message_bytes),"
                    " got more; send fewer or smaller images"
                )
        return rendered

    return bounded
