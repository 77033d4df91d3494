from __future__ import annotations

import numpy as np
import pytest
from tests.scoring import Box, Confusion, Found, Truth, average_precision, iou, mean_average_precision

UNIT: Box = (0, 0, 10, 10)
FAR: Box = (50, 50, 60, 60)


@pytest.mark.parametrize(
    ("other", "expected"),
    [(UNIT, 1.0), (FAR, 0.0), ((0, 5, 10, 15), 1 / 3), ((5, 5, 15, 15), 25 / 175), ((10, 0, 20, 10), 0.0)],
)
def test_intersection_over_union(other: Box, expected: float) -> None:
    assert iou(UNIT, other) == pytest.approx(expected)
    assert iou(other, UNIT) == pytest.approx(expected)


def test_finding_everything_and_nothing_else_is_perfect() -> None:
    truths = [Truth(0, "a", UNIT), Truth(0, "a", FAR), Truth(1, "a", UNIT)]
    assert average_precision([Found(*truth, 0.5) for truth in truths], truths) == 1.0


def test_finding_nothing_is_worth_nothing() -> None:
    assert average_precision([], [Truth(0, "a", UNIT)]) == 0.0


def test_a_truth_counts_once_and_in_its_own_image_only() -> None:
    truths = [Truth(0, "a", UNIT), Truth(1, "a", FAR)]
    twice = [Found(0, "a", UNIT, 0.9), Found(0, "a", UNIT, 0.8), Found(1, "a", FAR, 0.7), Found(1, "a", UNIT, 0.6)]
    # Hits are the first and the third guess: precision 1 at recall 1/2, 2/3 at recall 1.
    assert average_precision(twice, truths) == pytest.approx((1 + 2 / 3) / 2)


def test_precision_is_the_best_at_that_recall_or_beyond() -> None:
    truths = [Truth(image, "a", UNIT) for image in range(3)]
    guesses = [Found(0, "a", FAR, 0.9), Found(0, "a", UNIT, 0.8), Found(1, "a", UNIT, 0.7)]
    # Precision 1/2 and then 2/3, of which the first recall takes the better; the third truth is never found.
    assert average_precision(guesses, truths) == pytest.approx((2 / 3 + 2 / 3) / 3)


def test_a_box_that_overlaps_too_little_is_wrong() -> None:
    half = [Found(0, "a", (0, 0, 10, 4.9), 0.9)]
    assert average_precision(half, [Truth(0, "a", UNIT)]) == 0.0
    assert average_precision(half, [Truth(0, "a", UNIT)], threshold=0.4) == 1.0


def test_the_mean_is_over_labels_however_many_each_has() -> None:
    truths = [Truth(0, "a", UNIT), Truth(1, "a", UNIT), Truth(2, "b", UNIT)]
    found = [Found(0, "a", UNIT, 0.9), Found(1, "b", UNIT, 0.9)]
    assert mean_average_precision(found, truths) == {"a": 0.5, "b": 0.0, "mean": 0.25}


def test_mean_iou_weighs_classes_alike() -> None:
    confusion = Confusion(2)
    confusion.add(np.array([[0, 0, 0, 1]], np.uint8), np.array([[0, 0, 1, 1]], np.uint8))
    assert confusion.mean_iou == pytest.approx((2 / 3 + 1 / 2) / 2)
    confusion.add(np.array([[1]], np.uint8), np.array([[1]], np.uint8))
    assert confusion.mean_iou == pytest.approx((2 / 3 + 2 / 3) / 2)
