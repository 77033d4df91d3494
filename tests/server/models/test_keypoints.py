from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from xlaserve.config import Fit, ModelSettings
from xlaserve.errors import ModelFailed
from xlaserve.images.frame import place
from xlaserve.models.networks import reading
from xlaserve.models.networks.heads import Head, TensorShape
from xlaserve.models.task import Keypoints, Tensors, reading_of

HEIGHT, WIDTH = 8, 16
IMAGES = tf.zeros((1, HEIGHT, WIDTH, 3))


def head(*shape: int | None, first: bool = False, **fields: Any) -> Head:
    settings = ModelSettings(name="m", source="m.keras", **{"task": "keypoints", **fields})
    return reading.choose({"it": TensorShape([None, *shape], "float32")}, settings, is_first=lambda _: first)


def given(chosen: Head, values: Any) -> Any:
    (points,) = chosen.finish({"it": tf.constant(values, tf.float32)}, IMAGES)
    assert points.shape[1:] == chosen.task.outputs[0].shape[1:]
    return points.numpy()


@pytest.mark.parametrize(
    ("how", "values"),
    [("xy", [12, 2]), ("yx", [2, 12]), ("rel_xy", [0.75, 0.25]), ("rel_yx", [0.25, 0.75]), (None, [12, 2])],
)
def test_places_are_in_pixels_of_the_input(how: Any, values: list[float]) -> None:
    assert given(head(1, 2, keypoint_format=how), [[values]]).tolist() == [[[12, 2]]]
    assert given(head(1, 3, keypoint_format=how), [[[*values, 0.5]]]).tolist() == [[[12, 2, 0.5]]]


@pytest.mark.parametrize("first", [False, True])
def test_keypoints_may_have_a_side_of_one_or_be_one_row(first: bool) -> None:
    points = [[1, 2, 3], [4, 5, 6]]
    assert given(head(1, 2, 3, first=first), [[points]]).tolist() == [points]
    assert given(head(6), [np.ravel(points)]).tolist() == [[[1, 2], [3, 4], [5, 6]]]
    assert given(head(6, labels=["left", "right"]), [np.ravel(points)]).tolist() == [points]


def test_scores_may_be_logits() -> None:
    found = given(head(1, 3, activation="sigmoid"), [[[3, 4, 0]]])
    assert found.tolist() == [[[3, 4, 0.5]]]


@pytest.mark.parametrize("first", [False, True])
def test_a_heatmaps_peak_is_the_centre_of_its_cell(first: bool) -> None:
    maps = np.zeros((1, 4, 4, 2), np.float32)
    maps[0, 3, 1, 0], maps[0, 0, 2, 1] = 0.75, 0.5
    shape = (2, 4, 4) if first else (4, 4, 2)
    chosen = head(*shape, first=first)
    found = given(chosen, np.moveaxis(maps, -1, 1) if first else maps)
    assert found.tolist() == [[[6, 7, 0.75], [10, 1, 0.5]]], "cells are 4 pixels wide and 2 high"
    assert chosen.task == Keypoints(2, has_scores=True, are_peaks=True)


def test_only_scores_of_peaks_are_compared_number_by_number() -> None:
    wanted = np.array([[[1, 2, 0.5], [3, 4, 0.25]]], np.float32)
    got = np.array([[[1, 2, 0.5], [9, 4, 0.25]]], np.float32)
    peaks = Keypoints(2, has_scores=True, are_peaks=True)
    np.testing.assert_array_equal(peaks.comparable((wanted,))[0], [[[0.5], [0.25]]])
    assert peaks.agreement((wanted,), (got,)) == 0.5
    numbers = Keypoints(2, has_scores=True)
    assert numbers.comparable((wanted,))[0] is wanted
    assert numbers.agreement((wanted,), (got,)) is None
    assert (peaks.least_alike, numbers.least_alike) == (0.75, 1.0)
    tensors = Tensors(peaks.outputs, (peaks,))
    np.testing.assert_array_equal(tensors.comparable((wanted,))[0], [[[0.5], [0.25]]])


@pytest.mark.parametrize(
    ("shape", "fields", "says"),
    [
        ((5,), {}, "expected two numbers for each keypoint, got 5"),
        ((2, 5), {}, "expected an output of keypoints"),
        ((None, 2, 5, 3, 1), {}, "expected an output of keypoints"),
        ((1, 3), {"activation": "softmax"}, "activation: expected sigmoid or none"),
    ],
)
def test_what_can_not_be_keypoints_is_said(shape: Any, fields: Any, says: str) -> None:
    with pytest.raises(ModelFailed, match=says):
        head(*shape, **fields)


def test_keypoints_may_be_one_of_several_heads() -> None:
    outputs = {"points": {"task": "keypoints", "keypoint_format": "rel_xy", "labels": ["eye", "nose"]}}
    shapes = {"class": TensorShape([None, 2], "float32"), "points": TensorShape([None, 4], "float32")}
    chosen = reading.choose(shapes, ModelSettings(name="m", source="m.keras", outputs=outputs))
    assert isinstance(chosen.task, Tensors)
    assert reading_of(chosen.task, Keypoints) == Keypoints(2, ("eye", "nose"), at=1)
    assert chosen.task.outputs[1].shape == (-1, 2, 2)


def test_points_go_back_to_the_image_and_may_lie_beyond_it() -> None:
    frame = place(100, 50, input_height=64, input_width=64, fit=Fit.LETTERBOX)  # 32 columns from column 16 on
    points = np.array([[16, 0], [48, 64], [0, 32]], np.float32)
    np.testing.assert_allclose(frame.points_to_original(points), [[0, 0], [50, 100], [-25, 50]], rtol=1e-6)
