"""Resizing compared with the libraries that it follows."""

from __future__ import annotations

import io
import tracemalloc
from collections.abc import Iterator
from functools import partial

import keras
import numpy as np
import pytest
import tensorflow as tf
from numpy.typing import NDArray
from PIL import Image, ImageOps
from tests.server.images.encoded import LIMITS, decode_resized, encode

from xlaserve.config import Color, Decoding, Fit, ResizeFilter, ResizeLibrary, ResizeSettings
from xlaserve.config.resize_settings import FILTERS
from xlaserve.images import decoder as image_decoder
from xlaserve.images.frame import Window, place
from xlaserve.images.resizing.resize import Resized, array, by_tensorflow, of_pixels

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


def whole(image: Image.Image, height: int, width: int) -> Resized:
    return Resized((0, 0, *image.size), width, height, Window(0, 0, width, height))


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
        got = by_tensorflow(array(image), whole(image, height, width), how, np.float32)
        assert got.dtype == np.float32
        if filter_ in EXACT:
            np.testing.assert_array_equal(got, wanted)
        else:
            np.testing.assert_allclose(got, wanted, rtol=0, atol=255 * 1e-6)
        rounded = by_tensorflow(array(image), whole(image, height, width), how, np.uint8)
        assert rounded.dtype == np.uint8
        np.testing.assert_array_equal(rounded, np.clip(np.rint(got), 0, 255))


def test_long_sides_are_resized_as_tensorflow_does() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (3, 9000, 3), dtype=np.uint8)
    how = ResizeSettings(library=ResizeLibrary.TENSORFLOW, antialias=True)
    wanted = tf.image.resize(pixels, (5, 7), antialias=True).numpy()
    image = Image.fromarray(pixels)
    np.testing.assert_array_equal(by_tensorflow(array(image), whole(image, 5, 7), how, np.float32), wanted)


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
    exact, fast = (
        decode_resized(data, height=64, width=64, resize=how, decoding=way).astype(int)
        for way in (Decoding.EXACT, Decoding.FAST)
    )
    assert abs(exact[32].sum() - fast[32].sum()) < 3 * 255 * 0.6  # not by as much as a pixel of the model


@pytest.mark.parametrize("how", [Image.Resampling.BILINEAR, Image.Resampling.BICUBIC, Image.Resampling.LANCZOS])
def test_a_crop_is_that_of_pillows_fit(how: Image.Resampling) -> None:
    resize = ResizeSettings(library=ResizeLibrary.PILLOW, filter=ResizeFilter(how.name.lower()))
    for pixels, (height, width) in images(3):
        image = Image.fromarray(pixels)
        wanted = ImageOps.fit(image, (width, height), how)
        where = partial(place, input_height=height, input_width=width, fit=Fit.CROP)
        got = image_decoder.decode(encode(image), where, LIMITS, resize=resize)
        np.testing.assert_array_equal(got.pixels, np.asarray(wanted))


@pytest.mark.parametrize("filter_", [ResizeFilter.NEAREST, ResizeFilter.BILINEAR, ResizeFilter.BICUBIC])
def test_a_crop_in_whole_pixels_is_that_of_keras(filter_: ResizeFilter) -> None:
    resize = ResizeSettings(library=ResizeLibrary.TENSORFLOW, filter=filter_)
    for pixels, (height, width) in images(3):
        layer = keras.layers.Resizing(height, width, interpolation=filter_.value, crop_to_aspect_ratio=True)
        wanted = np.clip(np.rint(np.asarray(layer(pixels.astype(np.float32)))), 0, 255)
        where = partial(place, input_height=height, input_width=width, fit=Fit.CROP, cuts_pixels=True)
        got = image_decoder.decode(encode(Image.fromarray(pixels)), where, LIMITS, resize=resize)
        np.testing.assert_array_equal(got.pixels, wanted)


@pytest.mark.parametrize("library", ResizeLibrary)
@pytest.mark.parametrize("filter_", [ResizeFilter.NEAREST, ResizeFilter.BILINEAR, ResizeFilter.BICUBIC])
def test_a_centre_crop_is_one_of_the_resized_image(library: ResizeLibrary, filter_: ResizeFilter) -> None:
    resize = ResizeSettings(library=library, filter=filter_)
    random = np.random.default_rng(9)
    for _ in range(SIZES):
        height, width = random.integers(20, 200, 2).tolist()
        image = Image.fromarray(random.integers(0, 256, (height, width, 3), dtype=np.uint8))
        # As torchvision's Resize(64) and CenterCrop(56) compute them.
        across, down = (64, 64 * height // width) if width < height else (64 * width // height, 64)
        left, top = round((across - 56) / 2.0), round((down - 56) / 2.0)
        resized = decode_resized(encode(image), height=down, width=across, resize=resize)
        where = partial(place, input_height=56, input_width=56, fit=Fit.CENTER_CROP, shorter_side=64)
        got = image_decoder.decode(encode(image), where, LIMITS, resize=resize)
        np.testing.assert_array_equal(got.pixels, resized[top : top + 56, left : left + 56])


def test_long_images_are_cut_without_memory_for_the_whole() -> None:
    image = Image.fromarray(np.full((2, 60_000, 3), 7, np.uint8))
    for library in ResizeLibrary:
        where = partial(place, input_height=224, input_width=224, fit=Fit.CENTER_CROP)
        got = image_decoder.decode(encode(image), where, LIMITS, resize=ResizeSettings(library=library))
        np.testing.assert_array_equal(got.pixels, 7)


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


@pytest.mark.parametrize("library", ResizeLibrary)
@pytest.mark.parametrize("antialias", [False, True])
def test_antialiasing_is_set_only_for_filters_with_a_choice(library: ResizeLibrary, *, antialias: bool) -> None:
    for filter_ in FILTERS[library]:
        how = ResizeSettings.of(library, filter_, antialias=antialias)
        has_choice = library is ResizeLibrary.TENSORFLOW and filter_ not in (ResizeFilter.NEAREST, ResizeFilter.AREA)
        assert (how.library, how.filter) == (library, filter_)
        assert how.antialias is (True if has_choice and antialias else None)


@pytest.mark.parametrize(
    "how",
    [
        ResizeSettings(library=ResizeLibrary.TENSORFLOW, filter=ResizeFilter.AREA),
        ResizeSettings(library=ResizeLibrary.TENSORFLOW, filter=ResizeFilter.LANCZOS5, antialias=True),
        ResizeSettings(library=ResizeLibrary.OPENCV, filter=ResizeFilter.AREA),
    ],
    ids=str,
)
def test_weights_of_each_pixel_of_a_long_side_are_not_kept(how: ResizeSettings) -> None:
    widths = range(50_001, 50_007)
    strips = [np.zeros((4, width, 1), np.uint8) for width in widths]
    tracemalloc.start()
    try:
        for strip in strips:
            of_pixels(strip, Resized((0, 0, strip.shape[1], 4), 7, 3, Window(0, 0, 7, 3)), how, np.uint8)
        held_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held_bytes < 4 * widths[0], "less than a float for each pixel of one side"
