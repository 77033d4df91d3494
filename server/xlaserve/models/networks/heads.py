"""Heads, the part of a compiled program that follows the network: they turn its outputs into those of a task."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple, assert_never

import tensorflow as tf

from xlaserve.config import ModelSettings, OutputRole, TaskName
from xlaserve.errors import ModelFailed
from xlaserve.models import labels
from xlaserve.models.networks import boxes
from xlaserve.models.task import Classification, Detection, Embedding, Segmentation, Task

Raw = Mapping[str, tf.Tensor]
"""A network's outputs by their names."""
Finish = Callable[[Raw, tf.Tensor], tuple[tf.Tensor, ...]]
"""Maps a network's outputs, and the images `[n, height, width, 3]` that it was given, to outputs of the task."""

OUTPUT_NAMES: Final[Mapping[OutputRole, tuple[str, ...]]] = {
    "boxes": ("boxes", "detection_boxes"),
    "scores": ("scores", "detection_scores"),
    "classes": ("classes", "detection_classes"),
    "count": ("count", "num_detections"),
}
"""Names that models give each output; the longer ones are those of TensorFlow's Object Detection API."""


class TensorShape(NamedTuple):
    """A tensor of a model as the model declares it."""

    shape: Sequence[int | None] | None
    """None is an unknown rank, or an unknown size."""
    dtype: str

    def __str__(self) -> str:
        if self.shape is None:
            return f"{self.dtype} of unknown rank"
        return f"{self.dtype} [{', '.join(str(side) for side in self.shape)}]"


class Head(NamedTuple):
    """A task, and the function that computes its outputs."""

    task: Task
    finish: Finish


def choose(outputs: Mapping[str, TensorShape], settings: ModelSettings) -> Head:
    """Returns the head for the task of the settings or, with `auto`, of the outputs' names and shapes.

    Raises ModelFailed where the outputs are not what the task needs.
    """
    match task := settings.task if settings.task != "auto" else _recognise(outputs, settings):
        case "classification":
            return _classification(outputs, settings)
        case "detection":
            return _detection(outputs, settings)
        case "segmentation":
            return _segmentation(outputs, settings)
        case "embedding":
            return _embedding(outputs, settings)
        case _:
            assert_never(task)


def _recognise(outputs: Mapping[str, TensorShape], settings: ModelSettings) -> TaskName:
    named = set(dict(settings.output_names))
    if "embedding" in named:
        return "embedding"
    if "class_map" in named:
        return "segmentation"
    if "boxes" in named or any(name in outputs for name in OUTPUT_NAMES["boxes"]):
        return "detection"
    _, output = _pick(outputs, settings, "scores")
    match output.shape:
        case (_, _):
            return "classification"
        case (_, _, _, _):
            return "segmentation"
    raise ModelFailed(
        f"source: expected an output of scores [None, classes] or [None, height, width, classes], got {output}"
    )


def _pick(outputs: Mapping[str, TensorShape], settings: ModelSettings, role: OutputRole) -> tuple[str, TensorShape]:
    """Returns the output that is to be `role`, the name of an output of the task."""
    known = "; ".join(f"{name}: {shape}" for name, shape in sorted(outputs.items()))
    name = dict(settings.output_names).get(role)
    if name is not None and name not in outputs:
        raise ModelFailed(f"output_names: expected {role} to be one of {known}, got {name}")
    if name is None:
        named = [name for name in OUTPUT_NAMES.get(role, (role,)) if name in outputs]
        candidates = named or list(outputs)
        if len(candidates) != 1:
            raise ModelFailed(f"output_names: expected the name of the output to take for {role}, of {known}")
        (name,) = candidates
    return name, outputs[name]


def _classification(outputs: Mapping[str, TensorShape], settings: ModelSettings) -> Head:
    name, scores = _pick(outputs, settings, "scores")
    match scores.shape:
        case (_, int(classes)):
            return Head(Classification(classes), lambda raw, _: (tf.cast(raw[name], tf.float32),))
    raise ModelFailed(f"source: expected an output of scores [None, classes], got {scores}")


def _embedding(outputs: Mapping[str, TensorShape], settings: ModelSettings) -> Head:
    name, vectors = _pick(outputs, settings, "embedding")
    match vectors.shape:
        case (_, int(dimensions)):
            return Head(Embedding(dimensions), lambda raw, _: (tf.cast(raw[name], tf.float32),))
    raise ModelFailed(f"source: expected an output of vectors [None, dimensions], got {vectors}")


def _segmentation(outputs: Mapping[str, TensorShape], settings: ModelSettings) -> Head:
    name, maps = _pick(outputs, settings, "class_map")
    match maps.shape:
        case (_, _, _, int(classes)) if classes > 1:
            task = Segmentation(classes)
            return Head(task, lambda raw, images: (_class_map(task, raw[name], images),))
        case (_, _, _) if "int" in maps.dtype:
            task = Segmentation(_classes(settings))
            return Head(task, lambda raw, _: (tf.cast(raw[name], _map_dtype(task)),))
    raise ModelFailed(
        "source: expected an output of scores [None, height, width, classes] of at least 2 classes, "
        f"or of whole numbers [None, height, width], got {maps}"
    )


def _map_dtype(task: Segmentation) -> tf.DType:
    return {"UINT8": tf.uint8, "INT32": tf.int32}[task.outputs[0].datatype]


def _class_map(task: Segmentation, maps: tf.Tensor, images: tf.Tensor) -> tf.Tensor:
    """Returns the likeliest class of each pixel of the images; scores of fewer pixels are enlarged."""
    maps = tf.cast(maps, tf.float32)
    if maps.shape[1:3] != images.shape[1:3]:
        maps = tf.image.resize(maps, images.shape[1:3])
    return tf.cast(tf.argmax(maps, axis=-1, output_type=tf.int32), _map_dtype(task))


def _detection(outputs: Mapping[str, TensorShape], settings: ModelSettings) -> Head:
    boxes_name, boxes_shape = _pick(outputs, settings, "boxes")
    scores_name, scores_shape = _pick(outputs, settings, "scores")
    match boxes_shape.shape, scores_shape.shape:
        case (_, int(), 4), (_, int(), int(classes)):
            return candidates(
                Detection(classes, max_detections=settings.max_detections), settings, boxes_name, scores_name
            )
        case (_, _, 4), (_, _):
            return _finished(outputs, settings, boxes_name, scores_name)
    raise ModelFailed(
        "source: expected outputs of boxes [None, k, 4] and scores [None, k, classes], or [None, k] with classes, "
        f"got {boxes_shape} and {scores_shape}"
    )


def candidates(
    task: Detection,
    settings: ModelSettings,
    boxes_name: str = "boxes",
    scores_name: str = "scores",
    *,
    across_classes: bool = False,
) -> Head:
    """Returns the head for boxes `[n, k, 4]` and probabilities `[n, k, classes]` that are still to be suppressed."""

    def finish(raw: Raw, images: tf.Tensor) -> tuple[tf.Tensor, ...]:
        return boxes.suppress(
            boxes.to_xyxy(raw[boxes_name], settings.bounding_box_format, images),
            tf.cast(raw[scores_name], tf.float32),
            images,
            max_detections=task.max_detections,
            score_threshold=settings.score_threshold,
            iou_threshold=settings.iou_threshold,
            across_classes=across_classes,
        )

    return Head(task, finish)


def _finished(outputs: Mapping[str, TensorShape], settings: ModelSettings, boxes_name: str, scores_name: str) -> Head:
    """Returns the head for detections that were suppressed before: the highest score first, padded at the end."""
    classes_name, _ = _pick(outputs, settings, "classes")
    has_count = "count" in dict(settings.output_names) or any(name in outputs for name in OUTPUT_NAMES["count"])
    count_name = _pick(outputs, settings, "count")[0] if has_count else None
    task = Detection(_classes(settings), max_detections=settings.max_detections)

    def finish(raw: Raw, images: tf.Tensor) -> tuple[tf.Tensor, ...]:
        found = boxes.cut(boxes.to_xyxy(raw[boxes_name], settings.bounding_box_format, images), images)
        scores = _fit(tf.cast(raw[scores_name], tf.float32), task.max_detections)
        is_object = scores > settings.score_threshold
        if count_name is not None:
            given = tf.reshape(tf.cast(raw[count_name], tf.int32), (-1,))
            is_object &= tf.sequence_mask(given, task.max_detections)
        return boxes.padded(
            _fit(found, task.max_detections),
            scores,
            _fit(tf.cast(raw[classes_name], tf.int32), task.max_detections),
            tf.reduce_sum(tf.cast(is_object, tf.int32), axis=1),
        )

    return Head(task, finish)


def _fit(values: tf.Tensor, length: int) -> tf.Tensor:
    """Returns `values` `[n, k, ...]` cut or padded with zeros to `[n, length, ...]`."""
    values = values[:, :length]
    missing = length - (tf.shape(values)[1] if values.shape[1] is None else values.shape[1])
    values = tf.pad(values, [[0, 0], [0, missing], *[[0, 0]] * (values.shape.rank - 2)])
    return tf.ensure_shape(values, [None, length, *values.shape[2:]])


def _classes(settings: ModelSettings) -> int:
    """Returns how many classes there are, where the outputs don't show it."""
    if settings.classes is not None:
        return settings.classes
    if settings.labels is not None:
        return len(labels.from_file(settings.labels))
    raise ModelFailed("classes: expected how many there are, as the outputs don't show it, got nothing; or set labels")
