"""Colours that pictures are converted to: grey, BGR, RGBA and YUV."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from tests.server.images.encoded import LIMITS, UPRIGHT, decode_and_place, encode

from xlaserve.config import Color, Fit
from xlaserve.images import decoder as image_decoder
from xlaserve.images.frame import place

NOISE = Image.fromarray(np.random.default_rng(3).integers(0, 256, (40, 36, 3), dtype=np.uint8))


def decoded(
    image: Image.Image, color: Color, fit: Fit = Fit.REJECT, size: tuple[int, int] = (0, 0)
) -> NDArray[np.uint8]:
    height, width = size if any(size) else (image.height, image.width)
    return decode_and_place(encode(image), height=height, width=width, fit=fit, color=color).pixels


@pytest.mark.parametrize("color", Color)
@pytest.mark.parametrize("fit", [fit for fit in Fit if fit is not Fit.REJECT])
@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA"])
def test_pixels_have_the_channels_of_their_colour(color: Color, fit: Fit, mode: str) -> None:
    pixels = decoded(UPRIGHT.convert(mode), color, fit, (20, 33))
    assert pixels.shape == (20, 33, color.channels)
    assert pixels.dtype == np.uint8


def test_grey_is_pillows_luma_taken_before_the_resize() -> None:
    expected = NOISE.convert("L").resize((11, 13), Image.Resampling.BILINEAR)
    np.testing.assert_array_equal(decoded(NOISE, Color.GREY, Fit.RESIZE, (13, 11))[:, :, 0], expected)


def test_grey_is_the_luma_of_itu_r_601() -> None:
    luma = np.asarray(NOISE) @ (0.299, 0.587, 0.114)
    assert np.abs(decoded(NOISE, Color.GREY)[:, :, 0] - luma).max() <= 0.51


def test_a_grey_picture_stays_as_it_is() -> None:
    grey = NOISE.convert("L")
    np.testing.assert_array_equal(decoded(grey, Color.GREY)[:, :, 0], grey)


def test_bgr_is_rgb_with_its_channels_reversed() -> None:
    for fit in (Fit.RESIZE, Fit.LETTERBOX):
        rgb = decoded(NOISE, Color.RGB, fit, (20, 33))
        np.testing.assert_array_equal(decoded(NOISE, Color.BGR, fit, (20, 33)), rgb[:, :, ::-1])


def test_transparency_is_kept_in_rgba_and_other_pictures_are_opaque() -> None:
    half = NOISE.copy()
    half.putalpha(Image.fromarray(np.arange(40 * 36, dtype=np.uint8).reshape(40, 36)))
    np.testing.assert_array_equal(decoded(half, Color.RGBA), half)
    assert (decoded(NOISE, Color.RGBA)[:, :, 3] == 255).all()


def test_the_border_of_a_letterbox_is_opaque_and_grey() -> None:
    corners = {color: decoded(UPRIGHT, color, Fit.LETTERBOX, (15, 60))[0, 0].tolist() for color in Color}
    assert corners == {
        Color.GREY: [114],
        Color.RGB: [114] * 3,
        Color.BGR: [114] * 3,
        Color.RGBA: [114, 114, 114, 255],
        Color.YUV: [114, 128, 128],
    }


@pytest.mark.parametrize(
    ("rgb", "yuv"),
    # As cv2.cvtColor(..., cv2.COLOR_RGB2YUV) of opencv-python 5.0 gives them.
    [
        ((0, 0, 0), (0, 128, 128)),
        ((255, 255, 255), (255, 128, 128)),
        ((255, 0, 0), (76, 91, 255)),
        ((0, 255, 0), (150, 54, 0)),
        ((0, 0, 255), (29, 239, 103)),
        ((12, 200, 77), (130, 102, 25)),
    ],
)
def test_yuv_is_opencvs(rgb: tuple[int, int, int], yuv: tuple[int, int, int]) -> None:
    assert decoded(Image.new("RGB", (2, 2), rgb), Color.YUV)[0, 0].tolist() == [*yuv]


@pytest.mark.parametrize(
    ("color", "levels"),
    [(Color.RGB, [10, 200, 90]), (Color.BGR, [90, 200, 10]), (Color.RGBA, [10, 200, 90, 255]), (Color.GREY, [131])],
)
def test_a_coloured_border_is_converted_as_the_picture(color: Color, levels: list[int]) -> None:
    where = partial(place, input_height=15, input_width=60, fit=Fit.LETTERBOX, border=(10, 200, 90))
    assert image_decoder.decode(encode(UPRIGHT), where, LIMITS, color=color).pixels[0, 0].tolist() == levels
    dot = Image.new("RGB", (1, 1), (10, 200, 90))
    assert decoded(dot, color).reshape(-1).tolist() == levels
