from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from xlaserve.config import PixelRange
from xlaserve.errors import InvalidArgument
from xlaserve.images.decoder import check_pixels
from xlaserve.images.image_input import RGB, ImageInput

GREY = ImageInput(1, None)
FLAT = ImageInput(1, None, "NHW")
PLANES = ImageInput(3, None, "NCHW")
FIVE = ImageInput(5, None)


def numbered(*shape: int) -> Any:
    return np.arange(np.prod(shape), dtype=np.uint8).reshape(shape)


@pytest.mark.parametrize(
    ("image", "shape"),
    [(RGB, (2, 4, 6, 3)), (GREY, (2, 4, 6, 1)), (FLAT, (2, 4, 6)), (PLANES, (2, 3, 4, 6)), (FIVE, (2, 4, 6, 5))],
)
def test_pixels_in_the_declared_shape_become_channels_last(image: ImageInput, shape: tuple[int, ...]) -> None:
    assert image.shape(2, 4, 6) == shape
    pixels = numbered(*shape)
    checked = check_pixels(pixels, image=image)
    assert checked.shape == (2, 4, 6, image.channels) == image.arranged_shape(shape)
    assert checked.flags.c_contiguous
    expected = pixels.transpose(0, 2, 3, 1) if image is PLANES else pixels.reshape(checked.shape)
    np.testing.assert_array_equal(checked, expected)
    assert np.shares_memory(checked, pixels) == image.is_arranged(shape) == (image is not PLANES)


@pytest.mark.parametrize("image", [GREY, FLAT, PLANES, FIVE])
def test_pixels_with_channels_last_are_taken_as_they_are(image: ImageInput) -> None:
    pixels = numbered(2, 4, 6, image.channels)
    assert np.shares_memory(check_pixels(pixels, image=image), pixels)


def test_one_channel_needs_no_axis() -> None:
    assert check_pixels(numbered(2, 4, 6), image=GREY).shape == (2, 4, 6, 1)
    assert check_pixels(numbered(2, 1, 4, 6), image=ImageInput(1, None, "NCHW")).shape == (2, 4, 6, 1)


def test_floats_are_rounded_in_every_layout() -> None:
    pixels = numbered(2, 3, 4, 6).astype(np.float32) / 255
    checked = check_pixels(pixels, PixelRange.UNIT, PLANES)
    np.testing.assert_array_equal(checked, numbered(2, 3, 4, 6).transpose(0, 2, 3, 1))


@pytest.mark.parametrize(
    ("image", "shape"),
    [
        (RGB, (2, 4, 6, 1)),
        (RGB, (2, 3, 4, 6)),
        (RGB, (4, 6, 3)),
        (GREY, (2, 4, 6, 3)),
        (GREY, (4, 6)),
        (PLANES, (2, 4, 6, 5)),
        (FIVE, (2, 5, 4, 6)),
        (FIVE, (0, 4, 6, 5)),
    ],
)
def test_pixels_of_another_shape_are_refused(image: ImageInput, shape: tuple[int, ...]) -> None:
    with pytest.raises(InvalidArgument) as refused:
        check_pixels(np.zeros(shape, np.uint8), image=image)
    assert refused.value.field == "pixels"
    assert image.text() in str(refused.value)


@pytest.mark.parametrize(
    ("image", "text"),
    [(RGB, "[n, 4, width, 3]"), (FLAT, "[n, 4, width]"), (PLANES, "[n, 3, 4, width]")],
)
def test_the_shape_in_words_is_the_declared_one(image: ImageInput, text: str) -> None:
    assert image.text(4) == text
