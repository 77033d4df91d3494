from __future__ import annotations

import numpy as np
import pytest
from scripts.shapes_data import HELD_OUT_SEED, LABELS, MAX_SHAPES, TRAIN_SEED, Scene, scene

SIZES = ((90, 140), (140, 90), (117, 117))


@pytest.fixture(scope="module")
def scenes() -> list[Scene]:
    return [scene(TRAIN_SEED, number, height=h, width=w) for number in range(20) for h, w in SIZES]


def test_a_scene_is_the_same_each_time_and_no_other() -> None:
    first, again = (scene(TRAIN_SEED, 3, height=90, width=90) for _ in range(2))
    np.testing.assert_array_equal(first.pixels, again.pixels)
    assert first.shapes == again.shapes
    for other in (scene(TRAIN_SEED, 4, height=90, width=90), scene(HELD_OUT_SEED, 3, height=90, width=90)):
        assert (first.pixels != other.pixels).mean() > 0.5


def test_a_scene_has_the_asked_size_and_some_shapes(scenes: list[Scene]) -> None:
    for drawn, (height, width) in zip(scenes, SIZES * 20, strict=True):
        assert drawn.pixels.shape == (height, width, 3)
        assert drawn.classes.shape == (height, width)
        assert 1 <= len(drawn.shapes) <= MAX_SHAPES
    assert {shape.label for drawn in scenes for shape in drawn.shapes} == set(range(len(LABELS)))


def test_boxes_are_as_tight_as_pixels_allow_and_lie_within_the_image(scenes: list[Scene]) -> None:
    for drawn in scenes:
        height, width = drawn.classes.shape
        for label, x_min, y_min, x_max, y_max in drawn.shapes:
            assert 0 <= x_min < x_max <= width
            assert 0 <= y_min < y_max <= height
            # Shapes' boxes don't overlap: what is in one is its shape.
            inside = drawn.classes[int(y_min) : int(y_max) + 1, int(x_min) : int(x_max) + 1] == label + 1
            rows, columns = np.flatnonzero(inside.any(axis=1)), np.flatnonzero(inside.any(axis=0))
            assert abs(len(rows) - (y_max - y_min)) <= 2
            assert abs(len(columns) - (x_max - x_min)) <= 2


def test_the_map_holds_the_shapes_and_nothing_else(scenes: list[Scene]) -> None:
    for drawn in scenes:
        assert set(np.unique(drawn.classes)) == {0, *(shape.label + 1 for shape in drawn.shapes)}
