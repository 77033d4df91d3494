from __future__ import annotations

import numpy as np
import pytest

from xlaserve.engine.program import Outputs
from xlaserve.models.task import (
    Classification,
    Detection,
    Embedding,
    Regression,
    Segmentation,
    Tensors,
    TensorSpec,
    reading_of,
)

DETECTIONS: Outputs = (
    np.array([[[1, 2, 3, 4], [5, 6, 7, 8], [0, 0, 0, 0]], [[0, 0, 0, 0]] * 3], np.float32),
    np.array([[0.75, 0.5, 0], [0, 0, 0]], np.float32),
    np.array([[1, 0, -1], [-1, -1, -1]], np.int32),
    np.array([2, 0], np.int32),
)


def test_the_likeliest_classes_come_first_and_equal_ones_by_index() -> None:
    scores = np.array([[0.1, 0.5, 0.5], [0.9, 0.0, 0.1]], np.float32)
    rows = Classification(3, ("a", "b", "c")).top((scores,), 2)
    assert [[category.label for category in row] for row in rows] == [["b", "c"], ["a", "c"]]
    assert len(Classification(3).top((scores,), 9)[0]) == 3


def test_objects_of_an_image_are_those_that_count() -> None:
    first, second = Detection(2, max_detections=3).objects(DETECTIONS)
    assert [values.tolist() for values in first] == [[[1, 2, 3, 4], [5, 6, 7, 8]], [1, 0], [0.75, 0.5]]
    assert [values.shape for values in second] == [(0, 4), (0,), (0,)]


def test_objects_may_be_held_to_a_score() -> None:
    task = Detection(2, max_detections=3)
    assert [found.classes.tolist() for found in task.objects(DETECTIONS, min_score=0.6)] == [[1], []]


def test_each_task_states_its_outputs() -> None:
    assert Detection(2, max_detections=3).outputs == (
        TensorSpec("boxes", "FP32", (-1, 3, 4)),
        TensorSpec("scores", "FP32", (-1, 3)),
        TensorSpec("classes", "INT32", (-1, 3)),
        TensorSpec("count", "INT32", (-1,)),
    )
    assert Segmentation(256).outputs == (TensorSpec("class_map", "UINT8", (-1, -1, -1)),)
    assert Segmentation(257).outputs == (TensorSpec("class_map", "INT32", (-1, -1, -1)),)
    assert Embedding(7).outputs == (TensorSpec("embedding", "FP32", (-1, 7)),)


def test_labels_name_the_classes() -> None:
    assert Segmentation(2).labelled(("sky", "road")).label(1) == "road"


def test_a_threshold_decides_between_two_classes() -> None:
    task = Classification(2, ("no", "yes"), threshold=0.3)
    scores = np.array([[0.7, 0.3], [0.75, 0.25]], np.float32)
    rows = task.top((scores,), 2)
    assert [[category.label for category in row] for row in rows] == [["yes", "no"], ["no", "yes"]]
    assert [len(row) for row in task.top((scores,), 1)] == [1, 1]
    assert task.agreement((scores,), (np.array([[0.75, 0.25]] * 2),)) == 0.5


FLAGS, SCORES = TensorSpec("flags", "BOOL", (-1, 2)), TensorSpec("scores", "FP64", (-1, 2))
FLAG_VALUES = np.array([[True, False]])
SCORE_VALUES = np.array([[0.25, 0.75]])


def test_of_tensors_the_floats_are_compared_number_by_number() -> None:
    task = Tensors((FLAGS, SCORES))
    (compared,) = task.comparable((FLAG_VALUES, SCORE_VALUES))
    assert compared is SCORE_VALUES
    assert task.least_alike == 1
    assert task.agreement((FLAG_VALUES, SCORE_VALUES), (~FLAG_VALUES[:, :1] | FLAG_VALUES, SCORE_VALUES)) == 1
    assert task.agreement((FLAG_VALUES, SCORE_VALUES), (np.array([[True, True]]), SCORE_VALUES)) == 0.5
    assert Tensors((SCORES,)).agreement((SCORE_VALUES,), (SCORE_VALUES,)) is None


def test_tensors_without_floats_may_differ_for_a_few_images() -> None:
    task = Tensors((FLAGS,))
    (compared,) = task.comparable((FLAG_VALUES,))
    assert compared is FLAG_VALUES
    assert task.least_alike < 1


def test_a_reading_is_the_task_itself_or_the_only_one_of_its_kind() -> None:
    first, second, numbers = Classification(2), Classification(2, at=1), Regression(1, at=2)
    specs = (SCORES, SCORES, SCORES)
    assert reading_of(first, Classification) is first
    assert reading_of(Tensors(specs, (first, numbers)), Classification) is first
    assert reading_of(Tensors(specs, (first, second, numbers)), Regression) is numbers
    for task in (Tensors(specs, (first, second)), Tensors(specs), Embedding(2)):
        with pytest.raises(LookupError):
            reading_of(task, Classification)


def test_a_reading_takes_its_own_of_several_outputs() -> None:
    outputs = (np.zeros((1, 3), np.float32), np.array([[0.25, 0.75]], np.float32))
    ((category,),) = Classification(2, at=1).top(outputs, 1)
    assert (category.index, category.score) == (1, 0.75)
    np.testing.assert_array_equal(Segmentation(2, at=1).map_of(outputs), [0.25, 0.75])
