"""Images as curl and browsers send them, answered by task: `POST /v1/models/NAME:classify` and the others.

The body is a form with files, JSON with images in base64, or else an image as it is. The answers are the messages of
`vision.proto` in JSON.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple

from xlaserve.engine.program import Outputs
from xlaserve.engine.timings import STAGES
from xlaserve.errors import InvalidArgument, shown
from xlaserve.images import class_map
from xlaserve.images.drawing import MAX_SIDE
from xlaserve.images.frame import Frame
from xlaserve.images.image_output import to_png
from xlaserve.models.task import (
    Classification,
    ClassSequence,
    Detection,
    Embedding,
    ImageToImage,
    Keypoints,
    Segmentation,
    Task,
    WithClasses,
    reading_of,
)
from xlaserve.models.version import Served
from xlaserve.pipeline.pipeline import Drawn, Render, Rendering, Request
from xlaserve.wire.http import pictures
from xlaserve.wire.http.forms import Form, read_form
from xlaserve.wire.http.json_tensors import listed
from xlaserve.wire.http.message import HttpAnswer, HttpRequest, Json, separated, to_json
from xlaserve.wire.shared.call import Calls
from xlaserve.wire.shared.inference import check_priority
from xlaserve.wire.shared.input_tensors import MAX_IMAGES
from xlaserve.wire.shared.objects import DEFAULT_TOP_K, in_original, located, task_of, within
from xlaserve.wire.shared.parts import Part

SIDES: Final = ("x_min", "y_min", "x_max", "y_max")


@dataclass(eq=False)
class Vision:
    """Its methods, as `routes` names them."""

    calls: Calls
    max_answer_bytes: int

    async def classify(self, request: HttpRequest) -> HttpAnswer:
        """Classifies images."""
        return await self._run("classify", request, "classifications", _likeliest)

    async def detect(self, request: HttpRequest) -> HttpAnswer:
        """Detects objects in images."""
        return await self._run("detect", request, "results", _objects)

    async def segment(self, request: HttpRequest) -> HttpAnswer:
        """Segments images: names the class of each pixel."""
        return await self._run("segment", request, "maps", partial(_class_maps, max_bytes=self.max_answer_bytes))

    async def embed(self, request: HttpRequest) -> HttpAnswer:
        """Returns an embedding vector for each image."""
        return await self._run("embed", request, "embeddings", _vectors)

    async def transcribe(self, request: HttpRequest) -> HttpAnswer:
        """Reads the text, or another sequence of classes, in images."""
        return await self._run("transcribe", request, "transcriptions", _sequences)

    async def locate(self, request: HttpRequest) -> HttpAnswer:
        """Finds the keypoints in images."""
        return await self._run("locate", request, "results", _keypoints)

    async def transform(self, request: HttpRequest) -> HttpAnswer:
        """Returns the image that the model makes of each image."""
        return await self._run("transform", request, "images", partial(_made, max_bytes=self.max_answer_bytes))

    async def _run(
        self, method: str, request: HttpRequest, field: str, rendering: Callable[[Served, Form], Rendering]
    ) -> HttpAnswer:
        path = request.path
        version = path.get("version") or path.get("label", "")
        with self.calls.enter(method, path["model"], version, math.inf) as call:
            form = await read_form(request)
            served = call.served
            _check_version(form.text("version"), version, served)
            rendered: Rendering | Drawn = rendering(served, form)
            images = form.images
            is_picture = pictures.is_wanted(request.headers)
            if is_picture:
                rendered = _drawn(rendered, len(images))
            if not images:
                raise InvalidArgument("image", "one as the body, or named image in a form or in JSON", "none")
            if len(images) > MAX_IMAGES:
                raise InvalidArgument("image", f"at most {MAX_IMAGES}", len(images))
            until = min(call.deadline, call.began + form.timeout_s())
            priority = check_priority(form.count("priority"), "priority")
            mode = form.text("mode")
            form.warn_of_slips()
            answer = await call.run(Request(mode, images, until, rendered, priority))
            timings = call.end(answer)
            if is_picture:
                return HttpAnswer(answer.rendered, media_type=pictures.PNG)
            settings = served.settings
            head = {"model": settings.name, "version": settings.version, "mode": answer.mode}
            stages = {stage: getattr(timings, stage) for stage in STAGES}
            parts: list[Part] = [to_json(head)[:-1], b',"%b":[' % field.encode(), *separated(answer.rendered)]
            return HttpAnswer([*parts, b'],"timings":', to_json(stages), b"}"])


def _check_version(wanted: str, in_path: str, served: Served) -> None:
    """Refuses a version among the options that is not the one that answers: the path alone chooses that."""
    if wanted not in ("", in_path, served.settings.version):
        here = f"/v1/models/{served.settings.name}/versions/NUMBER:METHOD"
        raise InvalidArgument("version", f"it in the path, as in {here} or .../labels/LABEL:METHOD", shown(wanted))


def _drawn(rendering: Rendering | Drawn, images: int) -> Rendering | Drawn:
    """Returns what makes a picture of the same answer. Raises InvalidArgument where that can't be done."""
    pictures.check_one(images)
    match rendering:
        case Likeliest(k):
            return Drawn(pictures.DrawnClasses(k), MAX_SIDE)
        case DetectedObjects(min_score, most):
            return Drawn(pictures.DrawnObjects(min_score, most), MAX_SIDE)
        case ClassMaps():
            return Drawn(pictures.DrawnMap(), MAX_SIDE)
        case Transcripts():
            return Drawn(pictures.DrawnText(), MAX_SIDE)
        case LocatedKeypoints(min_score):
            return Drawn(pictures.DrawnKeypoints(min_score), MAX_SIDE)
        case MadeImages(max_bytes):
            return pictures.MadeImage(max_bytes)
    raise InvalidArgument("accept", "application/json, as no picture shows an embedding", pictures.PNG)


class Likeliest(NamedTuple):
    """Renders classifications."""

    k: int

    def renderer(self, task: Task) -> Render:
        """Returns what gives that of one image in JSON."""
        classification = reading_of(task, Classification)

        def render(outputs: Outputs, frame: Frame) -> bytes:
            (categories,) = classification.top(outputs, self.k)
            return to_json({"categories": [_named(classification, one.index, one.score) for one in categories]})

        return render


def _likeliest(served: Served, form: Form) -> Likeliest:
    task = task_of(served, Classification)
    return Likeliest(min(form.count("top_k") or DEFAULT_TOP_K, task.classes))


class DetectedObjects(NamedTuple):
    """Renders detections."""

    min_score: float
    most: int
    """0 for all."""

    def renderer(self, task: Detection) -> Render:
        """Returns what gives those of one image in JSON."""

        def render(outputs: Outputs, frame: Frame) -> bytes:
            (objects,) = task.objects(outputs, self.min_score)
            boxes, classes, scores = in_original(objects, frame, self.most)
            rows = zip(classes.tolist(), scores.tolist(), boxes.tolist(), strict=True)
            found = [
                {**_named(task, index, score), "box": dict(zip(SIDES, box, strict=True))} for index, score, box in rows
            ]
            return to_json({"detections": found, "height": frame.height, "width": frame.width})

        return render


def _objects(served: Served, form: Form) -> DetectedObjects:
    task_of(served, Detection)
    return DetectedObjects(form.number("min_score", 0.0), form.count("max_detections"))


class ClassMaps(NamedTuple):
    """Renders class maps as PNG files in base64."""

    has_counts: bool
    max_bytes: int

    def renderer(self, task: Task) -> Render:
        """Returns what gives that of one image in JSON. Raises ImageTooLarge where it is one too many."""
        return within(partial(self._map, reading_of(task, Segmentation)), self.max_bytes)

    def _map(self, task: Segmentation, outputs: Outputs, frame: Frame) -> bytes:
        original = frame.map_to_original(task.map_of(outputs))
        png = base64.b64encode(class_map.to_png(original, task.classes)).decode()
        fields: Json = {"height": frame.height, "width": frame.width, "png": png}
        if self.has_counts:
            counts = class_map.runs(original).counts()
            fields["counts"] = [
                {"index": index, "label": task.label(index), "pixels": pixels} for index, pixels in counts.items()
            ]
        return to_json(fields)


def _class_maps(served: Served, form: Form, max_bytes: int) -> ClassMaps:
    task_of(served, Segmentation)
    return ClassMaps(form.flag("pixel_counts"), max_bytes)


class MadeImages(NamedTuple):
    """Renders images as PNG files in base64."""

    max_bytes: int

    def renderer(self, task: ImageToImage) -> Render:
        """Returns what gives that of one image in JSON. Raises ImageTooLarge where it is one too many."""

        def render(outputs: Outputs, frame: Frame) -> bytes:
            height, width, file = to_png(outputs[0][0], task.color, frame)
            return to_json({"height": height, "width": width, "png": base64.b64encode(file).decode()})

        return within(render, self.max_bytes)


def _made(served: Served, form: Form, max_bytes: int) -> MadeImages:
    task_of(served, ImageToImage)
    return MadeImages(max_bytes)


class Vectors(NamedTuple):
    """Renders embeddings."""

    def renderer(self, task: Task) -> Render:
        """Returns what gives that of one image in JSON."""
        place = reading_of(task, Embedding).at
        return lambda outputs, frame: b'{"values":[%b]}' % listed(outputs[place][0])


def _vectors(served: Served, form: Form) -> Vectors:
    task_of(served, Embedding)
    return Vectors()


class Transcripts(NamedTuple):
    """Renders sequences."""

    def renderer(self, task: Task) -> Render:
        """Returns what gives that of one image in JSON."""
        sequence = reading_of(task, ClassSequence)

        def render(outputs: Outputs, frame: Frame) -> bytes:
            (found,) = sequence.transcripts(outputs)
            categories = [_named(sequence, one.index, one.score) for one in found.categories]
            return to_json({"text": found.text, "score": _number(found.score), "categories": categories})

        return render


def _sequences(served: Served, form: Form) -> Transcripts:
    task_of(served, ClassSequence)
    return Transcripts()


class LocatedKeypoints(NamedTuple):
    """Renders keypoints."""

    min_score: float

    def renderer(self, task: Task) -> Render:
        """Returns what gives those of one image in JSON."""
        keypoints = reading_of(task, Keypoints)

        def render(outputs: Outputs, frame: Frame) -> bytes:
            (points,) = keypoints.points(outputs)
            found = [
                {
                    **_named(keypoints, one.index, math.nan if one.score is None else one.score),
                    **{"x": _number(one.x), "y": _number(one.y)},
                }
                for one in located(keypoints, points, frame, self.min_score)
            ]
            return to_json({"keypoints": found, "height": frame.height, "width": frame.width})

        return render


def _keypoints(served: Served, form: Form) -> LocatedKeypoints:
    task_of(served, Keypoints)
    return LocatedKeypoints(form.number("min_score", 0.0))


def _named(task: WithClasses, index: int, score: float) -> Json:
    return {"index": index, "label": task.label(index), "score": _number(score)}


def _number(score: float) -> float | None:
    return score if math.isfinite(score) else None
