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
ALL_FITS = st.sampled_from([fit for fit in Fit if fit is not Fit.REJECT])


@st.composite
def frames(draw: st.DrawFn, fits: st.SearchStrategy[Fit] = FITS) -> Frame:
    height, width = draw(INPUT_SIDES), draw(INPUT_SIDES)
    cuts_pixels = draw(st.booleans())
    sizes = {"input_height": height, "input_width": width}
    return place(draw(SIDES), draw(SIDES), **sizes, fit=draw(fits), cuts_pixels=cuts_pixels)


def to_input(frame: Frame, boxes: np.ndarray) -> np.ndarray:
    """Where the model sees what is at `boxes` in the original."""
    left, top, right, bottom = frame.part
    scale = frame.fitted_width / (right - left), frame.fitted_height / (bottom - top)
    return ((boxes.reshape(-1, 2, 2) - (left, top)) * scale + (frame.left, frame.top)).reshape(-1, 4)


@given(frames(ALL_FITS), st.lists(st.tuples(*[st.floats(0, 1)] * 4), min_size=1, max_size=5))
def test_boxes_go_to_the_model_and_back(frame: Frame, shares: list[tuple[float, ...]]) -> None:
    x, y = np.sort(np.array(shares)[:, [0, 2]]) * frame.width, np.sort(np.array(shares)[:, [1, 3]]) * frame.height
    boxes = np.column_stack([x[:, 0], y[:, 0], x[:, 1], y[:, 1]])
    seen = to_input(frame, boxes).astype(np.float32)
    # float32 holds a place in the input to 24 bits, and one of its pixels may be many of the original's.
    largest = np.abs(seen).max(initial=1)
    left, top, right, bottom = frame.part
    scale = max(1, (right - left) / frame.fitted_width, (bottom - top) / frame.fitted_height)
    rounding = 2e-7 * largest * scale + 5e-4
    np.testing.assert_allclose(frame.to_original(seen), boxes, atol=rounding)


@given(frames(ALL_FITS), st.tuples(*[st.floats(-1e4, 1e4, width=32)] * 4))
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
        50, 100, 64, 64, top=16, left=0, fitted_height=32, fitted_width=64, border=None
    )


@given(st.integers(1, 60), st.integers(1, 60), st.integers(1, 40), st.integers(1, 40), FITS)
def test_a_map_returns_in_the_images_size_with_each_pixels_class(
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


@given(frames(st.sampled_from([Fit.CROP, Fit.CENTER_CROP])))
def test_a_cut_image_covers_the_whole_input(frame: Frame) -> None:
    assert frame.top <= 0
    assert frame.left <= 0
    seen = frame.seen
    assert (seen.bottom - seen.top, seen.right - seen.left) == (frame.input_height, frame.input_width)
    left, top, right, bottom = frame.part
    assert 0 <= left < right <= frame.width + 1e-9
    assert 0 <= top < bottom <= frame.height + 1e-9


@pytest.mark.parametrize(("cuts_pixels", "left"), [(False, 62.5), (True, 62)])
def test_a_crop_is_the_middle_in_the_inputs_aspect_ratio(cuts_pixels: bool, left: float) -> None:
    frame = place(375, 500, input_height=224, input_width=224, fit=Fit.CROP, cuts_pixels=cuts_pixels)
    assert frame.crop == (left, 0, left + 375, 375)
    whole_input = np.array([[0, 0, 224, 224]], np.float32)
    np.testing.assert_allclose(frame.to_original(whole_input), [[left, 0, left + 375, 375]])


def test_a_centre_crop_is_of_256_for_each_224_pixels_by_default() -> None:
    frame = place(375, 500, input_height=224, input_width=224, fit=Fit.CENTER_CROP)
    assert (frame.fitted_height, frame.fitted_width, frame.top, frame.left) == (256, 341, -16, -58)
    assert place(375, 500, input_height=299, input_width=299, fit=Fit.CENTER_CROP).fitted_height == 342
    chosen = place(500, 375, input_height=224, input_width=224, fit=Fit.CENTER_CROP, shorter_side=232)
    assert (chosen.fitted_height, chosen.fitted_width) == (309, 232)
    small = place(500, 375, input_height=224, input_width=224, fit=Fit.CENTER_CROP, shorter_side=100)
    assert (small.fitted_height, small.fitted_width) == (298, 224)


@pytest.mark.parametrize("fit", [Fit.PAD, Fit.LETTERBOX])
def test_a_border_has_the_colour_of_the_settings(fit: Fit) -> None:
    frame = place(10, 20, input_height=64, input_width=64, fit=fit, border=(1, 2, 3))
    assert frame.border == (1, 2, 3)
    assert place(10, 20, input_height=64, input_width=64, fit=fit, border=0).border == 0


@pytest.mark.parametrize("fit", [fit for fit in Fit if fit is not Fit.CENTER_CROP])
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
def test_an_image_goes_to_the_closest_aspect_ratio_then_the_smallest_fit(
    image: tuple[int, int], inputs: list[tuple[int, int]], best: tuple[int, int]
) -> None:
    assert best_input(*image, inputs) == best
    assert best_input(*image, inputs[::-1]) == best


@given(st.integers(1, 99), st.integers(1, 99), st.lists(st.tuples(st.integers(1, 99), st.integers(1, 99)), min_size=1))
def test_an_image_that_has_the_size_of_an_input_goes_there(
    height: int, width: int, others: list[tuple[int, int]]
) -> None:
    assert best_input(height, width, [*others, (height, width)]) == (height, width)
