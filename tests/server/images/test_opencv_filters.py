"""Resizing compared with OpenCV's own."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import cv2
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from tests.server.images.encoded import LIMITS, decode_resized, encode

from xlaserve.config import Fit, ResizeFilter, ResizeLibrary, ResizeSettings
from xlaserve.images import decoder as image_decoder
from xlaserve.images.frame import Window, place
from xlaserve.images.resizing.resize import Resized, by_opencv

INTERPOLATIONS = {
    ResizeFilter.NEAREST: cv2.INTER_NEAREST,
    ResizeFilter.BILINEAR: cv2.INTER_LINEAR,
    ResizeFilter.AREA: cv2.INTER_AREA,
    ResizeFilter.BICUBIC: cv2.INTER_CUBIC,
    ResizeFilter.LANCZOS4: cv2.INTER_LANCZOS4,
}
Size = tuple[int, int]


def sizes() -> Iterator[tuple[Size, Size]]:
    """Random sizes up and down, and those for which OpenCV has other ways: whole factors, one side unchanged."""
    random = np.random.default_rng(3)
    for _ in range(60):
        height, width, to_height, to_width = random.integers(1, 140, 4).tolist()
        yield (height, width), (to_height, to_width)
    for number in range(8):
        height, width, other = random.integers(1, 50, 3).tolist()
        yield (2 * height, 2 * width), (height, width)
        yield (3 * height, 5 * width), (height, width)
        yield (height, 2 * width), (height, width)
        yield (height, width), (3 * height, 2 * width)
        yield (height, width), (height, other)
        yield (height, width), (other, width)
        yield (height, width), (height, width)
        yield (number + 1, 1), (9, 7)
    yield (375, 500), (224, 224)
    yield (1376, 1500), (224, 334)


def images(channels: int) -> Iterator[tuple[NDArray[np.uint8], Size]]:
    """Noise, and black and white, of which sharp filters make more than white and less than black."""
    random = np.random.default_rng(channels)
    for number, (size, wanted) in enumerate(sizes()):
        levels = random.integers(0, 256, (*size, channels), dtype=np.uint8)
        yield (levels if number % 3 else np.where(levels > 127, 255, 0).astype(np.uint8)), wanted


def by_cv2(pixels: NDArray[np.uint8], size: Size, filter_: ResizeFilter) -> NDArray[np.uint8]:
    resized = cv2.resize(pixels, size[::-1], interpolation=INTERPOLATIONS[filter_])
    return np.asarray(resized, np.uint8).reshape(*size, pixels.shape[2])


def resized(
    pixels: NDArray[np.uint8], size: Size, filter_: ResizeFilter, window: Window | None = None
) -> NDArray[np.uint8]:
    height, width = pixels.shape[:2]
    to = Resized((0, 0, width, height), size[1], size[0], window or Window(0, 0, size[1], size[0]))
    return by_opencv(pixels, to, filter_)


@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize("filter_", [one for one in INTERPOLATIONS if one is not ResizeFilter.BICUBIC])
def test_pixels_are_those_of_opencv(filter_: ResizeFilter, channels: int) -> None:
    for pixels, size in images(channels):
        got, wanted = resized(pixels, size, filter_), by_cv2(pixels, size, filter_)
        assert got.dtype == np.uint8
        np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_cubic_is_that_of_opencv_but_for_sums_near_a_half(channels: int) -> None:
    values = apart = 0
    for pixels, size in images(channels):
        if min(pixels.shape[:2]) < 4:  # of which OpenCV computes the cubic in 2048ths
            continue
        got, wanted = resized(pixels, size, ResizeFilter.BICUBIC), by_cv2(pixels, size, ResizeFilter.BICUBIC)
        np.testing.assert_allclose(got.astype(int), wanted, rtol=0, atol=1)
        values, apart = values + got.size, apart + int((got != wanted).sum())
    assert apart < values / 10_000


@pytest.mark.parametrize("filter_", INTERPOLATIONS)
def test_a_window_is_cut_out_of_the_whole(filter_: ResizeFilter) -> None:
    random = np.random.default_rng(5)
    for pixels, (height, width) in images(3):
        left, top = int(random.integers(0, width)), int(random.integers(0, height))
        right, bottom = int(random.integers(left + 1, width + 1)), int(random.integers(top + 1, height + 1))
        got = resized(pixels, (height, width), filter_, Window(left, top, right, bottom))
        np.testing.assert_array_equal(got, resized(pixels, (height, width), filter_)[top:bottom, left:right])


@pytest.mark.parametrize("filter_", [ResizeFilter.BILINEAR, ResizeFilter.AREA])
def test_encoded_images_are_resized_as_by_opencv(filter_: ResizeFilter) -> None:
    how = ResizeSettings(library=ResizeLibrary.OPENCV, filter=filter_)
    small = [(pixels, size) for pixels, size in images(3) if pixels.nbytes < LIMITS.max_image_bytes]
    for pixels, (height, width) in small:
        got = decode_resized(encode(Image.fromarray(pixels)), height=height, width=width, resize=how)
        np.testing.assert_array_equal(got, by_cv2(pixels, (height, width), filter_))


def test_a_crop_is_one_of_whole_pixels() -> None:
    how = ResizeSettings(library=ResizeLibrary.OPENCV)
    pixels = np.random.default_rng(1).integers(0, 256, (100, 161, 3), dtype=np.uint8)
    where = partial(place, input_height=40, input_width=40, fit=Fit.CROP, cuts_pixels=True)
    got = image_decoder.decode(encode(Image.fromarray(pixels)), where, LIMITS, resize=how).pixels
    np.testing.assert_array_equal(got, by_cv2(pixels[:, 30:130], (40, 40), ResizeFilter.BILINEAR))


def test_only_area_counts_every_pixel() -> None:
    ways = [ResizeSettings(library=ResizeLibrary.OPENCV, filter=filter_) for filter_ in INTERPOLATIONS]
    assert [how.filter for how in ways if how.is_antialiased] == [ResizeFilter.AREA]
    assert not any(how.has_choice for how in ways)
