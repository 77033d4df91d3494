"""Pixels that clients send, checked and made uint8."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from xlaserve.config import PixelRange
from xlaserve.errors import InvalidArgument
from xlaserve.images.decoder import check_pixels


def test_uint8_pixels_are_viewed_and_not_copied() -> None:
    pixels = np.zeros((2, 4, 5, 3), np.uint8)
    assert np.shares_memory(check_pixels(pixels), pixels)
    pixels.flags.writeable = False
    assert np.shares_memory(check_pixels(pixels), pixels)


@given(hnp.arrays(np.uint8, st.tuples(*[st.integers(1, 4)] * 3, st.just(3))), st.sampled_from([np.int32, np.float32]))
@settings(deadline=None)
def test_whole_levels_survive_any_type(pixels: NDArray[np.uint8], dtype: type) -> None:
    checked = check_pixels(pixels.astype(dtype))
    assert checked.dtype == np.uint8
    np.testing.assert_array_equal(checked, pixels)


@given(hnp.arrays(np.float32, (1, 2, 2, 3), elements=st.floats(0, 255, width=32)))
@settings(deadline=None)
def test_float_pixels_are_rounded_to_the_nearest_level(pixels: NDArray[np.float32]) -> None:
    pixels[0, 0, 0, 0] = 2  # else they may be fractions of at most 1
    assert np.abs(check_pixels(pixels).astype(np.float64) - pixels).max() <= 0.5


@pytest.mark.parametrize(
    ("value", "dtype", "got"),
    [
        (np.nan, np.float32, "nan"),
        (np.inf, np.float32, "inf"),
        (-np.inf, np.float32, "-inf"),
        (-0.25, np.float32, "-0.25"),
        (255.5, np.float32, "255.5"),
        (-1, np.int32, "-1"),
        (256, np.int32, "256"),
        (2**31 - 1, np.int32, "2147483647"),
    ],
)
def test_values_outside_0_to_255_are_refused_wherever_they_are(value: float, dtype: type, got: str) -> None:
    pixels: NDArray[np.generic] = np.full((2, 3, 3, 3), 7, dtype)
    pixels[1, 2, 0, 1] = value
    with pytest.raises(InvalidArgument) as refusal:
        check_pixels(pixels)
    assert refusal.value.field == "pixels"
    assert str(refusal.value) == f"pixels: expected values from 0 to 255, got {got}"


def test_fractions_of_at_most_1_are_refused_with_the_ways_out() -> None:
    pixels = np.linspace(0, 1, 24, dtype=np.float32).reshape(2, 2, 2, 3)
    with pytest.raises(
        InvalidArgument, match=r"pixel_range 0\.\.1 as a parameter .* setting.*, got fractions from 0 to 1"
    ):
        check_pixels(pixels)


@pytest.mark.parametrize("pixel_range", PixelRange)
def test_many_floats_become_levels_beside_little_memory(pixel_range: PixelRange) -> None:
    levels = np.random.default_rng(0).integers(0, 256, (3, 300, 301, 3), np.uint8)
    pixels = levels.astype(np.float32) / (255 if pixel_range is PixelRange.UNIT else 1)
    tracemalloc.start()
    try:
        checked = check_pixels(pixels, pixel_range)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    np.testing.assert_array_equal(checked, levels)
    assert peak_bytes < levels.nbytes + pixels.nbytes / 2


def test_a_fraction_after_many_whole_levels_of_at_most_1_is_found() -> None:
    pixels = np.zeros((3, 300, 301, 3), np.float32)
    pixels[-1, -1, -1, -1] = 0.5
    with pytest.raises(InvalidArgument, match=r"fractions from 0 to 0\.5"):
        check_pixels(pixels)


@pytest.mark.parametrize("dtype", [np.float32, np.int32, np.uint8])
@pytest.mark.parametrize("level", [0, 1])
def test_whole_levels_of_at_most_1_are_a_dark_image(dtype: type, level: int) -> None:
    np.testing.assert_array_equal(check_pixels(np.full((1, 2, 2, 3), level, dtype)), level)


@given(hnp.arrays(np.uint8, st.tuples(*[st.integers(1, 4)] * 3, st.just(3))))
@settings(deadline=None)
def test_levels_divided_by_255_are_the_same_image_where_the_range_says_so(pixels: NDArray[np.uint8]) -> None:
    np.testing.assert_array_equal(check_pixels(pixels.astype(np.float32) / 255, PixelRange.UNIT), pixels)


@pytest.mark.parametrize("value", [np.nan, np.inf, -0.25, 1.5, 255])
def test_values_outside_0_to_1_are_refused_where_that_is_the_range(value: float) -> None:
    pixels = np.full((1, 2, 2, 3), 0.5, np.float32)
    pixels[0, 1, 0, 2] = value
    with pytest.raises(InvalidArgument, match=f"pixels: expected values from 0 to 1, got {value:g}"):
        check_pixels(pixels, PixelRange.UNIT)


def test_integers_are_levels_whatever_the_range() -> None:
    for dtype in (np.uint8, np.int32):
        np.testing.assert_array_equal(check_pixels(np.full((1, 2, 2, 3), 200, dtype), PixelRange.UNIT), 200)


@pytest.mark.parametrize("shape", [(2, 3, 3), (0, 3, 3, 3), (1, 0, 3, 3), (1, 3, 3, 4), (1, 3, 3, 1), ()])
def test_pixels_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(InvalidArgument, match=r"pixels: expected shape \[n, height, width, 3\]"):
        check_pixels(np.zeros(shape, np.uint8))


@pytest.mark.parametrize("dtype", [np.float64, np.int64, np.bool_, np.uint16])
def test_pixels_of_another_type_are_refused(dtype: type) -> None:
    with pytest.raises(InvalidArgument, match="pixels: expected UINT8, INT32, FP16 or FP32, got"):
        check_pixels(np.zeros((1, 2, 2, 3), dtype))
