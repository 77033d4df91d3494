from __future__ import annotations

import numpy as np

from xlaserve.engine.program import Outputs
from xlaserve.models.task import Classification, Detection, Embedding, Segmentation, TensorSpec

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
