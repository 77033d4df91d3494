from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xlaserve.config import Fit
from xlaserve.images.frame import Frame, best_input, place, whole

SIDES = st.integers(1, 4000)
INPUT_SIDES = st.integers(1, 700)
FITS = st.sampled_from([Fit.RESIZE, Fit.LETTERBOX, Fit.PAD])


@st.composite
def frames(draw: st.DrawFn) -> Frame:
    height, width = draw(INPUT_SIDES), draw(INPUT_SIDES)
    return place(draw(SIDES), draw(SIDES), input_height=height, input_width=width, fit=draw(FITS))


def to_input(frame: Frame, boxes: np.ndarray) -> np.ndarray:
    """Where the model sees what is at `boxes` in the original."""
    scale = frame.fitted_width / frame.width, frame.fitted_height / frame.height
    return (boxes.reshape(-1, 2, 2) * scale + (frame.left, frame.top)).reshape(-1, 4)


@given(frames(), st.lists(st.tuples(*[st.floats(0, 1)] * 4), min_size=1, max_size=5))
def test_boxes_go_to_the_model_and_back(frame: Frame, shares: list[tuple[float, ...]]) -> None:
    x, y = np.sort(np.array(shares)[:, [0, 2]]) * frame.width, np.sort(np.array(shares)[:, [1, 3]]) * frame.height
    boxes = np.column_stack([x[:, 0], y[:, 0], x[:, 1], y[:, 1]])
    seen = to_input(frame, boxes).astype(np.float32)
    # float32 holds a place in the input to 2**-14 pixels, which may be of many of the original's.
    rounding = 2e-4 * max(1, frame.width / frame.fitted_width, frame.height / frame.fitted_height) + 5e-4
    np.testing.assert_allclose(frame.to_original(seen), boxes, atol=rounding)


@given(frames(), st.tuples(*[st.floats(-1e4, 1e4, width=32)] * 4))
def test_no_box_reaches_beyond_the_image(frame: Frame, box: tuple[float, ...]) -> None:
    x_min, y_min, x_max, y_max = frame.to_original(np.array([box], np.float32))[0]
    assert 0 <= min(x_min, x_max) <= max(x_min, x_max) <= frame.width
    assert 0 <= min(y_min, y_max) <= max(y_min, y_max) <= frame.height


@given(frames())
def test_the_image_lies_within_the_input(frame: Frame) -> None:
    assert frame.top >= 0
    assert frame.left >= 0
    assert 1 <= frame.fitted_height <= frame.input_height - frame.top
    assert 1 <= frame.fitted_width <= frame.input_width - frame.left


@given(st.integers(1, 4000), st.integers(1, 4000), st.integers(8, 700), st.sampled_from([Fit.LETTERBOX, Fit.PAD]))
def test_letterbox_and_pad_keep_the_aspect_ratio(height: int, width: int, side: int, fit: Fit) -> None:
    frame = place(height, width, input_height=side, input_width=side, fit=fit)
    scale = min(side / height, side / width, 1.0 if fit is Fit.PAD else np.inf)
    assert abs(frame.fitted_height - max(1, height * scale)) <= 0.5
    assert abs(frame.fitted_width - max(1, width * scale)) <= 0.5
    if fit is Fit.LETTERBOX:
        assert side in (frame.fitted_height, frame.fitted_width)
    else:
        assert (frame.fitted_height, frame.fitted_width) <= (height, width)
        assert (frame.top, frame.left) == (0, 0)


def test_a_letterbox_is_centred() -> None:
    assert place(50, 100, input_height=64, input_width=64, fit=Fit.LETTERBOX) == Frame(
        50, 100, 64, 64, top=16, left=0, fitted_height=32, fitted_width=64, border=114
    )


@given(st.integers(1, 60), st.integers(1, 60), st.integers(1, 40), st.integers(1, 40), FITS)
def test_a_map_comes_back_in_the_images_size_with_the_class_under_each_pixel(
    height: int, width: int, input_height: int, input_width: int, fit: Fit
) -> None:
    frame = place(height, width, input_height=input_height, input_width=input_width, fit=fit)
    classes = np.arange(input_height * input_width).reshape(input_height, input_width)
    original = frame.map_to_original(classes)
    assert original.shape == (height, width)
    centres = np.stack(np.meshgrid(np.arange(width) + 0.5, np.arange(height) + 0.5), axis=-1).reshape(-1, 2)
    seen = to_input(frame, np.concatenate([centres, centres], axis=1))[:, :2]
    rows, columns = original.ravel() // input_width, original.ravel() % input_width
    assert (np.abs(columns + 0.5 - seen[:, 0]) <= 0.5 + 1e-6).all()
    assert (np.abs(rows + 0.5 - seen[:, 1]) <= 0.5 + 1e-6).all()


def test_a_map_may_be_coarser_than_the_input() -> None:
    frame = place(4, 8, input_height=8, input_width=8, fit=Fit.LETTERBOX)
    coarse = np.array([[9, 9], [1, 2], [3, 4], [9, 9]], np.uint8)  # cells 2 pixels high and 4 wide
    assert frame.map_to_original(coarse).tolist() == [[1] * 4 + [2] * 4] * 2 + [[3] * 4 + [4] * 4] * 2


def test_pixels_that_are_the_input_stay_where_they_are() -> None:
    boxes = np.array([[1, 2, 3, 4]], np.float32)
    np.testing.assert_array_equal(whole(6, 5).to_original(boxes), boxes)


@pytest.mark.parametrize("fit", list(Fit))
def test_an_image_of_the_models_size_is_left_as_it_is(fit: Fit) -> None:
    frame = place(6, 5, input_height=6, input_width=5, fit=fit)
    assert (frame.top, frame.left, frame.fitted_height, frame.fitted_width) == (0, 0, 6, 5)
    assert frame.covers_input


SQUARES = [(64, 64), (128, 128), (256, 256)]
SHAPES = [(128, 128), (96, 160), (160, 96), (48, 80)]


@pytest.mark.parametrize(
    ("image", "inputs", "best"),
    [
        ((10, 10), SQUARES, (64, 64)),
        ((64, 64), SQUARES, (64, 64)),
        ((65, 64), SQUARES, (128, 128)),
        ((64, 300), SQUARES, (256, 256)),
        ((3000, 2000), SQUARES, (256, 256)),
        ((600, 1000), SHAPES, (96, 160)),
        ((1000, 600), SHAPES, (160, 96)),
        ((1000, 900), SHAPES, (128, 128)),
        ((40, 70), SHAPES, (48, 80)),
        # 9:16 is closer to 288 x 512 by a hair; the image need not be shrunk for the other.
        ((360, 640), [(288, 512), (384, 672)], (384, 672)),
    ],
)
def test_an_image_goes_to_the_closest_aspect_ratio_and_then_to_the_smallest_that_holds_it(
    image: tuple[int, int], inputs: list[tuple[int, int]], best: tuple[int, int]
) -> None:
    assert best_input(*image, inputs) == best
    assert best_input(*image, inputs[::-1]) == best


@given(st.integers(1, 99), st.integers(1, 99), st.lists(st.tuples(st.integers(1, 99), st.integers(1, 99)), min_size=1))
def test_an_image_that_has_the_size_of_an_input_goes_there(
    height: int, width: int, others: list[tuple[int, int]]
) -> None:
    assert best_input(height, width, [*others, (height, width)]) == (height, width)
