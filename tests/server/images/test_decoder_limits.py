"""Images that are refused, damaged files, and bounds on the bytes of decoding."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import time
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tests.server.images.encoded import FORMATS, LIMITS, LOSSLESS, UPRIGHT, chunk, decode, encode, png, webp
from tests.server.jpegs import grey_jpeg

from xlaserve.config import (
    PILLOW_BILINEAR,
    TENSORFLOW_BILINEAR,
    Color,
    Decoding,
    Fit,
    ResizeFilter,
    ResizeLibrary,
    ResizeSettings,
)
from xlaserve.errors import ImageTooLarge, InvalidImage
from xlaserve.images.decoder import ImageLimits


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


LANCZOS = ResizeSettings(library=ResizeLibrary.TENSORFLOW, filter=ResizeFilter.LANCZOS5, antialias=True)
OPENCV_AREA = ResizeSettings(library=ResizeLibrary.OPENCV, filter=ResizeFilter.AREA)
PEAKS = """
import sys
from functools import partial
from pathlib import Path
from xlaserve.config import Color, Decoding, Fit, ResizeSettings
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

    where = partial(place, input_height=224, input_width=224, fit=Fit(sys.argv[5]))
    how = ResizeSettings.model_validate_json(sys.argv[4])
    limits = ImageLimits(1 << 30, 1 << 30)
    decode(data, where, limits, Hold, Decoding(sys.argv[1]), resize=how, color=Color(sys.argv[6]))
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


@pytest.mark.parametrize("how", [TENSORFLOW_BILINEAR, LANCZOS, OPENCV_AREA], ids=str)
@pytest.mark.parametrize("decoding", [Decoding.EXACT, Decoding.TENSORFLOW])
@pytest.mark.parametrize(
    ("mode", "format", "turn"),
    [("RGB", "JPEG", 1), ("CMYK", "JPEG", 1), ("CMYK", "JPEG", 6), ("RGB", "JPEG", 6), ("RGBA", "PNG", 6)],
)
def test_resizing_as_tensorflow_takes_no_more_than_is_held(
    how: ResizeSettings, decoding: Decoding, mode: str, format: str, *, turn: int, tmp_path: Path
) -> None:
    exif = Image.Exif()
    exif[0x0112] = turn
    data = encode(blocks(mode, 2000, 2000), format, exif=exif)
    held, taken = peaks(data, format, decoding, tmp_path, how)
    assert 0 < taken < held + besides(2000, 2000)


@pytest.mark.parametrize("how", [PILLOW_BILINEAR, TENSORFLOW_BILINEAR], ids=str)
@pytest.mark.parametrize(
    ("mode", "format", "color", "decoding"),
    [
        ("CMYK", "JPEG", Color.RGB, Decoding.EXACT),
        ("CMYK", "JPEG", Color.RGBA, Decoding.EXACT),
        ("RGB", "JPEG", Color.RGB, Decoding.TENSORFLOW),
        ("LA", "PNG", Color.RGBA, Decoding.EXACT),
        ("I;16", "PNG", Color.RGBA, Decoding.EXACT),
        ("RGBA", "WEBP", Color.RGBA, Decoding.EXACT),
    ],
)
def test_an_image_that_is_turned_and_cut_takes_no_more_than_is_held(
    how: ResizeSettings, mode: str, format: str, *, color: Color, decoding: Decoding, tmp_path: Path
) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    data = encode(blocks(mode, 2000, 2000), format, exif=exif)
    held, taken = peaks(data, format, decoding, tmp_path, how, fit=Fit.CENTER_CROP, color=color)
    assert 0 < taken < held + besides(2000, 2000)


def besides(height: int, width: int) -> int:
    """Returns the bytes that resizing to 224x224 takes besides: few beside those of the pixels, and so not held."""
    rows = 2 * height * 8  # addresses of the rows of what is decoded and converted
    weights = 2 * (height + width) * 8  # those of the pixels under each that is resized
    between = min(height, width) * 224 * 4  # resized in one direction
    return rows + weights + between + 224 * 224 * (4 + 3) + (1 << 19)  # what is returned, and small objects


def peaks(
    data: bytes,
    format: str,
    decoding: Decoding,
    folder: Path,
    how: ResizeSettings = PILLOW_BILINEAR,
    *,
    fit: Fit = Fit.RESIZE,
    color: Color = Color.RGB,
) -> tuple[int, int]:
    """Returns the bytes that decoding says that it holds, and those that it takes, in a process of its own."""
    (small := folder / "small").write_bytes(encode(blocks("RGB", 100, 100), format))
    (large := folder / "large").write_bytes(data)
    run = subprocess.run(
        [sys.executable, "-c", PEAKS, decoding, str(small), str(large), how.model_dump_json(), fit, color],
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
