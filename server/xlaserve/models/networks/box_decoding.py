"""The head for detectors that give boxes before suppression: offsets from anchors, distributions, or all in one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Final

import tensorflow as tf

from xlaserve.config import BoxDecoding, ModelSettings
from xlaserve.config.box_decoding_settings import BoxKind
from xlaserve.errors import ModelFailed
from xlaserve.models import class_names
from xlaserve.models.networks import anchors, box_doubts, suppression
from xlaserve.models.networks.detection_head import suppressed, without_background
from xlaserve.models.networks.heads import Head, Probe, Raw, TensorShape, activated, known_classes, pick
from xlaserve.models.task import Detection

IN_ONE: Final[frozenset[BoxKind]] = frozenset({"yolo", "yolox"})
"""Kinds of boxes and scores in one output."""
LOGITS: Final[frozenset[BoxKind]] = frozenset({"blazeface", "yolov8"})
"""Kinds whose scores are logits of independent classes, unless the settings name another activation."""

LEAVE_OUT: Final = "leave box_decoding out, and clients get the model's outputs as they are"

Split = Callable[[Raw], tuple[tf.Tensor, tf.Tensor]]
"""Maps a network's outputs to boxes `[n, k, numbers]` and scores `[n, k, classes]`, both as the network gives them."""


def decoded(
    outputs: Mapping[str, TensorShape],
    settings: ModelSettings,
    decoding: BoxDecoding,
    probe: Probe,
) -> Head:
    """Returns the head for the outputs that `decoding` describes. Raises ModelFailed for other outputs, and for boxes
    that `probe` gives in another form."""
    if settings.activation is None and decoding.kind in LOGITS:
        settings = settings.model_copy(update={"activation": "sigmoid"})
    outputs, join = _joined(outputs, decoding)
    classes, split = _split(outputs, settings, decoding)
    background = _background(decoding)
    is_labelled = class_names.has_background(settings.labels) and background != "last"  # and then stays a class
    is_dropped = background == "last" or (background == "first" and not is_labelled)
    task = Detection(classes - is_dropped, max_detections=settings.max_detections)
    if task.classes < 1:
        raise ModelFailed(
            f"box_decoding.background: expected none, as there is a score of {classes} class alone; write box_decoding:"
            f" {{kind: {decoding.kind}, background: none}}"
        )
    if decoding.kind in IN_ONE and (sampled := probe()) is not None:
        sample, _ = split(join({name: tf.constant(values) for name, values in sampled.outputs.items()}))
        box_doubts.check(sample.numpy(), decoding, sampled.size)

    def finish(raw: Raw, images: tf.Tensor) -> tuple[tf.Tensor, ...]:
        given, scores = split(join(raw))
        scores = activated(scores, settings)
        if decoding.gives_objectness:
            scores = activated(given[..., 4:5], settings) * scores
        if is_dropped:
            scores = scores[..., 1:] if background == "first" else scores[..., :-1]
        elif is_labelled:
            scores = without_background(scores)
        found = _boxes(tf.cast(given, tf.float32), decoding, images)
        return suppressed(found, tf.ensure_shape(scores, [None, found.shape[1], None]), images, settings)

    return Head(task, finish)


def _background(decoding: BoxDecoding) -> str:
    return decoding.background or ("first" if decoding.kind == "ssd" else "none")


def _boxes(given: tf.Tensor, decoding: BoxDecoding, images: tf.Tensor) -> tf.Tensor:
    """Returns boxes `[n, k, 4]` as left, top, right, bottom in pixels of `images`.

    Raises ModelFailed where there is not one of `given` `[n, k, numbers]` for each anchor.
    """
    if decoding.kind == "yolo":
        if given.shape[1] is None:
            raise ModelFailed(f"source: expected an output of a known number of boxes, got any number; {LEAVE_OUT}")
        return suppression.to_xyxy(given[..., :4], decoding.format, images)
    height, width = images.shape[1], images.shape[2]
    found = anchors.anchors(decoding, height, width)
    if given.shape[1] not in (None, len(found)):
        raise ModelFailed(
            f"box_decoding: expected as many anchors as the model gives boxes for {height}x{width} pixels,"
            f" {given.shape[1]}, got {len(found)}; set strides, scales and aspect_ratios as in its training, or anchors"
            " to a .npy file"
        )
    x, y, w, h = tf.unstack(tf.constant(found), axis=-1)
    given = tf.ensure_shape(given, [None, len(found), None])
    if decoding.kind == "yolov8":
        left, top, right, bottom = (distance * w for distance in _distances(given, decoding.bins))
        return suppression.to_xyxy(tf.stack((x - left, y - top, x + right, y + bottom), axis=-1), "xyxy", images)
    order = decoding.order or ("yxhw" if decoding.kind == "ssd" else "xywh")
    a, b, c, d = tf.unstack(given[..., :4], axis=-1)
    dx, dy, dw, dh = (b, a, d, c) if order == "yxhw" else (a, b, c, d)
    if decoding.kind == "blazeface":  # as MediaPipe's TensorsToDetectionsCalculator: pixels from the centre
        sides = x + dx, y + dy, dw, dh
    else:  # as in Girshick et al. 2014, appendix C, with factors
        of_x, of_y, of_w, of_h = (1.0, 1.0, 1.0, 1.0) if decoding.kind == "yolox" else decoding.variances
        sides = x + dx * of_x * w, y + dy * of_y * h, w * tf.exp(dw * of_w), h * tf.exp(dh * of_h)
    return suppression.to_xyxy(tf.stack(sides, axis=-1), "center_xywh", images)


def _distances(given: tf.Tensor, bins: int) -> list[tf.Tensor]:
    """Returns the distances of the sides from the centre in strides, the means of distributions over bins (Li et al.
    2020, Generalized Focal Loss)."""
    distributions = tf.nn.softmax(tf.reshape(given, (-1, given.shape[1], 4, bins)))
    means = tf.reduce_sum(distributions * tf.range(bins, dtype=tf.float32), axis=-1)
    return [*tf.unstack(means, axis=-1)]


def are_maps(output: TensorShape) -> bool:
    """Returns whether an output is a feature map, rather than rows of numbers."""
    match output.shape:
        case (_, _, side, _):
            return side != 1
    return False


def _joined(
    outputs: Mapping[str, TensorShape], decoding: BoxDecoding
) -> tuple[Mapping[str, TensorShape], Callable[[Raw], Raw]]:
    """Returns the outputs, those of several feature maps as one, and what joins them: the map with the most cells
    first. Outputs are of several maps where others have as many numbers for each box."""
    groups = defaultdict[int, dict[str, int]](dict)
    for name, output in outputs.items():
        match output.shape:
            case (_, int(height), int(width), int(numbers)) if are_maps(output) and decoding.kind == "yolov8":
                groups[numbers][name] = height * width
            case (_, int(rows), int(numbers)) | (_, int(rows), 1, int(numbers)):
                groups[numbers][name] = rows
    levels = {len(rows) for rows in groups.values()}
    are_distinct = all(len({*rows.values()}) == len(rows) for rows in groups.values())
    if len(levels) != 1 or levels == {1} or not are_distinct or sum(map(len, groups.values())) != len(outputs):
        return outputs, lambda raw: raw
    ordered = {numbers: sorted(rows.items(), key=lambda pair: -pair[1]) for numbers, rows in groups.items()}
    shapes = {
        rows[0][0]: TensorShape((None, sum(count for _, count in rows), numbers), outputs[rows[0][0]].dtype)
        for numbers, rows in ordered.items()
    }

    def join(raw: Raw) -> Raw:
        return {
            rows[0][0]: tf.concat([tf.reshape(raw[name], (-1, count, numbers)) for name, count in rows], axis=1)
            for numbers, rows in ordered.items()
        }

    return shapes, join


def _split(outputs: Mapping[str, TensorShape], settings: ModelSettings, decoding: BoxDecoding) -> tuple[int, Split]:
    """Returns the number of scores of each box, the background's included, and what finds boxes and scores."""
    rows = {name: shape for name, output in outputs.items() if (shape := _rows(output)) is not None}
    if not rows:
        given = "; ".join(f"{name}: {output}" for name, output in outputs.items())
        raise ModelFailed(
            f"box_decoding: expected outputs of boxes and scores [None, k, numbers], got {given}; {LEAVE_OUT}"
        )
    outputs = {name: outputs[name] for name in rows}
    if decoding.kind in IN_ONE or (decoding.kind == "yolov8" and len(rows) == 1):
        name, _ = pick(outputs, settings, "boxes")
        return _in_one(name, rows[name], settings, decoding)
    fitting = [name for name, (_, numbers) in rows.items() if _is_width(numbers, decoding)]
    of_boxes, _ = pick(outputs, settings, "boxes", fitting)
    of_scores, _ = pick(outputs, settings, "scores", [name for name in rows if name != of_boxes])
    _, numbers = rows[of_boxes]
    _, classes = rows[of_scores]
    if numbers is None or not (_is_width(numbers, decoding) or numbers >= 4):
        raise ModelFailed(
            f"source: expected an output of boxes [None, k, 4], got {of_boxes}: {outputs[of_boxes]}; {LEAVE_OUT}"
        )
    if classes is None:
        raise ModelFailed(
            f"source: expected an output of scores [None, k, classes], got {of_scores}: {outputs[of_scores]};"
            f" {LEAVE_OUT}"
        )

    def split(raw: Raw) -> tuple[tf.Tensor, tf.Tensor]:
        return _flat(raw[of_boxes]), _flat(raw[of_scores])

    return classes, split


def _rows(output: TensorShape) -> tuple[int | None, int | None] | None:
    """Returns the sides of an output `[n, k, numbers]` or `[n, k, 1, numbers]`; None for other outputs."""
    match output.shape:
        case (_, rows, numbers) | (_, rows, 1, numbers):
            return rows, numbers
    return None


def _flat(values: tf.Tensor) -> tf.Tensor:
    return values if values.shape.rank == 3 else tf.squeeze(values, axis=2)


def _is_width(numbers: int | None, decoding: BoxDecoding) -> bool:
    """Returns whether so many numbers are what a box of this kind has."""
    if decoding.kind == "blazeface":  # four of the box, and two for each of its keypoints
        return numbers is not None and numbers >= 4 and numbers % 2 == 0
    return numbers == (4 * decoding.bins if decoding.kind == "yolov8" else 4)


def _in_one(
    name: str, sides: tuple[int | None, int | None], settings: ModelSettings, decoding: BoxDecoding
) -> tuple[int, Split]:
    """Returns the same for boxes and scores in one output, of which the longer side, or the unknown one, is the
    boxes'."""
    first, last = sides
    is_first = last is None or (first is not None and first < last)
    numbers = first if is_first else last
    start = 4 * decoding.bins if decoding.kind == "yolov8" else 4 + decoding.gives_objectness
    classes = (numbers or 0) - start
    if (known := known_classes(settings)) is not None:
        if known > classes:
            raise ModelFailed(
                f"box_decoding: expected {start} numbers and {known} scores in {name}, got {numbers}; name as many"
                f" classes: {max(classes, 1)}"
            )
        classes = known  # what follows is of masks or keypoints
    if classes < 1:
        raise ModelFailed(
            f"box_decoding: expected {start} numbers and scores for each box in {name}, got {numbers}; {LEAVE_OUT}"
        )

    def split(raw: Raw) -> tuple[tf.Tensor, tf.Tensor]:
        values = _flat(raw[name])
        values = tf.transpose(values, (0, 2, 1)) if is_first else values
        return values[..., :start], values[..., start : start + classes]

    return classes, split
