"""Pixels of 16 bits and of floats: decoded, resized and checked."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from numpy.typing import NDArray
from PIL import Image
from tests.server.images.encoded import LIMITS, encode

from xlaserve.config import Color, Fit, ResizeFilter, ResizeLibrary, ResizeSettings
from xlaserve.errors import InvalidArgument
from xlaserve.images.decoder import check_pixels, decode
from xlaserve.images.frame import place
from xlaserve.images.image_input import ImageInput, PixelType

GREY16 = np.random.default_rng(1).integers(0, 65536, (37, 53)).astype(np.uint16)
RGB = np.random.default_rng(2).integers(0, 256, (37, 53, 3)).astype(np.uint8)
PILLOW, TENSORFLOW = ResizeLibrary.PILLOW, ResizeLibrary.TENSORFLOW
DEEP: list[PixelType] = ["uint16", "float32"]


def decoded(
    pixels: Any,
    size: tuple[int, int],
    dtype: PixelType,
    resize: ResizeSettings,
    color: Color = Color.GREY,
    *,
    fit: Fit = Fit.RESIZE,
) -> NDArray[Any]:
    where = partial(place, input_height=size[0], input_width=size[1], fit=fit)
    found = decode(encode(Image.fromarray(pixels)), where, LIMITS, color=color, resize=resize, dtype=dtype)
    assert found.pixels.dtype == dtype
    assert not found.warning
    return found.pixels


@pytest.mark.parametrize("library", ResizeLibrary)
@pytest.mark.parametrize("dtype", DEEP)
def test_all_bits_of_grey_pictures_stay(dtype: PixelType, library: ResizeLibrary) -> None:
    how = ResizeSettings(library=library)
    np.testing.assert_array_equal(decoded(GREY16, GREY16.shape, dtype, how)[..., 0], GREY16)
    in_colour = decoded(GREY16, GREY16.shape, dtype, how, Color.BGR)
    np.testing.assert_array_equal(in_colour, np.repeat(GREY16[..., np.newaxis], 3, axis=2))


@pytest.mark.parametrize("filter_", [ResizeFilter.NEAREST, ResizeFilter.BILINEAR, ResizeFilter.BICUBIC])
@pytest.mark.parametrize("pixels", [RGB, GREY16[..., np.newaxis]], ids=["rgb", "grey16"])
def test_floats_are_tensorflows_own_results(pixels: Any, filter_: ResizeFilter) -> None:
    how = ResizeSettings(library=TENSORFLOW, filter=filter_)
    color = Color.RGB if pixels.shape[2] == 3 else Color.GREY
    for size in ((20, 70), (60, 21)):
        wanted = tf.image.resize(pixels, size, method=filter_.value).numpy().astype(np.float32)
        got = decoded(pixels.squeeze(), size, "float32", how, color)
        np.testing.assert_array_equal(got, wanted)
        rounded = decoded(pixels.squeeze(), size, "uint16", how, color)
        np.testing.assert_array_equal(rounded, np.clip(np.rint(wanted), 0, 65535))


@pytest.mark.parametrize("filter_", [ResizeFilter.NEAREST, ResizeFilter.BILINEAR, ResizeFilter.LANCZOS])
def test_pillow_resizes_in_the_mode_of_the_picture(filter_: ResizeFilter) -> None:
    """Levels stay whole, as Pillow gives them; grey of 16 bits is resized as floats."""
    how, size = ResizeSettings(library=PILLOW, filter=filter_), (20, 70)
    resampling = Image.Resampling[filter_.name]
    levels = np.asarray(Image.fromarray(RGB).resize(size[::-1], resampling))
    floats = np.asarray(Image.fromarray(GREY16.astype(np.float32)).resize(size[::-1], resampling))
    np.testing.assert_array_equal(decoded(RGB, size, "float32", how, Color.RGB), levels)
    np.testing.assert_array_equal(decoded(GREY16, size, "float32", how)[..., 0], floats)
    rounded = np.clip(np.rint(floats), 0, 65535)
    np.testing.assert_array_equal(decoded(GREY16, size, "uint16", how)[..., 0], rounded)


@pytest.mark.parametrize("dtype", DEEP)
def test_borders_are_levels(dtype: PixelType) -> None:
    got = decoded(GREY16, (53, 53), dtype, ResizeSettings(library=PILLOW), fit=Fit.LETTERBOX)
    assert {*np.unique(got[0])} == {114 * 257 if dtype == "uint16" else 114}
    np.testing.assert_array_equal(got[8 : 8 + len(GREY16), :, 0], GREY16)


@pytest.mark.parametrize("dtype", DEEP)
@pytest.mark.parametrize("given", ["uint8", "uint16", "int32", "int64", "float16", "float32", "float64"])
def test_numbers_keep_their_values(given: str, dtype: PixelType) -> None:
    numbers = np.arange(200).reshape(1, 10, 20).astype(given)
    got = check_pixels(numbers, image=ImageInput(1, Color.GREY, dtype=dtype))
    assert got.dtype == dtype
    np.testing.assert_array_equal(got[..., 0], numbers)


@pytest.mark.parametrize("dtype", DEEP)
def test_numbers_of_the_own_type_are_not_copied(dtype: PixelType) -> None:
    numbers = np.ones((1, 4, 5, 3), dtype)
    assert np.shares_memory(check_pixels(numbers, image=ImageInput(dtype=dtype)), numbers)
    first = np.ascontiguousarray(numbers.transpose(0, 3, 1, 2))
    np.testing.assert_array_equal(check_pixels(first, image=ImageInput(axes="NCHW", dtype=dtype)), numbers)


@pytest.mark.parametrize(
    ("dtype", "number", "given"),
    [
        ("float32", np.nan, "float32"),
        ("float32", np.inf, "float16"),
        ("float32", 1e300, "float64"),
        ("uint16", -1, "int16"),
        ("uint16", 65536, "int32"),
        ("uint16", np.nan, "float32"),
    ],
)
def test_numbers_beyond_the_type_are_refused(dtype: PixelType, number: float, given: str) -> None:
    numbers = np.zeros((1, 2, 2, 3), given)
    numbers[0, 1, 1, 2] = number
    with pytest.raises(InvalidArgument):
        check_pixels(numbers, image=ImageInput(dtype=dtype))
