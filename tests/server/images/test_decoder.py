"""Sizes, orientation and fit of decoded images."""

from __future__ import annotations

import io
import struct
import warnings
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray
from PIL import Image, ImageOps
from tests.server.images.encoded import FORMATS, LIMITS, LOSSLESS, UPRIGHT, decode, decode_and_place, encode

from xlaserve.config import Fit
from xlaserve.errors import InvalidArgument
from xlaserve.images import decoder
from xlaserve.images.frame import place
from xlaserve.images.image_input import PixelType


@pytest.mark.parametrize("format", LOSSLESS)
def test_pixels_of_a_lossless_image_of_the_right_size_come_out_unchanged(format: str) -> None:
    pixels = decode(encode(UPRIGHT, format, **LOSSLESS[format]), height=15, width=12, limits=LIMITS)
    assert pixels.dtype == np.uint8
    np.testing.assert_array_equal(pixels, np.asarray(UPRIGHT))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("height", "width"), [(1, 1), (5, 40), (40, 5), (224, 224)])
def test_an_image_is_stretched_as_pillows_bilinear_does(format: str, height: int, width: int) -> None:
    data = encode(UPRIGHT, format)
    with Image.open(io.BytesIO(data)) as image:
        expected = np.asarray(image.convert("RGB").resize((width, height), Image.Resampling.BILINEAR))
    np.testing.assert_array_equal(decode(data, height=height, width=width, limits=LIMITS), expected)


def test_shrinking_weighs_every_pixel() -> None:
    fine_stripes = np.zeros((64, 64, 3), np.uint8)
    fine_stripes[:, ::2] = 200
    shrunk = decode(encode(Image.fromarray(fine_stripes)), height=4, width=4, limits=LIMITS)
    assert np.abs(shrunk.astype(int) - 100).max() <= 4


@given(
    pixels=hnp.arrays(np.uint8, st.tuples(st.integers(1, 9), st.integers(1, 9), st.just(3))),
    height=st.integers(1, 12),
    width=st.integers(1, 12),
)
@settings(max_examples=50, deadline=None)
def test_a_result_has_the_requested_size_and_no_value_beyond_the_images(
    pixels: NDArray[np.uint8], height: int, width: int
) -> None:
    result = decode(encode(Image.fromarray(pixels)), height=height, width=width, limits=LIMITS)
    assert result.shape == (height, width, 3)
    assert pixels.min() <= result.min()
    assert result.max() <= pixels.max()


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("orientation", range(1, 9))
def test_an_image_is_turned_upright(format: str, orientation: int) -> None:
    turn_back = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}  # Image.Transpose that the turn upright undoes
    stored = UPRIGHT.transpose(Image.Transpose(turn_back[orientation])) if orientation > 1 else UPRIGHT
    exif = Image.Exif()
    exif[0x0112] = orientation
    options: dict[str, object] = LOSSLESS.get(format, {"quality": 100, "subsampling": 0})
    pixels = decode(encode(stored, format, exif=exif, **options), height=15, width=12, limits=LIMITS)
    tolerance = 6 if format == "JPEG" else 0
    assert np.abs(pixels.astype(int) - np.asarray(UPRIGHT)).max() <= tolerance


@st.composite
def exif_blocks(draw: st.DrawFn) -> bytes:
    """EXIF as cameras and editors may write it, the entry of the orientation of any kind of integer."""
    head = draw(st.sampled_from([b"II*\0", b"MM\0*", b"II\0*", b"MM*\0"]))
    order = "<" if head[:2] == b"II" else ">"
    kind, letter = draw(st.sampled_from([(1, "B"), (3, "H"), (4, "I"), (6, "b"), (8, "h"), (9, "i"), (13, "I")]))
    values = draw(st.lists(st.integers(0, 9) | st.just(0x60 + 6), min_size=1, max_size=3))
    data = struct.pack(f"{order}{len(values)}{letter}", *values)
    tags = draw(st.lists(st.sampled_from([0x0112, 0x0110, 0x0128]), min_size=1, max_size=3))
    elsewhere = 8 + 2 + 12 * len(tags) + 4
    table = struct.pack(f"{order}H", len(tags))
    for tag in tags:
        if tag == 0x0112:
            field = data.ljust(4, b"\0") if len(data) <= 4 else struct.pack(f"{order}I", elsewhere)
            table += struct.pack(f"{order}HHI", tag, kind, len(values)) + field
        else:
            table += struct.pack(f"{order}HHIHxx", tag, 3, 1, 2)
    whole = head + struct.pack(f"{order}I", 8) + table + bytes(4) + data
    prefix = draw(st.sampled_from([b"", b"Exif\0\0", b"Exif\0\0" * 2]))
    return prefix + whole[: draw(st.none() | st.integers(8, 60))]


@given(exif=exif_blocks(), format=st.sampled_from(["JPEG", "PNG"]))
@settings(max_examples=400, deadline=None)
def test_an_image_is_turned_as_pillow_turns_it_whatever_integers_say_so(exif: bytes, format: str) -> None:
    data = encode(UPRIGHT, format, exif=exif)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow's, about an entry that is cut off
        with Image.open(io.BytesIO(data)) as image:
            expected = np.asarray(ImageOps.exif_transpose(image))
    np.testing.assert_array_equal(
        decode(data, height=expected.shape[0], width=expected.shape[1], limits=LIMITS), expected
    )


@pytest.mark.parametrize(
    "exif",
    [
        b"",
        b"Exif\0\0",
        b"Exif\0\0MM\0*\xff\xff\xff\xff",
        b"Exif\0\0II*\0\x08\0\0\0\xff\xff\x12\x01",
        b"Exif\0\0II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0\x63\0\0\0",
        b"not EXIF at all",
    ],
)
@pytest.mark.parametrize("format", FORMATS)
def test_a_damaged_exif_does_not_spoil_the_image(format: str, exif: bytes) -> None:
    assert decode(encode(UPRIGHT, format, exif=exif), height=15, width=12, limits=LIMITS).shape == (15, 12, 3)


@pytest.mark.parametrize("format", ["PNG", "WEBP"])
def test_of_an_animation_the_first_frame_counts(format: str) -> None:
    first, second = Image.new("RGB", (6, 6), (200, 0, 0)), Image.new("RGB", (6, 6), (0, 200, 0))
    data = encode(first, format, save_all=True, append_images=[second], duration=10, **LOSSLESS[format])
    assert decode(data, height=6, width=6, limits=LIMITS)[3, 3].tolist() == [200, 0, 0]


def test_a_letterboxed_image_is_centred_on_grey() -> None:
    """12 x 15 pixels in 20 x 60: enlarged by 4/3 to 16 x 20, 22 columns free on either side."""
    pixels, frame, _ = decode_and_place(encode(UPRIGHT), height=20, width=60, fit=Fit.LETTERBOX)
    expected = np.asarray(UPRIGHT.resize((16, 20), Image.Resampling.BILINEAR))
    np.testing.assert_array_equal(pixels[:, 22:38], expected)
    assert set(np.delete(pixels, np.s_[22:38], axis=1).ravel().tolist()) == {114}
    assert (frame.height, frame.width) == (15, 12)


@pytest.mark.parametrize(("dtype", "grey"), [("uint8", 114), ("uint16", 114 * 257), ("float32", 114)])
def test_the_grey_of_a_letterbox_is_in_proportion_to_the_depth(dtype: PixelType, grey: int) -> None:
    for border, level in ((None, grey), (255, 255)):
        to = partial(place, input_height=20, input_width=60, fit=Fit.LETTERBOX, border=border)
        pixels, *_ = decoder.decode(encode(UPRIGHT), to, LIMITS, dtype=dtype)
        assert pixels.dtype == dtype
        assert set(np.delete(pixels, np.s_[22:38], axis=1).ravel().tolist()) == {level}


def test_a_padded_image_stands_top_left_on_black_as_it_is() -> None:
    pixels, *_ = decode_and_place(encode(UPRIGHT), height=20, width=60, fit=Fit.PAD)
    np.testing.assert_array_equal(pixels[:15, :12], np.asarray(UPRIGHT))
    assert not pixels[15:].any()
    assert not pixels[:, 12:].any()


def test_a_padded_image_that_is_too_large_is_shrunk_as_a_whole() -> None:
    pixels, *_ = decode_and_place(encode(UPRIGHT), height=5, width=60, fit=Fit.PAD)
    np.testing.assert_array_equal(pixels[:, :4], np.asarray(UPRIGHT.resize((4, 5), Image.Resampling.BILINEAR)))
    assert not pixels[:, 4:].any()


def test_fit_reject_takes_the_models_size_and_no_other() -> None:
    pixels, *_ = decode_and_place(encode(UPRIGHT), height=15, width=12, fit=Fit.REJECT)
    np.testing.assert_array_equal(pixels, np.asarray(UPRIGHT))
    with pytest.raises(InvalidArgument) as refusal:
        decode_and_place(encode(UPRIGHT), height=12, width=15, fit=Fit.REJECT)
    expected = "image: expected 15 x 12 pixels, as the model's fit is reject, got 12 x 15"
    assert str(refusal.value) == expected


@pytest.mark.parametrize("fit", [Fit.RESIZE, Fit.LETTERBOX, Fit.PAD])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_boxes_are_of_the_upright_image_however_it_was_stored(fit: Fit, orientation: int) -> None:
    """A white patch on black, found in the model's pixels and taken back, is where it was drawn."""
    upright = Image.new("L", (120, 60))
    upright.paste(255, (80, 10, 110, 20))
    pixels, frame, _ = decode_and_place(turned(upright, orientation), height=64, width=64, fit=fit)
    assert (frame.height, frame.width) == (60, 120)
    inside = np.argwhere(pixels[..., 0] > 127)
    # The border of a letterbox is darker than what is found.
    (y_min, x_min), (y_max, x_max) = inside.min(axis=0), inside.max(axis=0) + 1
    box = frame.to_original(np.array([[x_min, y_min, x_max, y_max]], np.float32))
    np.testing.assert_allclose(box, [[80, 10, 110, 20]], atol=1.0)


def turned(upright: Image.Image, orientation: int) -> bytes:
    """Returns a PNG file stored so that EXIF `orientation` turns it upright."""
    turn_back = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}  # Image.Transpose that the turn upright undoes
    stored = upright.transpose(Image.Transpose(turn_back[orientation])) if orientation > 1 else upright
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encode(stored, exif=exif)
