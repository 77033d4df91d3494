"""Images that a model makes, in the size of the image that was sent."""

from __future__ import annotations

import io

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

from xlaserve.config import Color, Fit
from xlaserve.images.colors import colored, displayed
from xlaserve.images.frame import Frame, place, whole
from xlaserve.images.image_output import MAX_SIDE, to_png

RANDOM = np.random.default_rng(0)


def noise(height: int, width: int, channels: int = 3) -> NDArray[np.uint8]:
    return RANDOM.integers(0, 256, (height, width, channels), np.uint8)


def shown(levels: NDArray[np.uint8], frame: Frame, color: Color = Color.RGB) -> NDArray[np.uint8]:
    png = to_png(levels, color, frame)
    pixels = np.asarray(Image.open(io.BytesIO(png.file)))
    assert pixels.shape[:2] == (png.height, png.width)
    return pixels


@pytest.mark.parametrize(("color", "channels"), [(Color.GREY, 1), (Color.RGB, 3), (Color.RGBA, 4)])
def test_levels_of_the_images_size_stay_as_they_are(color: Color, channels: int) -> None:
    levels = noise(6, 9, channels)
    np.testing.assert_array_equal(shown(levels, whole(6, 9), color).reshape(levels.shape), levels)


def test_a_border_is_cut_away_without_a_change_of_what_it_surrounds() -> None:
    frame = place(6, 12, input_height=16, input_width=16, fit=Fit.PAD)
    levels = noise(16, 16)
    np.testing.assert_array_equal(shown(levels, frame), levels[:6, :12])


def test_a_letterbox_comes_back_in_the_images_size_without_grey() -> None:
    frame = place(40, 80, input_height=16, input_width=16, fit=Fit.LETTERBOX)
    levels = np.full((16, 16, 3), 114, np.uint8)
    levels[4:12, :8], levels[4:12, 8:] = 0, 255
    pixels = shown(levels, frame)
    assert pixels.shape == (40, 80, 3)
    assert not pixels[:, :25].any()
    assert (pixels[:, 55:] == 255).all()


def test_the_output_may_be_coarser_than_the_input() -> None:
    frame = place(32, 32, input_height=8, input_width=8, fit=Fit.RESIZE)
    assert shown(noise(2, 2), frame).shape == (32, 32, 3)


def test_what_the_model_enlarges_stays_larger() -> None:
    levels = noise(32, 32)
    np.testing.assert_array_equal(shown(levels, whole(8, 8)), levels)
    frame = place(6, 12, input_height=16, input_width=16, fit=Fit.PAD)
    np.testing.assert_array_equal(shown(levels, frame), levels[:12, :24])


def test_no_side_is_longer_than_the_most() -> None:
    frame = place(2, 3 * MAX_SIDE, input_height=8, input_width=8, fit=Fit.RESIZE)
    assert shown(noise(8, 8), frame).shape == (1, MAX_SIDE, 3)


SIDES = st.integers(1, 60)


@given(*[st.tuples(SIDES, SIDES)] * 3, st.sampled_from([Fit.RESIZE, Fit.LETTERBOX, Fit.PAD]))
def test_a_picture_can_be_made_of_an_image_anywhere_in_the_input(
    size: tuple[int, int], taken: tuple[int, int], made: tuple[int, int], fit: Fit
) -> None:
    frame = place(*size, input_height=taken[0], input_width=taken[1], fit=fit)
    height, width = made
    png = to_png(np.zeros((height, width, 1), np.uint8), Color.GREY, frame)
    assert png.height <= max(frame.height, frame.height * height / frame.input_height) + 0.5
    assert png.width <= max(frame.width, frame.width * width / frame.input_width) + 0.5


@pytest.mark.parametrize(("color", "most"), [(Color.BGR, 0), (Color.YUV, 2)])
def test_colours_of_models_are_shown_as_those_that_they_were_made_of(color: Color, most: int) -> None:
    pixels = noise(16, 16) // 2 + 64  # YUV clips what is farther from grey
    back = displayed(colored(pixels, color), color)
    assert np.abs(back.astype(int) - pixels).max() <= most
