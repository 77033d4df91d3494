from __future__ import annotations

import io
import os
import struct
import subprocess
import sys
import time
import tracemalloc
import warnings
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray
from PIL import Image, ImageOps
from tests.server.jpegs import grey_jpeg

from xlaserve.config import Decoding, Fit, Grey16, PixelRange, Window
from xlaserve.errors import ImageTooLarge, InvalidArgument, InvalidImage
from xlaserve.images import decoder as image_module
from xlaserve.images.decoder import Decoded, ImageLimits, check_pixels
from xlaserve.images.frame import place

LIMITS = ImageLimits(max_image_bytes=1 << 20, max_image_pixels=4_000_000)
FORMATS = ("JPEG", "PNG", "WEBP")
LOSSLESS: dict[str, dict[str, object]] = {"PNG": {}, "WEBP": {"lossless": True}}
UPRIGHT = Image.fromarray(
    np.random.default_rng(0).integers(0, 256, (5, 4, 3), dtype=np.uint8).repeat(3, axis=0).repeat(3, axis=1)
)  # 15 high, 12 wide, no symmetry


def encode(image: Image.Image, format: str = "PNG", **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def decode_and_place(data: bytes, *, height: int, width: int, fit: Fit, limits: ImageLimits = LIMITS) -> Decoded:
    return image_module.decode(data, partial(place, input_height=height, input_width=width, fit=fit), limits)


def decode(data: bytes, *, height: int, width: int, limits: ImageLimits) -> NDArray[np.uint8]:
    return decode_and_place(data, height=height, width=width, fit=Fit.RESIZE, limits=limits).pixels


def decode_as_is(data: bytes, limits: ImageLimits = LIMITS) -> NDArray[np.uint8]:
    """Decodes to the size that the header states, so that nothing is resized."""
    with Image.open(io.BytesIO(data)) as image:
        return decode(data, height=image.height, width=image.width, limits=limits)


def chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png(width: int, height: int, *before_pixels: bytes, pixels: bytes = zlib.compress(b"\0\0\0\0")) -> bytes:
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(before_pixels) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def webp(kind: bytes, body: bytes) -> bytes:
    return b"RIFF" + struct.pack("<I", len(body) + 12) + b"WEBP" + kind + struct.pack("<I", len(body)) + body


# What comes out.


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
def test_the_result_has_the_asked_size_and_stays_within_the_values_of_the_image(
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


@pytest.mark.parametrize("format", ["PNG", "WEBP"])
def test_of_an_animation_the_first_frame_counts(format: str) -> None:
    first, second = Image.new("RGB", (6, 6), (200, 0, 0)), Image.new("RGB", (6, 6), (0, 200, 0))
    data = encode(first, format, save_all=True, append_images=[second], duration=10, **LOSSLESS[format])
    assert decode(data, height=6, width=6, limits=LIMITS)[3, 3].tolist() == [200, 0, 0]


# How it is fitted.


def test_a_letterboxed_image_is_centred_on_grey() -> None:
    """12 x 15 pixels in 20 x 60: enlarged by 4/3 to 16 x 20, 22 columns free on either side."""
    pixels, frame, _ = decode_and_place(encode(UPRIGHT), height=20, width=60, fit=Fit.LETTERBOX)
    expected = np.asarray(UPRIGHT.resize((16, 20), Image.Resampling.BILINEAR))
    np.testing.assert_array_equal(pixels[:, 22:38], expected)
    assert set(np.delete(pixels, np.s_[22:38], axis=1).ravel().tolist()) == {114}
    assert (frame.height, frame.width) == (15, 12)


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


# What is refused.


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "image: expected JPEG, PNG or WebP, got no bytes"),
        (b"Hello there", "image: expected JPEG, PNG or WebP, got 11 bytes that start with 'Hello th'"),
        (b"\n\x1b[2J\xff'", "image: expected JPEG, PNG or WebP, got 7 bytes that start with '..[2J.''"),
        (encode(UPRIGHT, "GIF")[:50], "image: expected JPEG, PNG or WebP, got a GIF (50 bytes)"),
    ],
)
def test_anything_else_is_refused_by_its_kind_or_by_what_it_starts_with(data: bytes, message: str) -> None:
    with pytest.raises(InvalidImage) as refusal:
        decode(data, height=8, width=8, limits=LIMITS)
    assert str(refusal.value) == message


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("kept", [0.1, 0.5, 0.8])
def test_a_truncated_image_is_refused_with_a_reason(format: str, kept: float) -> None:
    data = encode(UPRIGHT.resize((90, 90)), format)
    with pytest.raises(InvalidImage, match=r"expected a whole (JPEG|PNG|WebP) image, got \d+ bytes that are cut off$"):
        decode(data[: int(len(data) * kept)], height=8, width=8, limits=LIMITS)


@pytest.mark.parametrize("format", FORMATS)
def test_an_image_that_is_damaged_within_is_not_said_to_be_cut_off(format: str) -> None:
    data = bytearray(encode(UPRIGHT.resize((90, 90)), format))
    data[12:40] = bytes(28)
    with pytest.raises(InvalidImage, match=r"bytes that are damaged or of a rare kind$"):
        decode(bytes(data), height=8, width=8, limits=LIMITS)


@pytest.mark.parametrize("start", [b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"RIFF\0\0\0\0WEBP", b"RIFF\0\0\0\0WEBPVP8X"])
def test_a_signature_alone_is_refused(start: bytes) -> None:
    with pytest.raises(InvalidImage):
        decode(start, height=8, width=8, limits=LIMITS)


def test_too_many_encoded_bytes_are_refused() -> None:
    data = encode(UPRIGHT)
    with pytest.raises(ImageTooLarge) as refusal:
        decode(data, height=8, width=8, limits=ImageLimits(max_image_bytes=len(data) - 1, max_image_pixels=10**6))
    assert str(refusal.value) == (
        f"image: expected at most {len(data) - 1} encoded bytes (max_image_bytes), got {len(data)}"
    )
    assert decode(data, height=8, width=8, limits=ImageLimits(len(data), 10**6)).shape == (8, 8, 3)


JPEG_HEADER = b"\xff\xd8\xff\xc0\x00\x11\x08%s\x03\x01\x11\x00\x02\x11\x00\x03\x11\x00" + (
    b"\xff\xda\x00\x0c\x03\x01\x00\x02\x00\x03\x00\x00\x3f\x00"
)


@pytest.mark.parametrize(
    ("data", "size"),
    [
        pytest.param(png(30_000, 30_000), "900000000 (30000 x 30000)", id="PNG"),
        pytest.param(JPEG_HEADER % struct.pack(">HH", 60_000, 50_000), "3000000000 (50000 x 60000)", id="JPEG"),
        pytest.param(
            webp(b"VP8X", bytes(4) + (19_999).to_bytes(3, "little") + (29_999).to_bytes(3, "little")),
            "600000000 (20000 x 30000)",
            id="WebP, extended",
        ),
        pytest.param(
            webp(b"VP8L", b"\x2f" + struct.pack("<I", 9_999 | 15_999 << 14)),
            "160000000 (10000 x 16000)",
            id="WebP, lossless",
        ),
        pytest.param(
            webp(b"VP8 ", b"\0\0\0\x9d\x01\x2a" + struct.pack("<HH", 10_000, 16_000)),
            "160000000 (10000 x 16000)",
            id="WebP",
        ),
    ],
)
def test_too_many_pixels_are_refused_before_any_is_allocated(data: bytes, size: str) -> None:
    tracemalloc.start()
    try:
        started = time.perf_counter()
        with pytest.raises(ImageTooLarge) as refusal:
            decode(data, height=8, width=8, limits=LIMITS)
        took_s, (_, peak_bytes) = time.perf_counter() - started, tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert str(refusal.value) == f"image: expected at most 4000000 pixels (max_image_pixels), got {size}"
    assert took_s < 0.5
    assert peak_bytes < 1 << 20


PEAKS = """
import sys
from functools import partial
from pathlib import Path
from xlaserve.config import Decoding, Fit
from xlaserve.images.frame import place
from xlaserve.images.decoder import ImageLimits, decode

def status(key):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(key))

def run(file):
    data = Path(file).read_bytes()
    held = []

    class Hold:
        def __init__(self, size_bytes):
            held.append(size_bytes)
        def __enter__(self):
            Path("/proc/self/clear_refs").write_text("5")
            self.before = status("VmRSS")
        def __exit__(self, *_):
            held.append(status("VmHWM") - self.before)

    where = partial(place, input_height=224, input_width=224, fit=Fit.RESIZE)
    decode(data, where, ImageLimits(1 << 30, 1 << 30), Hold, Decoding(sys.argv[1]))
    return held

run(sys.argv[2])
print(*run(sys.argv[3]))
"""


def blocks(mode: str, height: int, width: int) -> Image.Image:
    """An image of coloured squares of 50 pixels."""
    pixels = np.random.default_rng(0).integers(0, 256, (height // 50, width // 50, 4), np.uint8)
    pixels = pixels.repeat(50, 0).repeat(50, 1)
    if mode == "I;16":
        return Image.fromarray(pixels[..., 0].astype(np.uint16) * 257)
    return Image.fromarray(pixels).convert("RGB").convert(mode)


@pytest.mark.parametrize(
    ("mode", "format", "height", "width", "options"),
    [
        ("RGBA", "PNG", 2000, 2000, {}),
        ("I;16", "PNG", 2000, 2000, {}),
        ("CMYK", "JPEG", 2000, 2000, {}),
        ("CMYK", "JPEG", 2000, 2000, {"progressive": True}),
        ("RGB", "JPEG", 2000, 2000, {"progressive": True, "subsampling": 0}),
        ("RGBA", "WEBP", 2000, 2000, {"lossless": True}),
        ("LA", "PNG", 50_000, 600, {}),  # high and narrow: resized in one pass
    ],
)
def test_decoding_holds_the_bytes_that_it_takes(
    mode: str, format: str, height: int, width: int, options: dict[str, object], *, tmp_path: Path
) -> None:
    held, taken = peaks(encode(blocks(mode, height, width), format, **options), format, Decoding.EXACT, tmp_path)
    assert held / 2 < taken < held + besides(height, width)


@pytest.mark.parametrize(
    ("data", "decoding"),
    [
        pytest.param(lambda: grey_jpeg(2000, 2000, (b"\1", b"\2", b"\3")), Decoding.EXACT, id="a scan each"),
        pytest.param(lambda: grey_jpeg(4000, 2000, (b"\1", b"\2", b"\3")), Decoding.FAST, id="a scan each, fast"),
        pytest.param(lambda: encode(blocks("RGB", 4000, 7000), "JPEG"), Decoding.FAST, id="fast"),
        pytest.param(lambda: encode(blocks("CMYK", 4000, 7000), "JPEG"), Decoding.FAST, id="CMYK, fast"),
        pytest.param(
            lambda: encode(blocks("CMYK", 2000, 4000), "JPEG", progressive=True), Decoding.FAST, id="progressive, fast"
        ),
    ],
)
def test_a_jpeg_holds_what_its_scans_and_its_reduced_pixels_take(
    data: Callable[[], bytes], decoding: Decoding, tmp_path: Path
) -> None:
    held, taken = peaks(data(), "JPEG", decoding, tmp_path)
    assert held / 2 < taken < held + (1 << 20)


def besides(height: int, width: int) -> int:
    """Returns the bytes that resizing to 224x224 takes besides: few beside those of the pixels, and so not held."""
    rows = 2 * height * 8  # addresses of the rows of what is decoded and converted
    weights = 2 * (height + width) * 8  # those of the pixels under each that is resized
    between = min(height, width) * 224 * 4  # resized in one direction
    return rows + weights + between + 224 * 224 * (4 + 3) + (1 << 19)  # what is returned, and small objects


def peaks(data: bytes, format: str, decoding: Decoding, folder: Path) -> tuple[int, int]:
    """Returns the bytes that decoding says that it holds, and those that it takes, in a process of its own."""
    (small := folder / "small").write_bytes(encode(blocks("RGB", 100, 100), format))
    (large := folder / "large").write_bytes(data)
    run = subprocess.run(
        [sys.executable, "-c", PEAKS, decoding, str(small), str(large)],
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 20)},  # what is freed is given back at once
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    held, taken = map(int, run.stdout.split())
    return held, taken


@pytest.mark.parametrize("format", LOSSLESS)
def test_the_pixel_limit_is_ours_and_not_pillows(format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)  # would warn from 100 on
    assert decode(encode(UPRIGHT, format), height=8, width=8, limits=LIMITS).shape == (8, 8, 3)


def test_a_sliver_of_few_pixels_and_one_endless_side_is_refused() -> None:
    with pytest.raises(ImageTooLarge, match="expected sides of at most 65535 pixels, got 1 x 4000000"):
        decode(png(1, 4_000_000), height=8, width=8, limits=LIMITS)


def test_pixels_that_unpack_to_more_than_the_header_states_cost_nothing() -> None:
    bomb = png(1, 1, pixels=zlib.compress(bytes(1 << 26), 9))
    assert decode(bomb, height=1, width=1, limits=LIMITS).tolist() == [[[0, 0, 0]]]


MEBIBYTE = b"k\0\0" + zlib.compress(bytes((1 << 20) - 1), 9)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(png(1, 1, chunk(b"zTXt", b"k\0\0" + zlib.compress(bytes(1 << 24), 9))), id="one huge text"),
        pytest.param(png(1, 1, chunk(b"zTXt", MEBIBYTE) * 70), id="many texts"),
        pytest.param(png(1, 1, chunk(b"iCCP", MEBIBYTE) * 700), id="many colour profiles"),
        pytest.param(png(1, 1, chunk(b"quIt", b"") * 80_000), id="many tiny chunks"),
        pytest.param(b"\xff\xd8\xff" + b"\0" * 500_000, id="junk before a marker"),
        pytest.param(b"\xff\xd8" + b"\xff\xfe\x00\x02" * 250_000, id="many empty comments"),
    ],
)
def test_small_files_that_cost_much_are_refused(data: bytes) -> None:
    with pytest.raises(InvalidImage):
        decode(data, height=8, width=8, limits=LIMITS)


def test_a_jpeg_that_repeats_its_scans_is_refused() -> None:
    data = encode(Image.new("L", (64, 64)), "JPEG", progressive=True)
    last_scan = data[data.rindex(b"\xff\xda") : -2]
    with pytest.raises(InvalidImage, match="at most 500 scans"):
        decode(data[:-2] + last_scan * 600 + data[-2:], height=8, width=8, limits=LIMITS)


def sample(format: str) -> bytes:
    """A small image with what a header may hold: EXIF, a colour profile, text."""
    exif = Image.Exif()
    exif[0x0112] = 6
    exif[0x011A] = 300.0
    return encode(UPRIGHT.resize((40, 30)), format, exif=exif, icc_profile=bytes(range(64)))


SAMPLES: dict[str, Callable[[], bytes]] = {
    "JPEG": lambda: sample("JPEG"),
    "progressive JPEG": lambda: encode(UPRIGHT.resize((40, 30)), "JPEG", progressive=True),
    "PNG": lambda: sample("PNG"),
    "palette PNG": lambda: encode(UPRIGHT.quantize(9), transparency=b"\0\x80"),
    "animated PNG": lambda: encode(UPRIGHT, save_all=True, append_images=[Image.new("RGB", UPRIGHT.size)]),
    "16-bit PNG": lambda: encode(Image.fromarray(np.arange(600, dtype=np.uint16).reshape(20, 30))),
    "WebP": lambda: sample("WEBP"),
    "lossless WebP": lambda: encode(UPRIGHT.convert("RGBA"), "WEBP", lossless=True),
    "animated WebP": lambda: encode(
        UPRIGHT, "WEBP", save_all=True, append_images=[UPRIGHT.transpose(Image.Transpose.ROTATE_180)]
    ),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_damage_anywhere_gives_pixels_or_a_refusal_and_nothing_else(name: str) -> None:
    original = SAMPLES[name]()
    rng = np.random.default_rng(7)
    refused = 0
    for trial in range(400):
        data = bytearray(original)
        if trial % 4 == 0:
            del data[rng.integers(len(data)) :]
        for position in rng.integers(0, max(len(data), 1), size=rng.integers(1, 4)) if data else ():
            data[position] = rng.integers(256)
        if name.endswith("PNG") and trial % 2:
            data = mend_checksums(data)
        try:
            pixels = decode(bytes(data), height=16, width=12, limits=LIMITS)
        except (InvalidImage, ImageTooLarge) as refusal:
            assert str(refusal).isprintable()
            refused += 1
        else:
            assert pixels.shape == (16, 12, 3)
    assert 0 < refused < 400, "damage that is never or always noticed tries only half of it"


def mend_checksums(data: bytearray) -> bytearray:
    """Rewrites the checksums of a PNG's chunks, so that damage reaches what reads them."""
    position = 8
    while position + 12 <= len(data):
        end = position + 8 + int.from_bytes(data[position : position + 4], "big")
        if end + 4 > len(data):
            break
        data[end : end + 4] = struct.pack(">I", zlib.crc32(data[position + 4 : end]))
        position = end + 4
    return data


# Tensors.


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
