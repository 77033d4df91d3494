"""How good detectors and segmenters are, by the field's measures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Box = tuple[float, float, float, float]
"""x_min, y_min, x_max, y_max."""


class Truth(NamedTuple):
    image: int
    label: str
    box: Box


class Found(NamedTuple):
    image: int
    label: str
    box: Box
    score: float


def iou(one: Box, other: Box) -> float:
    """Intersection over union."""
    width = min(one[2], other[2]) - max(one[0], other[0])
    height = min(one[3], other[3]) - max(one[1], other[1])
    if width <= 0 or height <= 0:
        return 0.0
    areas = [(box[2] - box[0]) * (box[3] - box[1]) for box in (one, other)]
    return width * height / (sum(areas) - width * height)


def average_precision(found: Sequence[Found], truths: Sequence[Truth], threshold: float = 0.5) -> float:
    """The area under the precision-recall curve of one label, precision made monotonic, as in Pascal VOC since 2010.

    Each truth is found once at most: by the highest score that overlaps it best, by `threshold` or more.
    """
    left: dict[int, list[Box]] = {}
    for truth in truths:
        left.setdefault(truth.image, []).append(truth.box)
    hits = []
    for guess in sorted(found, key=lambda guess: -guess.score):
        boxes = left.get(guess.image, [])
        overlaps = [iou(guess.box, box) for box in boxes]
        best = int(np.argmax(overlaps)) if overlaps else -1
        hits.append(best >= 0 and overlaps[best] >= threshold)
        if hits[-1]:
            del boxes[best]
    right = np.cumsum(hits)
    precision = right / np.arange(1, len(hits) + 1)
    best_from_here = np.maximum.accumulate(precision[::-1])[::-1]
    return float(best_from_here[np.array(hits, bool)].sum() / len(truths))


def mean_average_precision(
    found: Sequence[Found], truths: Sequence[Truth], threshold: float = 0.5
) -> Mapping[str, float]:
    """The average precision of each label in `truths`, and their mean as `mean`."""
    labels = sorted({truth.label for truth in truths})
    by_label = {
        label: average_precision(
            [guess for guess in found if guess.label == label],
            [truth for truth in truths if truth.label == label],
            threshold,
        )
        for label in labels
    }
    return {**by_label, "mean": float(np.mean(list(by_label.values())))}


class Confusion:
    """Pixels by their true and their given class."""

    def __init__(self, classes: int) -> None:
        self.pixels = np.zeros((classes, classes), np.int64)

    def add(self, truth: NDArray[np.uint8], given: NDArray[np.uint8]) -> None:
        assert truth.shape == given.shape
        classes = len(self.pixels)
        pairs = truth.astype(np.int64).ravel() * classes + given.ravel()
        self.pixels += np.bincount(pairs, minlength=classes**2).reshape(classes, classes)

    @property
    def mean_iou(self) -> float:
        """The mean over all classes of intersection over union."""
        right = np.diag(self.pixels)
        return float(np.mean(right / (self.pixels.sum(axis=0) + self.pixels.sum(axis=1) - right)))
