"""Likeness of two answers to one image, by task."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xlaserve.engine.program import Outputs
from xlaserve.engine.warmup.verify import EXACT
from xlaserve.images.frame import Frame
from xlaserve.models.task import (
    Classification,
    ClassSequence,
    Detection,
    Embedding,
    ImageToImage,
    Keypoints,
    Objects,
    Regression,
    Segmentation,
    Task,
    Tensors,
)
from xlaserve.telemetry.findings import Likeness

MIN_IOU: Final = 0.5
"""Intersection over union from which on two boxes are of the same object."""

MAX_DISTANCE: Final = 0.05
"""Distance, as a share of the image's longer side, up to which two keypoints are at the same place."""

Numbers = NDArray[Any]


class OfImage(NamedTuple):
    """One answer to an image."""

    outputs: Outputs
    """One row."""
    frame: Frame
    """The place of the image in the input of the model that answered."""


def can_compare(one: Task, other: Task) -> bool:
    """Returns whether answers to these tasks mean the same."""
    is_same_kind = type(one) is type(other)
    if isinstance(one, Embedding) and isinstance(other, Embedding):
        return one.dimensions == other.dimensions
    if isinstance(one, Keypoints) and isinstance(other, Keypoints):
        return one.classes == other.classes
    if isinstance(one, Regression) and isinstance(other, Regression):
        return one.outputs == other.outputs
    if isinstance(one, ImageToImage) and isinstance(other, ImageToImage):
        return one.color == other.color
    if isinstance(one, Tensors) and isinstance(other, Tensors):
        return one.outputs == other.outputs
    return is_same_kind


def likeness(task: Task, wanted: OfImage, got: OfImage) -> Likeness:  # noqa: PLR0911 - one each
    """Compares two answers of models with the same task. Classes are the same where their indices are."""
    match task:
        case Classification() | ClassSequence():
            agreement = task.agreement(wanted.outputs, got.outputs)
            return Likeness(agreement, difference=_largest_difference(wanted.outputs[0], got.outputs[0]))
        case Detection():
            return _of_objects(_in_original(task, wanted), _in_original(task, got))
        case Segmentation():
            ours, theirs = _same_size(wanted, got)
            return Likeness(task.agreement((ours,), (theirs,)), _mean_iou(ours, theirs))
        case Keypoints():
            return _of_keypoints(wanted, got)
        case ImageToImage():
            return _of_levels(*_same_size(wanted, got), task.rounding)
        case Embedding():
            return _of_vectors(wanted.outputs[0][0], got.outputs[0][0])
        case Regression() | Tensors():
            return _of_tensors(wanted.outputs, got.outputs)


def _in_original(task: Detection, answer: OfImage) -> Objects:
    (objects,) = task.objects(answer.outputs)
    return objects._replace(boxes=answer.frame.to_original(objects.boxes))


def _of_objects(wanted: Objects, got: Objects) -> Likeness:
    """Matches objects of the same class, each at most once, those with the highest scores first."""
    overlaps = _ious(wanted.boxes, got.boxes)
    overlaps[wanted.classes[:, None] != got.classes] = 0.0
    ious, differences = [], []
    for row, overlap in enumerate(overlaps):
        if overlap.size and overlap[best := int(overlap.argmax())] >= MIN_IOU:
            ious.append(float(overlap[best]))
            differences.append(abs(float(wanted.scores[row]) - float(got.scores[best])))
            overlaps[:, best] = 0.0
    objects = len(wanted.boxes) + len(got.boxes)
    agreement = 2 * len(ious) / objects if objects else 1.0
    return Likeness(agreement, float(np.mean(ious)) if ious else None, max(differences, default=None))


def _ious(ours: Numbers, theirs: Numbers) -> NDArray[np.float64]:
    """Returns the intersection over union of each of `[n, 4]` boxes with each of `[m, 4]`, `[n, m]`."""
    low = np.maximum(ours[:, None, :2], theirs[None, :, :2])
    high = np.minimum(ours[:, None, 2:], theirs[None, :, 2:])
    shared = np.clip(high - low, 0, None).prod(axis=2, dtype=np.float64)
    areas = [(boxes[:, 2:] - boxes[:, :2]).prod(axis=1, dtype=np.float64) for boxes in (ours, theirs)]
    union = areas[0][:, None] + areas[1] - shared
    ious: NDArray[np.float64] = np.divide(shared, union, out=np.zeros_like(shared), where=union > 0)
    return ious


def _of_keypoints(wanted: OfImage, got: OfImage) -> Likeness:
    """Returns the share of keypoints at the same place, and the largest difference of two scores."""
    ours, theirs = wanted.outputs[0][0], got.outputs[0][0]
    places = [one.frame.points_to_original(one.outputs[0][0][:, :2]) for one in (wanted, got)]
    distances = np.linalg.norm(places[0] - places[1], axis=1)
    are_same = distances <= MAX_DISTANCE * max(wanted.frame.height, wanted.frame.width)
    has_scores = ours.shape[1] == theirs.shape[1] == 3
    return Likeness(
        float(np.mean(are_same)), difference=_largest_difference(ours[:, 2], theirs[:, 2]) if has_scores else None
    )


def _same_size(wanted: OfImage, got: OfImage) -> tuple[Numbers, Numbers]:
    """Returns two class maps or images of the same pixels: the input's, or the original's where the inputs differ."""
    ours, theirs = wanted.outputs[0][0], got.outputs[0][0]
    if wanted.frame == got.frame and ours.shape == theirs.shape:
        return ours, theirs
    return wanted.frame.map_to_original(ours), got.frame.map_to_original(theirs)


def _of_levels(wanted: Numbers, got: Numbers, rounding: float) -> Likeness:
    """Returns the share of the levels that are alike: equal, but for rounding."""
    apart = np.abs(wanted.astype(np.int16) - got)
    return Likeness(float(np.mean(apart <= rounding)), difference=float(apart.max()))


def _mean_iou(wanted: Numbers, got: Numbers) -> float:
    """Returns the mean over the classes that are in either map."""
    classes = int(max(wanted.max(), got.max())) + 1
    shared, ours, theirs = (
        np.bincount(pixels, minlength=classes) for pixels in (wanted[wanted == got], wanted.ravel(), got.ravel())
    )
    union = ours + theirs - shared
    return float(np.mean(shared[union > 0] / union[union > 0]))


def _of_vectors(wanted: Numbers, got: Numbers) -> Likeness:
    ours, theirs = wanted.astype(np.float64), got.astype(np.float64)
    lengths = float(np.linalg.norm(ours) * np.linalg.norm(theirs))
    cosine = float(ours @ theirs) / lengths if lengths else float(np.array_equal(ours, theirs))
    return Likeness(min(max(0.0, cosine), 1.0), difference=_largest_difference(wanted, got))  # NaN becomes 0


def _of_tensors(wanted: Outputs, got: Outputs) -> Likeness:
    """Returns the mean share of elements that are alike in each output: equal, or floats that rounding sets apart."""
    agreements, differences = [], []
    for theirs, ours in zip(wanted, got, strict=True):
        if theirs.shape != ours.shape:
            agreements.append(0.0)
        elif theirs.dtype.kind == "f":
            largest = float(np.max(np.abs(theirs), initial=0.0, where=np.isfinite(theirs)))
            agreements.append(float(np.mean(np.isclose(theirs, ours, rtol=0, atol=EXACT * largest, equal_nan=True))))
            differences.append(_largest_difference(theirs, ours))
        else:
            agreements.append(float(np.mean(theirs == ours)))
    known = [difference for difference in differences if difference is not None]
    return Likeness(float(np.mean(agreements)), difference=max(known, default=None))


def _largest_difference(wanted: Numbers, got: Numbers) -> float | None:
    if wanted.shape != got.shape:
        return None
    largest = float(np.max(np.abs(wanted - got), initial=0.0))
    return largest if np.isfinite(largest) else None
