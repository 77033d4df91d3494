"""The heads for detection: boxes that are still to be suppressed, and those that a network has suppressed itself."""

from __future__ import annotations

from collections.abc import Mapping

import tensorflow as tf

from xlaserve.config import ModelSettings
from xlaserve.errors import ModelFailed
from xlaserve.models import class_names
from xlaserve.models.networks import suppression
from xlaserve.models.networks.heads import AS_TENSORS, Head, Raw, TensorShape, activated, classes_of, pick
from xlaserve.models.output_facts import OUTPUT_NAMES
from xlaserve.models.task import Detection


def detection(outputs: Mapping[str, TensorShape], settings: ModelSettings) -> Head:
    """Returns the head for boxes and scores, suppressed already or not."""
    boxes_name, boxes_shape = pick(outputs, settings, "boxes")
    scores_name, scores_shape = pick(outputs, settings, "scores")
    match boxes_shape.shape, scores_shape.shape:
        case (_, int(), 4), (_, int(), int(classes)):
            return candidates(classes, settings, boxes_name, scores_name)
        case (_, _, 4), (_, _):
            return _finished(outputs, settings, boxes_name, scores_name)
    raise ModelFailed(
        "source: expected outputs of boxes [None, k, 4] and scores [None, k, classes], or [None, k] with classes, "
        f"got {boxes_shape} and {scores_shape}; {AS_TENSORS}"
    )


def candidates(
    classes: int,
    settings: ModelSettings,
    boxes_name: str = "boxes",
    scores_name: str = "scores",
    *,
    across_classes: bool = False,
) -> Head:
    """Returns the head for boxes `[n, k, 4]` and probabilities `[n, k, classes]` that are still to be suppressed."""
    has_background = class_names.has_background(settings.labels)

    def finish(raw: Raw, images: tf.Tensor) -> tuple[tf.Tensor, ...]:
        scores = activated(raw[scores_name], settings)
        if has_background:
            scores = without_background(scores)
        found = suppression.to_xyxy(raw[boxes_name], settings.bounding_box_format, images)
        return suppressed(found, scores, images, settings, across_classes=across_classes)

    return Head(Detection(classes, max_detections=settings.max_detections), finish)


def without_background(scores: tf.Tensor) -> tf.Tensor:
    """Returns probabilities `[n, k, classes]` with 0 for the background, the first class."""
    return tf.concat([tf.zeros_like(scores[..., :1]), scores[..., 1:]], axis=-1)


def suppressed(
    found: tf.Tensor, scores: tf.Tensor, images: tf.Tensor, settings: ModelSettings, *, across_classes: bool = False
) -> tuple[tf.Tensor, ...]:
    """Returns the outputs of detection after suppression as the settings have it; see `suppression.suppress`."""
    return suppression.suppress(
        found,
        scores,
        images,
        max_detections=settings.max_detections,
        score_threshold=settings.score_threshold,
        iou_threshold=settings.iou_threshold,
        across_classes=across_classes,
    )


def _finished(outputs: Mapping[str, TensorShape], settings: ModelSettings, boxes_name: str, scores_name: str) -> Head:
    """Returns the head for detections that were suppressed before: the highest score first, padded at the end."""
    classes_name, _ = pick(outputs, settings, "classes")
    has_count = "count" in dict(settings.output_names) or any(name in outputs for name in OUTPUT_NAMES["count"])
    count_name = pick(outputs, settings, "count")[0] if has_count else None
    task = Detection(classes_of(settings), max_detections=settings.max_detections)

    def finish(raw: Raw, images: tf.Tensor) -> tuple[tf.Tensor, ...]:
        found = suppression.cut(suppression.to_xyxy(raw[boxes_name], settings.bounding_box_format, images), images)
        scores = _fit(activated(raw[scores_name], settings), task.max_detections)
        is_object = scores > settings.score_threshold
        if count_name is not None:
            given = tf.reshape(tf.cast(raw[count_name], tf.int32), (-1,))
            is_object &= tf.sequence_mask(given, task.max_detections)
        return suppression.padded(
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
