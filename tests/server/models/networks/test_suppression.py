from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from xlaserve.config import BoxFormat
from xlaserve.models.networks import suppression
from xlaserve.models.networks.suppression import cut, suppress, to_xyxy

IMAGES = tf.zeros((1, 100, 200, 3))
LARGE = tf.zeros((1, 640, 2000, 3))


@pytest.mark.parametrize(
    ("how", "box"),
    [
        ("xyxy", (20, 10, 60, 50)),
        ("yxyx", (10, 20, 50, 60)),
        ("xywh", (20, 10, 40, 40)),
        ("center_xywh", (40, 30, 40, 40)),
        ("rel_xyxy", (0.1, 0.1, 0.3, 0.5)),
        ("rel_yxyx", (0.1, 0.1, 0.5, 0.3)),
        ("rel_xywh", (0.1, 0.1, 0.2, 0.4)),
        ("rel_center_xywh", (0.2, 0.3, 0.2, 0.4)),
    ],
)
def test_every_format_comes_out_as_pixels_of_the_image(how: BoxFormat, box: tuple[float, ...]) -> None:
    np.testing.assert_allclose(to_xyxy(tf.constant([[box]]), how, IMAGES), [[(20, 10, 60, 50)]], rtol=1e-5)


def test_boxes_end_with_the_image_and_are_numbers() -> None:
    wild = tf.constant([[(-math.inf, -5, math.inf, 120), (math.nan, 1, 2, 3)]])
    boxes = to_xyxy(wild, "xyxy", IMAGES)
    assert np.isfinite(boxes).all() and boxes[0, 0, 1] == -5
    np.testing.assert_array_equal(cut(boxes, IMAGES), [[(0, 0, 200, 100), (0, 1, 2, 3)]])


def run(
    candidates: Sequence[Sequence[float]],
    scores: Sequence[tuple[float, ...]],
    images: tf.Tensor = IMAGES,
    **options: Any,
) -> list[Any]:
    options = {"max_detections": 4, "score_threshold": 0.2, "iou_threshold": 0.5} | options
    compiled = tf.function(lambda *inputs: suppress(*inputs, **options), jit_compile=True, autograph=False)
    outputs = compiled(tf.constant([candidates], tf.float32), tf.constant([scores], tf.float32), images)
    return [output.numpy()[0].tolist() for output in outputs]


LEFT, SAME, RIGHT = (0.0, 0.0, 10.0, 10.0), (0.0, 0.0, 10.0, 11.0), (50.0, 50.0, 60.0, 60.0)


def test_of_two_boxes_at_one_place_the_higher_score_stays() -> None:
    found, scores, classes, count = run([SAME, RIGHT, LEFT], [(0.5, 0.1), (0.1, 0.75), (0.875, 0.1)])
    assert count == 2
    assert found == [list(LEFT), list(RIGHT), [0] * 4, [0] * 4]
    assert scores == [0.875, 0.75, 0, 0]
    assert classes == [0, 1, -1, -1]


def test_boxes_of_two_classes_stay_unless_suppressed_across_classes() -> None:
    candidates, scores = [LEFT, SAME], [(0.75, 0.1), (0.1, 0.5)]
    assert run(candidates, scores)[2:] == [[0, 1, -1, -1], 2]
    assert run(candidates, scores, across_classes=True)[2:] == [[0, -1, -1, -1], 1]


def test_what_scores_too_little_or_is_empty_is_no_object() -> None:
    empty = (5.0, 5.0, 5.0, 9.0)
    assert run([LEFT, RIGHT, empty], [(0.1, 0.1), (0.5, 0.1), (0.9, 0.1)])[3] == 1
    assert run([LEFT, RIGHT], [(0.1, 0.1), (0.2, 0.1)])[2:] == [[-1] * 4, 0]


def test_boxes_overlap_as_far_as_they_go_beyond_the_image() -> None:
    at_the_corner, wide = (-10.0, -10.0, 10.0, 10.0), (-30.0, -10.0, 10.0, 10.0)
    scores = [(0.75, 0.1), (0.5, 0.1)]
    assert run([at_the_corner, wide], scores, iou_threshold=0.45)[3] == 1
    found, _, _, count = run([at_the_corner, wide], scores, iou_threshold=0.55)
    assert count == 2 and found[:2] == [list(LEFT)] * 2, "they share half of both, and all that the image shows"


def test_what_lies_beside_the_image_is_no_object_and_yet_suppresses() -> None:
    beside, at_the_edge = (-10.0, 0.0, 0.0, 10.0), (-10.0, 0.0, 1.0, 10.0)
    found, _, _, count = run([beside, at_the_edge, RIGHT], [(0.75, 0.1), (0.5, 0.1), (0.5, 0.1)])
    assert count == 1 and found[0] == list(RIGHT)


def test_infinite_boxes_suppress_one_another() -> None:
    endless = (-math.inf, -math.inf, math.inf, math.inf)
    whole = to_xyxy(tf.constant([[endless, endless]]), "xyxy", IMAGES)[0].numpy().tolist()
    found, _, _, count = run(whole, [(0.75, 0.1), (0.5, 0.1)])
    assert count == 1 and found[0] == [0, 0, 200, 100]


def test_no_more_objects_come_out_than_wanted_and_the_best_of_many() -> None:
    many = [(float(x), 0.0, x + 0.9, 1.0) for x in range(suppression.CANDIDATES + 50)]
    scores = [(0.3 + place / 10_000, 0.0) for place in range(len(many))]
    found, _, _, count = run(many, scores, LARGE)
    assert count == 4
    assert [int(box[0]) for box in found] == [len(many) - 1 - place for place in range(4)]


def test_thousands_of_classes_cost_small_boxes_no_precision() -> None:
    generator = np.random.default_rng(0)
    classes, pairs = 5000, 200
    corners = generator.uniform(0, 630, (pairs, 1, 2)).repeat(2, axis=1)
    corners[:, 1] += generator.uniform(0.1, 2, (pairs, 2))  # the second of a pair, next to the first
    candidates = np.concatenate([corners, corners + 4], axis=2).reshape(-1, 4).astype(np.float32)
    scores = np.zeros((2 * pairs, classes), np.float32)
    of_pair = classes - 1 - np.arange(pairs)
    scores[np.arange(2 * pairs), of_pair.repeat(2)] = np.tile([0.9, 0.8], pairs)
    one, other = candidates[0::2].astype(np.float64), candidates[1::2].astype(np.float64)
    shared = np.prod(np.minimum(one, other)[:, 2:] - np.maximum(one, other)[:, :2], axis=1)
    iou = shared / (2 * 16 - shared)
    stay = iou <= 0.5
    assert np.abs(iou - 0.5).min() > 1e-4, "no pair is so close to the threshold that rounding decides"
    assert 20 < stay.sum() < pairs - 20

    options: dict[str, Any] = {"max_detections": 2 * pairs, "score_threshold": 0.2, "iou_threshold": 0.5}
    for jit_compile in (True, False):
        compiled = tf.function(lambda *inputs: suppress(*inputs, **options), jit_compile=jit_compile, autograph=False)
        _, _, found, (count,) = compiled(tf.constant([candidates]), tf.constant([scores]), LARGE)
        assert count == pairs + stay.sum()
        expected = [*of_pair, *of_pair[stay]]
        assert sorted(found[0, : int(count)].numpy()) == sorted(expected)
