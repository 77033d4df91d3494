from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from xlaserve.config import Color, Fit
from xlaserve.images.frame import Frame, place, whole
from xlaserve.models.likeness import OfImage, can_compare, likeness
from xlaserve.models.task import (
    Classification,
    ClassSequence,
    Detection,
    Embedding,
    ImageToImage,
    Keypoints,
    Regression,
    Segmentation,
    Tensors,
    TensorSpec,
)
from xlaserve.telemetry.findings import Likeness

SIDE = 8
FRAME = whole(SIDE, SIDE)


def answer(*outputs: Any, frame: Frame = FRAME, dtype: Any = np.float32) -> OfImage:
    return OfImage(tuple(np.array([output], dtype) for output in outputs), frame)


def detected(*objects: tuple[tuple[float, float, float, float], int, float], frame: Frame = FRAME) -> OfImage:
    """Objects of a box, a class and a score, as a detector of three at most gives them."""
    padded = [*objects, *[((0, 0, 0, 0), -1, 0)] * (3 - len(objects))]
    boxes, classes, scores = zip(*padded, strict=True)
    floats = [np.array([values], np.float32) for values in (boxes, scores)]
    integers = [np.array([values], np.int32) for values in (classes, len(objects))]
    return OfImage((*floats, *integers), frame)


@pytest.mark.parametrize(
    ("wanted", "got", "expected"),
    [
        ([0.5, 0.25, 0.25], [0.75, 0.125, 0.125], Likeness(1.0, None, 0.25)),
        ([0.5, 0.25, 0.25], [0.25, 0.5, 0.25], Likeness(0.0, None, 0.25)),
        ([0.5, 0.25, 0.25], [1.0, 0.0], Likeness(1.0, None, None)),
        ([0.5, 0.25, 0.25], [np.nan, 0.0, 0.0], Likeness(1.0, None, None)),
    ],
)
def test_classifications_agree_in_the_likeliest_class(wanted: Any, got: Any, expected: Likeness) -> None:
    assert likeness(Classification(3), answer(wanted), answer(got)) == expected


def test_sequences_agree_where_their_text_is_the_same() -> None:
    task = ClassSequence(3, steps=3)
    paths = ([0, 2, 1], [0, 0, 1], [0, 1, 0])
    wanted, same, other = (answer(np.eye(3, dtype=np.float32)[path]) for path in paths)
    assert can_compare(task, ClassSequence(3, steps=4))
    assert likeness(task, wanted, same) == Likeness(1.0, None, 1.0)
    assert likeness(task, wanted, other) == Likeness(0.0, None, 1.0)


@pytest.mark.parametrize(
    ("got", "expected"),
    [
        ([[1, 1, 0.5], [6, 6, 0.25]], Likeness(1.0, None, 0.0)),
        ([[1.25, 1, 0.5], [6, 7, 0.75]], Likeness(0.5, None, 0.5)),
        ([[1, 1], [6, 6]], Likeness(1.0, None, None)),
        ([[np.nan, 1, 0.5], [6, 6, 0.25]], Likeness(0.5, None, 0.0)),
    ],
)
def test_keypoints_agree_that_are_at_the_same_place(got: Any, expected: Likeness) -> None:
    task = Keypoints(2, has_scores=True)
    assert can_compare(task, Keypoints(2))
    assert not can_compare(task, Keypoints(3))
    assert likeness(task, answer([[1, 1, 0.5], [6, 6, 0.25]]), answer(got)) == expected


DETECTION = Detection(5, max_detections=3)
CAT = ((0.0, 0.0, 4.0, 4.0), 1, 0.75)
DOG = ((4.0, 4.0, 8.0, 8.0), 2, 0.5)


@pytest.mark.parametrize(
    ("wanted", "got", "expected"),
    [
        ([CAT, DOG], [CAT, DOG], Likeness(1.0, 1.0, 0.0)),
        ([], [], Likeness(1.0, None, None)),
        ([CAT], [], Likeness(0.0, None, None)),
        ([], [CAT], Likeness(0.0, None, None)),
        ([CAT, DOG], [((0, 0, 4, 3), 1, 0.5)], Likeness(2 / 3, 0.75, 0.25)),
        ([CAT], [((0, 0, 4, 4), 2, 0.75)], Likeness(0.0, None, None)),
        ([CAT], [((0, 0, 4, 1.5), 1, 0.75)], Likeness(0.0, None, None)),
        ([CAT, CAT], [CAT], Likeness(2 / 3, 1.0, 0.0)),
        ([CAT], [((0, 0, 4, 2), 1, 0.5), CAT], Likeness(2 / 3, 1.0, 0.0)),
    ],
)
def test_objects_agree_that_have_a_class_and_half_of_their_boxes_in_common(
    wanted: Any, got: Any, expected: Likeness
) -> None:
    assert likeness(DETECTION, detected(*wanted), detected(*got)) == pytest.approx(expected)


def test_boxes_of_inputs_of_other_sizes_are_compared_in_the_original() -> None:
    other = place(SIDE, SIDE, input_height=16, input_width=32, fit=Fit.RESIZE)
    assert likeness(DETECTION, detected(CAT), detected(((0, 0, 16, 8), 1, 0.75), frame=other)) == (1.0, 1.0, 0.0)


def test_class_maps_agree_pixel_by_pixel() -> None:
    wanted = [[0, 0], [1, 1]]
    assert likeness(Segmentation(3), answer(wanted, dtype=np.uint8), answer(wanted, dtype=np.uint8)) == (1.0, 1.0, None)
    found = likeness(Segmentation(3), answer(wanted, dtype=np.uint8), answer([[0, 2], [1, 1]], dtype=np.uint8))
    assert found == pytest.approx(Likeness(0.75, (1 / 2 + 1 + 0) / 3, None))


def test_class_maps_of_inputs_of_other_sizes_are_compared_in_the_original() -> None:
    wanted = answer([[0, 1], [2, 3]], frame=whole(2, 2), dtype=np.uint8)
    twice = place(2, 2, input_height=4, input_width=4, fit=Fit.RESIZE)
    got = answer(np.kron([[0, 1], [2, 3]], np.ones((2, 2))), frame=twice, dtype=np.int32)
    assert likeness(Segmentation(4), wanted, got) == (1.0, 1.0, None)


IMAGE = ImageToImage(Color.GREY)


def test_images_agree_in_the_levels_that_are_the_same_but_for_rounding() -> None:
    wanted = answer([[[0], [100]], [[200], [255]]], dtype=np.uint8)
    assert likeness(IMAGE, wanted, wanted) == Likeness(1.0, None, 0.0)
    assert likeness(IMAGE, wanted, answer([[[1], [99]], [[202], [0]]], dtype=np.uint8)) == Likeness(0.5, None, 255.0)


def test_images_of_other_sizes_are_compared_in_the_original() -> None:
    levels = np.array([[[0], [100]], [[200], [255]]], np.uint8)
    wanted = answer(levels, frame=whole(2, 2), dtype=np.uint8)
    got = answer(levels.repeat(2, axis=0).repeat(2, axis=1), frame=whole(2, 2), dtype=np.uint8)
    assert likeness(IMAGE, wanted, got) == Likeness(1.0, None, 0.0)


@pytest.mark.parametrize(
    ("wanted", "got", "expected"),
    [
        ([3.0, 4.0], [6.0, 8.0], Likeness(1.0, None, 4.0)),
        ([1.0, 0.0], [0.0, 1.0], Likeness(0.0, None, 1.0)),
        ([1.0, 0.0], [-1.0, 0.0], Likeness(0.0, None, 2.0)),
        ([0.0, 0.0], [0.0, 0.0], Likeness(1.0, None, 0.0)),
        ([0.0, 0.0], [1.0, 0.0], Likeness(0.0, None, 1.0)),
        ([1.0, 0.0], [np.nan, 0.0], Likeness(0.0, None, None)),
    ],
)
def test_vectors_agree_by_their_cosine(wanted: Any, got: Any, expected: Likeness) -> None:
    assert likeness(Embedding(2), answer(wanted), answer(got)) == pytest.approx(expected)


def test_other_tasks_and_vectors_of_other_lengths_cannot_be_compared() -> None:
    assert can_compare(Classification(3), Classification(4))
    assert can_compare(Embedding(2), Embedding(2))
    assert not can_compare(Embedding(2), Embedding(3))
    assert not can_compare(Classification(3), Segmentation(3))
    assert can_compare(IMAGE, ImageToImage(Color.GREY, (8, 8)))
    assert not can_compare(IMAGE, ImageToImage(Color.RGB))


TENSORS = Tensors((TensorSpec("numbers", "FP32", (-1, 2)), TensorSpec("flags", "BOOL", (-1, 2))))


@pytest.mark.parametrize(
    ("numbers", "flags", "expected"),
    [
        ([100.0, 1.0], [True, False], Likeness(1.0, None, 0.0)),
        ([100.0625, 1.0], [True, False], Likeness(1.0, None, 0.0625)),
        ([101.0, 1.0], [True, True], Likeness(0.5, None, 1.0)),
        ([1.0, 1.0, 1.0], [True, False], Likeness(0.5, None, None)),
    ],
)
def test_tensors_agree_in_the_elements_that_are_alike(numbers: Any, flags: Any, expected: Likeness) -> None:
    wanted = OfImage((np.array([[100.0, 1.0]], np.float32), np.array([[True, False]])), FRAME)
    got = OfImage((np.array([numbers], np.float32), np.array([flags])), FRAME)
    assert likeness(TENSORS, wanted, got) == expected


def test_tensors_and_regressions_are_compared_with_the_same_outputs_alone() -> None:
    other = Tensors((TensorSpec("numbers", "FP32", (-1, 3)),))
    assert can_compare(TENSORS, TENSORS)
    assert not can_compare(TENSORS, other)
    assert can_compare(Regression(2), Regression(2, (("x", "m"), ("y", "m"))))
    assert not can_compare(Regression(2), Regression(3))
