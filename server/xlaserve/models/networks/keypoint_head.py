"""The heads for keypoints: those that a network gives as numbers, and the peaks of heatmaps."""

from __future__ import annotations

from collections.abc import Mapping

import tensorflow as tf

from xlaserve.config import ModelSettings
from xlaserve.errors import ModelFailed
from xlaserve.models import class_names
from xlaserve.models.networks.heads import AS_TENSORS, Head, Raw, TensorShape, activated, pick
from xlaserve.models.task import Keypoints


def keypoints(outputs: Mapping[str, TensorShape], settings: ModelSettings) -> Head:
    """Returns the head for `[n, k, 2]`, `[n, k, 3]` with scores, either with a 1 behind n, or one row `[n, 2 k]`; or
    for heatmaps `[n, height, width, k]`.

    Raises ModelFailed for other outputs.
    """
    name, points = pick(outputs, settings, "keypoints")
    if settings.activation == "softmax":
        raise ModelFailed(
            "activation: expected sigmoid or none, as scores of keypoints are independent, got softmax; write"
            " activation: sigmoid"
        )
    match points.shape:
        case (_, int(count), 2 | 3 as numbers) | (_, 1, int(count), 2 | 3 as numbers):
            return _listed(name, count, numbers, settings)
        case (_, int(length)):
            each = _numbers(length, settings)
            return _listed(name, length // each, each, settings)
        case (_, _, _, int(count)):
            return _peaks(name, count, settings)
    raise ModelFailed(
        "source: expected an output of keypoints [None, k, 2 or 3], [None, 2 k], or of heatmaps"
        f" [None, height, width, k], got {points}; {AS_TENSORS}"
    )


def are_maps(output: TensorShape) -> bool:
    """Returns whether an output, if it is keypoints, is heatmaps."""
    match output.shape:
        case (_, 1, _, 2 | 3):
            return False
    return True


def _numbers(length: int, settings: ModelSettings) -> int:
    """Returns how many of a row's numbers are of one keypoint: 3 where the labels say so, else 2."""
    labels = 0 if settings.labels is None else len(class_names.named(settings.labels))
    if length == 3 * labels:
        return 3
    if length % 2:
        raise ModelFailed(
            f"source: expected two numbers for each keypoint, got {length}; with scores, name the keypoints: labels:"
            f" [nose, left eye, ...]; or {AS_TENSORS}"
        )
    return 2


def _listed(name: str, count: int, numbers: int, settings: ModelSettings) -> Head:
    """Returns the head for `numbers` of each keypoint: two for its place, and perhaps its score."""
    how = settings.keypoint_format or "xy"

    def finish(raw: Raw, images: tf.Tensor) -> tuple[tf.Tensor, ...]:
        values = tf.reshape(tf.cast(raw[name], tf.float32), (-1, count, numbers))
        places = values[..., :2] if how.endswith("xy") else values[..., 1::-1]
        if how.startswith("rel_"):
            places *= tf.constant([images.shape[2], images.shape[1]], tf.float32)
        return (tf.concat((places, activated(values[..., 2:], settings)), axis=-1),)

    return Head(Keypoints(count, has_scores=numbers == 3), finish)


def _peaks(name: str, count: int, settings: ModelSettings) -> Head:
    """Returns the head for heatmaps: the centre of each one's highest cell, and its value."""

    def finish(raw: Raw, images: tf.Tensor) -> tuple[tf.Tensor, ...]:
        maps = activated(raw[name], settings)
        height, width = tf.shape(maps)[1], tf.shape(maps)[2]
        cells = tf.reshape(maps, (-1, height * width, count))
        peaks = tf.argmax(cells, axis=1, output_type=tf.int32)
        places = (
            (tf.cast(cell, tf.float32) + 0.5) * (pixels / tf.cast(cells, tf.float32))
            for cell, pixels, cells in (
                (peaks % width, images.shape[2], width),
                (peaks // width, images.shape[1], height),
            )
        )
        return (tf.stack((*places, tf.reduce_max(cells, axis=1)), axis=-1),)

    return Head(Keypoints(count, has_scores=True, are_peaks=True), finish)
