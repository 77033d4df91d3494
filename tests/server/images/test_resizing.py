"""Resizing compared with the libraries that it follows."""

from __future__ import annotations

import io
from collections.abc import Iterator

import numpy as np
import pytest
import tensorflow as tf
from numpy.typing import NDArray
from PIL import Image, ImageOps
from tests.server.images.encoded import decode_resized, encode

from xlaserve.config import Color, Decoding, ResizeFilter, ResizeLibrary, ResizeSettings
from xlaserve.config.resize_settings import FILTERS
from xlaserve.images.resizing.resize import by_tensorflow

SIZES = 25
EXACT = (
    ResizeFilter.NEAREST,
    ResizeFilter.BILINEAR,
    ResizeFilter.BICUBIC,
    ResizeFilter.AREA,
    ResizeFilter.MITCHELLCUBIC,
)
"""Filters whose weights need no sine or exponential, which mathematical libraries round differently."""


def images(channels: int, *, most: int = 120) -> Iterator[tuple[NDArray[np.uint8], tuple[int, int]]]:
    """Pixels of random sizes with a random size to bring each to, a few of them their own."""
    random = np.random.default_rng(channels)
    for number in range(SIZES):
        height, width, to_height, to_width = random.integers(1, most, 4).tolist()
        if number % 8 == 0:
            to_height, to_width = height, width
        yield random.integers(0, 256, (height, width, channels), dtype=np.uint8), (to_height, to_width)


def photograph() -> Image.Image:
    return Image.effect_mandelbrot((500, 375), (-2, -1.2, 1, 1.2), 80).convert("RGB")


@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize("antialias", [False, True])
@pytest.mark.parametrize("filter_", FILTERS[ResizeLibrary.TENSORFLOW])
def test_pixels_are_those_of_tensorflow(filter_: ResizeFilter, antialias: bool, channels: int) -> None:
    given = None if filter_ in (ResizeFilter.NEAREST, ResizeFilter.AREA) else antialias
    how = ResizeSettings(library=ResizeLibrary.TENSORFLOW, filter=filter_, antialias=given)
    for pixels, (height, width) in images(channels):
        wanted = tf.image.resize(pixels, (height, width), method=filter_.value, antialias=antialias).numpy()
        image = Image.fromarray(pixels[:, :, 0] if channels == 1 else pixels)
        got = by_tensorflow(image, (width, height), how, dtype=np.float32)
        assert got.dtype == np.float32
        if filter_ in EXACT:
            np.testing.assert_array_equal(got, wanted)
        else:
            np.testing.assert_allclose(got, wanted, rtol=0, atol=255 * 1e-6)
        rounded = by_tensorflow(image, (width, height), how)
        assert rounded.dtype == np.uint8
        np.testing.assert_array_equal(rounded, np.clip(np.rint(got), 0, 255))


def test_long_sides_are_resized_as_tensorflow_does() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (3, 9000, 3), dtype=np.uint8)
    how = ResizeSettings(library=ResizeLibrary.TENSORFLOW, antialias=True)
    wanted = tf.image.resize(pixels, (5, 7), antialias=True).numpy()
    np.testing.assert_array_equal(by_tensorflow(Image.fromarray(pixels), (7, 5), how, dtype=np.float32), wanted)


@pytest.mark.parametrize("filter_", FILTERS[ResizeLibrary.PILLOW])
def test_pixels_are_those_of_pillow(filter_: ResizeFilter) -> None:
    how = ResizeSettings(library=ResizeLibrary.PILLOW, filter=filter_)
    for pixels, (height, width) in images(3):
        image = Image.fromarray(pixels)
        wanted = np.asarray(image.resize((width, height), Image.Resampling[filter_.name]))
        np.testing.assert_array_equal(decode_resized(encode(image), height=height, width=width, resize=how), wanted)


@pytest.mark.parametrize("library", ResizeLibrary)
@pytest.mark.parametrize("orientation", range(1, 9))
def test_turned_images_are_resized_as_if_they_were_saved_upright(library: ResizeLibrary, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encode(photograph(), "PNG", exif=exif)
    with Image.open(io.BytesIO(data)) as image:
        upright = encode(ImageOps.exif_transpose(image))
    how = ResizeSettings(library=library)
    got, wanted = (decode_resized(one, height=90, width=70, resize=how).astype(int) for one in (data, upright))
    rounding = 1 if library is ResizeLibrary.PILLOW else 0  # which resizes rows first, and rounds between
    assert np.abs(got - wanted).max() <= rounding


def test_grey_images_of_colour_models_have_their_level_in_all_channels() -> None:
    grey = photograph().convert("L")
    how = ResizeSettings(library=ResizeLibrary.TENSORFLOW)
    got = decode_resized(encode(grey), height=31, width=44, resize=how)
    np.testing.assert_array_equal(got, decode_resized(encode(grey.convert("RGB")), height=31, width=44, resize=how))
    single = decode_resized(encode(grey), height=31, width=44, resize=how, color=Color.GREY)
    np.testing.assert_array_equal(got[:, :, :1], single)


@pytest.mark.parametrize("library", ResizeLibrary)
def test_images_that_are_reduced_in_decoding_are_not_moved(library: ResizeLibrary) -> None:
    edge = np.zeros((1027, 1027, 3), np.uint8)
    edge[:, 500:] = 255
    data = encode(Image.fromarray(edge), "JPEG", quality=95)
    how = ResizeSettings(library=library)
    exact, fast = (decode_resized(data, height=64, width=64, resize=how, decoding=way).astype(int) for way in Decoding)
    assert abs(exact[32].sum() - fast[32].sum()) < 3 * 255 * 0.6  # not by as much as a pixel of the model


@pytest.mark.parametrize(
    "wrong",
    [
        {"library": "tensorflow", "filter": "hamming"},
        {"library": "pillow", "filter": "area"},
        {"library": "pillow", "antialias": False},
        {"library": "tensorflow", "filter": "nearest", "antialias": True},
        {"library": "tensorflow", "filter": "area", "antialias": False},
    ],
)
def test_what_no_library_does_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="expected"):
        ResizeSettings.model_validate(wrong)


def test_each_library_antialiases_as_it_does_by_default() -> None:
    assert not ResizeSettings(library=ResizeLibrary.TENSORFLOW).is_antialiased
    assert ResizeSettings(library=ResizeLibrary.TENSORFLOW, antialias=True).is_antialiased
    assert ResizeSettings(library=ResizeLibrary.TENSORFLOW, filter=ResizeFilter.AREA).is_antialiased
    assert ResizeSettings(library=ResizeLibrary.PILLOW).is_antialiased
    assert not ResizeSettings(library=ResizeLibrary.PILLOW, filter=ResizeFilter.NEAREST).is_antialiased
