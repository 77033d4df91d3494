"""Colours of decoded images: modes, transparency, CMYK and 16 bits."""

from __future__ import annotations

import io
import tracemalloc
from functools import partial

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from tests.server.images.encoded import LIMITS, UPRIGHT, decode_and_place, decode_as_is, encode

from xlaserve.config import Fit, Grey16, Window
from xlaserve.images import decoder as image_module
from xlaserve.images.decoder import ImageLimits
from xlaserve.images.frame import place


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        pytest.param(Image.new("1", (2, 2), 1), (255, 255, 255), id="1"),
        pytest.param(Image.new("L", (2, 2), 77), (77, 77, 77), id="L"),
        pytest.param(Image.new("LA", (2, 2), (77, 10)), (77, 77, 77), id="LA"),
        pytest.param(Image.new("RGBA", (2, 2), (10, 20, 30, 0)), (10, 20, 30), id="RGBA"),
        pytest.param(Image.fromarray(np.full((2, 2), 0x8012, np.uint16)), (0x80, 0x80, 0x80), id="I;16"),
    ],
)
def test_other_modes_become_rgb_and_lose_transparency(image: Image.Image, expected: tuple[int, ...]) -> None:
    pixels = decode_as_is(encode(image))
    assert {tuple(pixel) for pixel in pixels.reshape(-1, 3).tolist()} == {expected}


@pytest.mark.parametrize("transparency", [0, b"\0\x80"], ids=["one entry", "alpha for each entry"])
def test_a_palette_becomes_its_colours(transparency: int | bytes) -> None:
    image = Image.new("P", (2, 1))
    image.putpalette([10, 20, 30, 40, 50, 60])
    image.putpixel((1, 0), 1)
    pixels = decode_as_is(encode(image, transparency=transparency))
    assert pixels.tolist() == [[[10, 20, 30], [40, 50, 60]]]


@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_a_transparent_colour_is_kept_as_a_colour(mode: str) -> None:
    colour = 9 if mode == "L" else (9, 9, 9)
    pixels = decode_as_is(encode(Image.new(mode, (2, 2), colour), transparency=colour))
    assert set(pixels.ravel().tolist()) == {9}


def test_cmyk_becomes_rgb() -> None:
    pixels = decode_as_is(encode(Image.new("CMYK", (8, 8), (255, 0, 0, 0)), "JPEG", quality=100))
    assert np.abs(pixels.astype(int) - (0, 255, 255)).max() <= 3


def without_adobe_marker(jpeg: bytes) -> bytes:
    at = jpeg.index(b"\xff\xee")
    return jpeg[:at] + jpeg[at + 2 + int.from_bytes(jpeg[at + 2 : at + 4], "big") :]


def test_cmyk_is_taken_for_inverted_with_and_without_adobes_marker() -> None:
    """Pillow's reading; the reasons are in ADR 2. Black and white would change places."""
    marked = encode(UPRIGHT.convert("CMYK"), "JPEG", quality=100)
    bare = without_adobe_marker(marked)
    assert b"Adobe" in marked
    assert b"Adobe" not in bare
    with Image.open(io.BytesIO(bare)) as image:
        assert "adobe" not in image.info
        expected = np.asarray(image.convert("RGB"))
    np.testing.assert_array_equal(decode_as_is(bare), expected)
    np.testing.assert_array_equal(decode_as_is(bare), decode_as_is(marked))
    assert np.abs(decode_as_is(bare).astype(int) - np.asarray(UPRIGHT)).mean() < 12


def test_all_16_bit_levels_scale_instead_of_clipping() -> None:
    levels = np.arange(65_536, dtype=np.uint16).reshape(256, 256)
    pixels = decode_as_is(encode(Image.fromarray(levels)))
    np.testing.assert_array_equal(pixels[..., 0], levels >> 8)


def levels_of(values: NDArray[np.uint16], grey16: Grey16 | Window | None) -> NDArray[np.uint8]:
    where = partial(place, input_height=values.shape[0], input_width=values.shape[1], fit=Fit.REJECT)
    pixels = image_module.decode(encode(Image.fromarray(values)), where, LIMITS, grey16=grey16).pixels
    assert (pixels == pixels[..., :1]).all()
    return pixels[..., 0]


EVERY_VALUE = np.arange(65_536, dtype=np.uint16).reshape(256, 256)


def test_16_bit_grey_is_scaled_by_each_images_largest_value() -> None:
    values = EVERY_VALUE[:16]  # 0..4095
    levels = levels_of(values, Grey16.LARGEST)
    np.testing.assert_array_equal(levels, np.rint(values / 4095 * 255))
    assert (levels.min(), levels.max()) == (0, 255)
    assert levels_of(np.zeros((2, 2), np.uint16), Grey16.LARGEST).max() == 0
    assert levels_of(np.full((2, 2), 9, np.uint16), Grey16.LARGEST).min() == 255


@pytest.mark.parametrize("window", [(0, 4095), (0, 65_535), (1000, 1001), (40_000, 65_535)])
def test_16_bit_grey_outside_of_a_window_is_black_or_white(window: Window) -> None:
    low, high = window
    expected = np.rint(np.clip((EVERY_VALUE.astype(float) - low) / (high - low), 0, 1) * 255)
    assert np.abs(levels_of(EVERY_VALUE, window) - expected).max() <= 1  # where halves round
    assert (levels_of(EVERY_VALUE, window) != expected).mean() < 0.001


def test_16_bit_grey_is_its_upper_byte_where_nobody_chose_and_that_is_said() -> None:
    for grey16, warning in ((None, image_module.GREY16_WARNING), (Grey16.HIGH_BYTE, "")):
        np.testing.assert_array_equal(levels_of(EVERY_VALUE, grey16), EVERY_VALUE >> 8)
        where = partial(place, input_height=256, input_width=256, fit=Fit.REJECT)
        decoded = image_module.decode(encode(Image.fromarray(EVERY_VALUE)), where, LIMITS, grey16=grey16)
        assert decoded.warning == warning
    assert warning.isascii()
    assert not decode_and_place(encode(UPRIGHT.convert("L")), height=15, width=12, fit=Fit.REJECT).warning


def test_a_window_over_many_pixels_takes_little_memory_besides() -> None:
    values = np.broadcast_to(EVERY_VALUE[:1], (2000, 256))
    data, limits = encode(Image.fromarray(np.ascontiguousarray(values))), ImageLimits(1 << 24, 1 << 20)
    tracemalloc.start()
    try:
        where = partial(place, input_height=2000, input_width=256, fit=Fit.REJECT)
        image_module.decode(data, where, limits, grey16=(0, 255))
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 8 * values.size + (1 << 20)
