"""JPEGs of which the decoder gives fewer pixels: `decode: fast`."""

from __future__ import annotations

import io
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from tests.server.jpegs import grey_jpeg

from xlaserve.config import Decoding, Fit
from xlaserve.errors import ImageTooLarge, InvalidImage, RequestError
from xlaserve.images.decoder import Decoded, ImageLimits, decode
from xlaserve.images.frame import Frame, place
from xlaserve.images.jpeg import JpegFile
from xlaserve.models.fast_decoding import photograph

LIMITS = ImageLimits(max_image_bytes=1 << 24, max_image_pixels=1 << 24)
MAX_MEAN = 1.0
"""Levels by which pixels of photographs differ on average; 0.6 was measured."""
MAX_OF_EDGE = 8
"""Levels by which pixels at a straight edge between black and white may differ: 255 / 32. Where the decoder reduces, an
edge weighs at most that much more or less in pixels that are resized from squares than in those from each pixel."""
MAX_DIFFERENCE = 2 * MAX_OF_EDGE
"""Levels by which pixels at a corner may differ: it has two edges. In photographs, 11 was measured."""
ROUNDING = 2
"""Levels that rounding twice makes: once where the decoder reduces, once where what it gives is resized."""


def encode(image: Image.Image, format: str = "JPEG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **{"quality": 90, **options})
    return file.getvalue()


def both(data: bytes, *, height: int = 64, width: int = 64, fit: Fit = Fit.RESIZE) -> tuple[Decoded, Decoded]:
    """Returns the image decoded exactly and fast."""
    where = partial(place, input_height=height, input_width=width, fit=fit)
    exact, fast = (decode(data, where, LIMITS, decoding=way) for way in (Decoding.EXACT, Decoding.FAST))
    return exact, fast


def differences(images: tuple[Decoded, Decoded]) -> NDArray[np.int64]:
    exact, fast = (image.pixels.astype(np.int64) for image in images)
    apart: NDArray[np.int64] = np.abs(exact - fast)
    return apart


# Exact.


def test_an_image_is_decoded_exactly_unless_the_settings_say_otherwise() -> None:
    data = encode(photograph(481, 643))
    where = partial(place, input_height=64, input_width=64, fit=Fit.RESIZE)
    with Image.open(io.BytesIO(data)) as image:
        expected = np.asarray(image.resize((64, 64), Image.Resampling.BILINEAR))
    np.testing.assert_array_equal(decode(data, where, LIMITS).pixels, expected)
    np.testing.assert_array_equal(both(data)[0].pixels, expected)


# Fast.


@cache
def colours(height: int, width: int) -> Image.Image:
    return photograph(height, width).convert("RGB")


def averaged(data: bytes, scale: int) -> NDArray[np.int64]:
    """Returns the image decoded whole, reduced to the means of its squares and then resized: the truth of reducing."""
    with Image.open(io.BytesIO(data)) as image:
        whole = image.convert("RGB") if image.mode == "CMYK" else image.copy()
    box = (0.0, 0.0, whole.width / scale, whole.height / scale)
    resized = whole.reduce(scale).resize((64, 64), Image.Resampling.BILINEAR, box)
    return np.asarray(resized.convert("RGB"), np.int64)


@pytest.mark.parametrize(
    ("mode", "options"),
    [("RGB", {}), ("RGB", {"subsampling": 0}), ("RGB", {"progressive": True}), ("L", {}), ("CMYK", {})],
    ids=["4:2:0", "4:4:4", "scans", "grey", "CMYK"],
)
@pytest.mark.parametrize(("size", "scale"), [((256, 256), 2), ((481, 643), 2), ((513, 1027), 4), ((1029, 1327), 8)])
def test_pixels_of_photographs_are_off_by_what_resizing_from_averages_is(
    mode: str, options: dict[str, Any], size: tuple[int, int], scale: int
) -> None:
    data = encode(colours(*size).convert(mode), **options)
    images = both(data)
    apart = differences(images)
    assert 0 < apart.mean() < MAX_MEAN, "the same pixels show that nothing was reduced"
    assert apart.max() <= MAX_DIFFERENCE
    # At the right and the bottom, a square that the image covers in part holds what the encoder filled it with.
    assert np.abs(images[1].pixels - averaged(data, scale))[:-1, :-1].max() <= ROUNDING


@pytest.mark.parametrize("side", [256, 391, 512, 1024])
def test_a_straight_edge_is_off_by_a_part_that_is_known(side: int) -> None:
    most = []
    for left in range(side // 2, side // 2 + 16):
        pixels = np.zeros((side, side), np.uint8)
        pixels[:, left:] = 255
        most.append(differences(both(encode(Image.fromarray(pixels), quality=100))).max())
    assert 0 < max(most) <= MAX_OF_EDGE


@pytest.mark.parametrize("side", [1024, 1017, 1018, 1023])
def test_a_gradient_keeps_its_place_whatever_remains_when_sides_are_halved(side: int) -> None:
    ramp = np.linspace(0, 255, side).round().astype(np.uint8)
    for pixels in (np.broadcast_to(ramp, (side, side)), np.broadcast_to(ramp[:, None], (side, side))):
        assert differences(both(encode(Image.fromarray(np.ascontiguousarray(pixels)), quality=98))).max() <= 1


@pytest.mark.parametrize("covered", range(1, 8))
def test_the_last_pixels_of_a_partly_covered_square_are_right(covered: int) -> None:
    apart = differences(both(encode(photograph(1024 + covered, 1024 + covered))))
    assert max(apart[-1].max(), apart[:, -1].max()) <= MAX_DIFFERENCE
    assert max(apart[-1].mean(), apart[:, -1].mean()) < 2 * MAX_MEAN


@pytest.mark.parametrize(("fit", "height", "width"), [(Fit.RESIZE, 64, 32), (Fit.LETTERBOX, 64, 64), (Fit.PAD, 32, 64)])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_an_image_lies_where_it_would_lie(fit: Fit, height: int, width: int, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    images = both(encode(photograph(401, 643), exif=exif), height=height, width=width, fit=fit)
    exact, fast = images
    assert fast.frame == exact.frame
    assert {fast.frame.height, fast.frame.width} == {401, 643}
    assert 0 < differences(images).mean() < MAX_MEAN


@pytest.mark.parametrize(
    ("stored", "least", "decoded", "scale"),
    [
        ((640, 480), (256, 256), (640, 480), 1),
        ((640, 512), (256, 256), (320, 256), 2),
        ((641, 513), (256, 256), (321, 257), 2),
        ((4000, 3000), (448, 448), (1000, 750), 4),
        ((4000, 3000), (200, 150), (500, 375), 8),
        ((9000, 9000), (20, 20), (1125, 1125), 8),
        ((9000, 9000), (20, 4000), (4500, 4500), 2),
    ],
)
def test_sides_are_halved_as_long_as_enough_pixels_remain(
    stored: tuple[int, int], least: tuple[int, int], decoded: tuple[int, int], scale: int
) -> None:
    with JpegFile(io.BytesIO(grey_jpeg(*stored))) as image:
        assert image.shrink_on_load(*least) == (0, 0, stored[0] / scale, stored[1] / scale)
        assert image.size == decoded


def test_the_size_that_counts_is_the_one_without_borders() -> None:
    wide = encode(photograph(128, 1024))
    assert differences(both(wide, fit=Fit.RESIZE)).max() == 0, "its height of 128 is only twice the model's"
    assert differences(both(wide, fit=Fit.LETTERBOX)).max() > 0, "it is brought to 8 x 64"


@pytest.mark.parametrize("format", ["PNG", "WEBP"])
def test_other_formats_are_decoded_exactly(format: str) -> None:
    assert differences(both(encode(photograph(512, 512).convert("RGB"), format))).max() == 0


def test_a_lossless_jpeg_is_decoded_exactly() -> None:
    exact, fast = both(grey_jpeg(512, 512, lossless=True))
    np.testing.assert_array_equal(fast.pixels, exact.pixels)


# Hostile files.


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(encode(photograph(512, 512))[:-2000], id="cut off"),
        pytest.param(encode(photograph(512, 512), progressive=True)[:-2000], id="cut off, progressive"),
        pytest.param(encode(photograph(512, 512))[:400], id="header cut off"),
        pytest.param(grey_jpeg(512, 512).replace(b"\xff\xda", b"\xff\xfe"), id="no scan"),
        pytest.param(grey_jpeg(512, 512, (b"\1\2\3",) * 501), id="many scans"),
        pytest.param(grey_jpeg(65_500, 65_500)[:1000], id="huge"),
        pytest.param(b"\xff\xd8" + b"\xff\xfe\x00\x02" * 250_000, id="many segments"),
    ],
)
def test_what_is_refused_is_refused_in_the_same_words(data: bytes) -> None:
    where = partial(place, input_height=32, input_width=32, fit=Fit.RESIZE)
    said = []
    for way in Decoding:
        with pytest.raises((InvalidImage, ImageTooLarge)) as refusal:
            decode(data, where, LIMITS, decoding=way)
        said.append((refusal.type, str(refusal.value)))
    assert len(set(said)) == 1


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"subsampling": 0}], ids=["4:2:0", "scans", "4:4:4"])
def test_damage_is_refused_in_all_ways_or_in_none(options: dict[str, Any]) -> None:
    original = encode(photograph(96, 80), **options)
    random = np.random.default_rng(3)
    where = partial(place, input_height=8, input_width=8, fit=Fit.RESIZE)
    refused = 0
    for trial in range(300):
        data = bytearray(original)
        if trial % 4 == 0:
            del data[random.integers(len(data)) :]
        for position in random.integers(0, max(len(data), 1), size=random.integers(1, 4)) if data else ():
            data[position] = random.integers(256)
        found: list[Frame | str] = []
        for way in Decoding:
            try:
                found.append(decode(bytes(data), where, LIMITS, decoding=way).frame)
            except RequestError as refusal:
                found.append(str(refusal))
        assert found[1:] == found[:1] * 2
        refused += isinstance(found[0], str)
    assert 0 < refused < 300, "damage that is never or always noticed tries only half of it"


# Memory.


@pytest.mark.parametrize(
    ("data", "exact", "fast"),
    [
        pytest.param(grey_jpeg(800, 400), 8 * 320_000, 8 * 20_000, id="one scan"),
        pytest.param(grey_jpeg(800, 400, (b"\1", b"\2", b"\3")), 16 * 320_000, 8 * 340_000, id="a scan each"),
        pytest.param(grey_jpeg(800, 400, (b"\1\2", b"\3")), 16 * 320_000, 8 * 340_000, id="two scans"),
        pytest.param(encode(Image.new("RGB", (800, 400)), progressive=True), 16 * 320_000, 8 * 340_000, id="many"),
        pytest.param(encode(Image.new("L", (800, 400))), 8 * 320_000, 8 * 20_000, id="grey"),
        pytest.param(encode(Image.new("CMYK", (800, 400))), 8 * 320_000, 8 * 20_000, id="four components"),
    ],
)
def test_what_is_held_is_told_by_the_header(data: bytes, exact: int, fast: int) -> None:
    """`test_image` compares it with what is taken."""
    held: list[int] = []

    class Hold:
        def __init__(self, size_bytes: int) -> None:
            held.append(size_bytes)

        def __enter__(self) -> None:
            pass

        def __exit__(self, *_: object) -> None:
            pass

    where = partial(place, input_height=50, input_width=100, fit=Fit.RESIZE)
    for way in (Decoding.EXACT, Decoding.FAST):
        decode(data, where, LIMITS, Hold, way)
    assert held == [exact, fast]
