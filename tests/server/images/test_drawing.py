"""Pictures: what is drawn stands where it should, in images of any size."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from xlaserve.images import drawing
from xlaserve.images.drawing import MAX_LABELS, MIN_SIDE, Box, Line, colour_of

SIZES = [(700, 1000), (32, 32), (1, 1280), (1280, 1), (1, 1)]
LONG = Line("a label that goes on and on " * 20, "0.99")


def grey(height: int, width: int, level: int = 128) -> np.ndarray:
    return np.full((height, width, 3), level, np.uint8)


def read(png: bytes) -> np.ndarray:
    assert png.startswith(b"\x89PNG")
    return np.asarray(Image.open(io.BytesIO(png)))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("level", [0, 128, 255])
def test_any_image_can_be_drawn_into(size: tuple[int, int], level: int) -> None:
    pixels = grey(*size, level)
    boxes = [Box((0, 0, 1, 1), 0, LONG), Box((0.99, 0.99, 1, 1), 7, Line("été 猫\n\x00", "nan"))]
    assert max(read(drawing.boxed(pixels, boxes)).shape) >= MIN_SIDE
    assert read(drawing.captioned(pixels, [LONG] * 12)).shape[0] > 12
    classes = np.arange(size[0] * size[1]).reshape(size) % 300
    assert read(drawing.overlaid(pixels, classes, [LONG], None)).shape[1] >= MIN_SIDE


def test_a_box_stands_where_its_object_is() -> None:
    found = read(drawing.boxed(grey(500, 1000), [Box((0.5, 0.2, 0.75, 0.6), 3, Line("x", "1"))]))
    assert found.shape == (500, 1000, 3)
    rows, columns = np.nonzero((found == colour_of(3)).all(axis=2))
    assert (columns.min(), columns.max(), rows.max()) == (500, 750, 300)
    assert rows.min() < 100, "the label stands above"
    assert (found[250, 600] == 128).all(), "nothing is drawn within"


def test_a_label_stays_in_the_picture_and_keeps_its_figure() -> None:
    corner = read(drawing.boxed(grey(500, 1000), [Box((0.9, 0, 1, 0.1), 3, LONG)]))
    columns = np.nonzero((corner == colour_of(3)).all(axis=2).any(axis=0))[0]
    assert 500 < columns.min() < 900
    assert columns.max() == 999


def test_further_boxes_have_no_label() -> None:
    boxes = [Box((0.5, 0.5, 0.6, 0.6), 0, Line("on top", "1"))] * MAX_LABELS
    more = [*boxes, Box((0.1, 0.5, 0.2, 0.6), 1, Line("last", "0"))]
    below = read(drawing.boxed(grey(500, 1000), more))
    rows = np.nonzero((below == colour_of(1)).all(axis=2))[0]
    assert rows.min() == 250


def test_classes_have_colours_and_the_background_has_none() -> None:
    classes = np.zeros((500, 1000), np.int32)
    classes[:, 500:] = 2
    found = read(drawing.overlaid(grey(500, 1000), classes, [Line("a", "50%"), Line("b", "50%", colour_of(2))], 0))
    assert (found[:500, :500] == 128).all()
    assert (found[:500, 500:] != 128).any(axis=2).all()
    assert (found[500:] == colour_of(2)).all(axis=2).any(), "the legend shows the colour"


def test_neighbouring_classes_differ() -> None:
    colours = np.array([colour_of(index) for index in range(40)], np.int64)
    apart = np.abs(colours[:, None] - colours[None]).sum(axis=2) + 999 * np.eye(40, dtype=np.int64)
    assert apart[:12, :12].min() > 60
    assert min(apart[index, index + 1] for index in range(39)) > 150
