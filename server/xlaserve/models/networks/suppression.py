"""Bounding boxes inside the compiled program: their formats, and non-maximum suppression."""

from __future__ import annotations

from typing import Final

import tensorflow as tf

from xlaserve.config import BoxFormat

CANDIDATES: Final = 1000
"""Boxes with the highest scores that suppression looks at, as in the RetinaNet paper (Lin et al. 2017, section 4.1)."""
PADDING_CLASS: Final = -1
_FAR: Final = 1e6
"""Pixels from the image beyond which no side lies, so that areas are numbers."""


def to_xyxy(boxes: tf.Tensor, how: BoxFormat, images: tf.Tensor) -> tf.Tensor:
    """Returns `boxes` `[n, k, 4]` as left, top, right, bottom in pixels of `images` `[n, height, width, channels]`.

    They may go beyond the images; what is not a number becomes 0.
    """
    a, b, c, d = tf.unstack(tf.cast(boxes, tf.float32), axis=-1)
    match how.removeprefix("rel_"):
        case "xyxy":
            sides = a, b, c, d
        case "yxyx":
            sides = b, a, d, c
        case "xywh":
            sides = a, b, a + c, b + d
        case "center_xywh":
            sides = a - c / 2, b - d / 2, a + c / 2, b + d / 2
    stacked = tf.stack(sides, axis=-1)
    if how.startswith("rel_"):
        stacked *= _limits(images)
    return tf.where(tf.math.is_nan(stacked), 0.0, tf.clip_by_value(stacked, -_FAR, _FAR))


def cut(boxes: tf.Tensor, images: tf.Tensor) -> tf.Tensor:
    """Returns the parts of `boxes`, as `to_xyxy` gives them, that lie within the images."""
    return tf.clip_by_value(boxes, 0.0, _limits(images))


def _limits(images: tf.Tensor) -> tf.Tensor:
    height, width = images.shape[1], images.shape[2]
    return tf.constant([width, height, width, height], tf.float32)


def suppress(
    boxes: tf.Tensor,
    scores: tf.Tensor,
    images: tf.Tensor,
    *,
    max_detections: int,
    score_threshold: float,
    iou_threshold: float,
    across_classes: bool = False,
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor]:
    """Returns the outputs of `task.Detection`: boxes, scores, classes and count.

    `boxes` `[n, k, 4]` are as `to_xyxy` gives them; `scores` `[n, k, classes]` are probabilities, and a box has the
    class of its highest one. A box goes where it is empty, where its score is not above `score_threshold`, or where it
    overlaps one of a higher score by more than `iou_threshold`: one of the same class, or any with `across_classes`.
    Overlaps are those of whole boxes, as KerasCV and KerasHub have it. What remains is cut to `images`, and goes where
    nothing of it is left.
    """
    classes = tf.argmax(scores, axis=-1, output_type=tf.int32)
    scores = tf.where(_is_empty(boxes), 0.0, tf.reduce_max(scores, axis=-1))
    scores, order = tf.math.top_k(scores, min(CANDIDATES, boxes.shape[1]))
    boxes = tf.gather(boxes, order, batch_dims=1)
    classes = tf.gather(classes, order, batch_dims=1)
    overlaps = _overlap(boxes, iou_threshold)
    if not across_classes:
        overlaps &= classes[:, :, tf.newaxis] == classes[:, tf.newaxis]
    boxes = cut(boxes, images)
    kept = _unsuppressed(overlaps, scores > score_threshold) & ~_is_empty(boxes)
    missing = max(0, max_detections - boxes.shape[1])
    scores, chosen = tf.math.top_k(tf.where(kept, scores, 0.0), max_detections - missing)
    boxes, classes = (tf.gather(values, chosen, batch_dims=1) for values in (boxes, classes))
    return padded(
        tf.pad(boxes, [[0, 0], [0, missing], [0, 0]]),
        tf.pad(scores, [[0, 0], [0, missing]]),
        tf.pad(classes, [[0, 0], [0, missing]]),
        tf.minimum(tf.reduce_sum(tf.cast(kept, tf.int32), axis=1), max_detections),
    )


def _is_empty(boxes: tf.Tensor) -> tf.Tensor:
    return tf.reduce_any(boxes[..., 2:] <= boxes[..., :2], axis=-1)


def _overlap(boxes: tf.Tensor, iou_threshold: float) -> tf.Tensor:
    """Returns which of `boxes` `[n, k, 4]` overlap by more than `iou_threshold`, `[n, k, k]`."""
    left, top, right, bottom = tf.unstack(boxes, axis=-1)

    def shared(starts: tf.Tensor, ends: tf.Tensor) -> tf.Tensor:
        last_start = tf.maximum(starts[:, :, tf.newaxis], starts[:, tf.newaxis])
        return tf.nn.relu(tf.minimum(ends[:, :, tf.newaxis], ends[:, tf.newaxis]) - last_start)

    intersections = shared(left, right) * shared(top, bottom)
    # IoU > t, where the union is what both areas have together less the intersection.
    areas = (right - left) * (bottom - top) * (iou_threshold / (1 + iou_threshold))
    return intersections > areas[:, :, tf.newaxis] + areas[:, tf.newaxis]


def _unsuppressed(overlaps: tf.Tensor, candidates: tf.Tensor) -> tf.Tensor:
    """Returns which of `candidates` `[n, k]`, the best first, overlap no better one that is kept, `[n, k]`."""
    places = tf.range(overlaps.shape[1])
    hidden_by = overlaps & (places[tf.newaxis] < places[:, tf.newaxis])

    def step(kept: tf.Tensor, _: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        # After one step the best candidate is settled, after the next all that only it can suppress, and so on.
        left = candidates & ~tf.reduce_any(hidden_by & kept[:, tf.newaxis], axis=2)
        return left, tf.reduce_any(left != kept)

    kept, _ = tf.while_loop(lambda _, has_changed: has_changed, step, (candidates, tf.constant(True)))
    return kept


def padded(
    boxes: tf.Tensor, scores: tf.Tensor, classes: tf.Tensor, count: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor]:
    """Returns the outputs with boxes and scores of 0 and PADDING_CLASS behind the first `count` of each image."""
    is_object = tf.sequence_mask(count, boxes.shape[1])
    return (
        tf.where(is_object[..., tf.newaxis], boxes, 0.0),
        tf.where(is_object, scores, 0.0),
        tf.where(is_object, classes, PADDING_CLASS),
        count,
    )
