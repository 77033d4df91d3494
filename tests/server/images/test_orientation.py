from __future__ import annotations

import io
import struct
import time
import tracemalloc
import warnings
import zlib
from collections.abc import Callable
from functools import partial
from typing import Final

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from xlaserve.config import Fit
from xlaserve.errors import InvalidImage
from xlaserve.images.decoder import ImageLimits, decode
from xlaserve.images.frame import place
from xlaserve.images.orientation import orientation

LIMITS: Final = ImageLimits(max_image_bytes=1 << 25, max_image_pixels=1 << 20)
STORED: Final = Image.fromarray(
    np.random.default_rng(0).integers(0, 256, (5, 4, 3), np.uint8).repeat(8, 0).repeat(8, 1)
)
ALL: Final = range(1, 9)


def exif(value: int, *, tag: int = 0x0112, kind: int = 3) -> bytes:
    entry = struct.pack("<HHIHH", tag, kind, 1, value, 0)
    return b"Exif\0\0II*\0\x08\0\0\0\x01\0" + entry + bytes(4)


def xmp(value: int | str, *, is_element: bool = False) -> bytes:
    said = f"<tiff:Orientation>{value}</tiff:Orientation>" if is_element else ""
    attribute = "" if is_element else f' tiff:Orientation="{value}"'
    return f'<x:xmpmeta><rdf:Description rdf:about=""{attribute}>{said}</rdf:Description></x:xmpmeta>'.encode()


def profile(data: bytes, line: int = 72) -> bytes:
    """EXIF in hexadecimal, as ImageMagick writes it into a PNG."""
    letters = data.hex()
    lines = [letters[start : start + line] for start in range(0, len(letters), line)]
    return "\n".join(["", "exif", f"{len(data):8}", *lines, ""]).encode()


def saved(kind: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    STORED.save(buffer, kind, **options)
    return buffer.getvalue()


def chunk(name: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))


def png(*chunks: bytes, behind: bool = False) -> bytes:
    """A PNG with more chunks in front of its pixels, or behind them."""
    plain = saved("PNG")
    at = plain.index(b"IEND" if behind else b"IDAT") - 4
    return plain[:at] + b"".join(chunks) + plain[at:]


def text(key: bytes, value: bytes) -> bytes:
    return chunk(b"tEXt", key + b"\0" + value)


def packed_text(key: bytes, value: bytes) -> bytes:
    return chunk(b"zTXt", key + b"\0\0" + zlib.compress(value))


def international(key: bytes, value: bytes, *, is_packed: bool = False) -> bytes:
    head = key + (b"\0\1\0" if is_packed else b"\0\0\0") + b"\0\0"
    return chunk(b"iTXt", head + (zlib.compress(value) if is_packed else value))


PROFILE: Final = b"Raw profile type exif"
XMP: Final = b"XML:com.adobe.xmp"

CARRIERS: Final[dict[str, Callable[[int], bytes]]] = {
    "JPEG, EXIF": lambda value: saved("JPEG", exif=exif(value)),
    "JPEG, XMP": lambda value: saved("JPEG", xmp=xmp(value)),
    "JPEG, XMP element": lambda value: saved("JPEG", xmp=xmp(value, is_element=True)),
    "PNG, eXIf": lambda value: png(chunk(b"eXIf", exif(value)[6:])),
    "PNG, eXIf behind the pixels": lambda value: png(chunk(b"eXIf", exif(value)[6:]), behind=True),
    "PNG, profile in tEXt": lambda value: png(text(PROFILE, profile(exif(value)))),
    "PNG, profile in zTXt": lambda value: png(packed_text(PROFILE, profile(exif(value)))),
    "PNG, profile in zTXt behind the pixels": lambda value: png(
        packed_text(PROFILE, profile(exif(value))), behind=True
    ),
    "PNG, profile in iTXt": lambda value: png(international(PROFILE, profile(exif(value)))),
    "PNG, profile in packed iTXt": lambda value: png(international(PROFILE, profile(exif(value)), is_packed=True)),
    "PNG, XMP": lambda value: png(international(XMP, xmp(value))),
    "PNG, XMP behind the pixels": lambda value: png(international(XMP, xmp(value)), behind=True),
    "PNG, packed XMP element": lambda value: png(international(XMP, xmp(value, is_element=True), is_packed=True)),
    "PNG, XMP in tEXt": lambda value: png(text(XMP, xmp(value))),
    "WebP, EXIF": lambda value: saved("WEBP", lossless=True, exif=exif(value)),
    "WebP, XMP": lambda value: saved("WEBP", lossless=True, xmp=xmp(value)),
}
BOTH: Final[dict[str, Callable[[bytes, bytes], bytes]]] = {
    "JPEG": lambda exif, xmp: saved("JPEG", exif=exif, xmp=xmp),
    "PNG": lambda exif, xmp: png(international(XMP, xmp), chunk(b"eXIf", exif[6:])),
    "PNG, profile": lambda exif, xmp: png(packed_text(PROFILE, profile(exif)), international(XMP, xmp)),
    "WebP": lambda exif, xmp: saved("WEBP", lossless=True, exif=exif, xmp=xmp),
}


def turned_by_pillow(data: bytes) -> Image.Image:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about entries that are cut off
        with Image.open(io.BytesIO(data)) as image:
            return ImageOps.exif_transpose(image)


def assert_as_pillow(data: bytes) -> None:
    expected = np.asarray(turned_by_pillow(data))
    height, width, _ = expected.shape
    decoded = decode(data, partial(place, input_height=height, input_width=width, fit=Fit.REJECT), LIMITS)
    np.testing.assert_array_equal(decoded.pixels, expected)


def found(data: bytes) -> int:
    with Image.open(io.BytesIO(data)) as image:
        image.load()
        return orientation(image.info)


@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize("value", ALL)
def test_every_orientation_turns_as_in_pillow(carrier: str, value: int) -> None:
    data = CARRIERS[carrier](value)
    assert found(data) == value
    assert_as_pillow(data)


@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize("value", [0, 9])
def test_an_orientation_that_does_not_exist_turns_nothing(carrier: str, value: int) -> None:
    data = CARRIERS[carrier](value)
    assert found(data) == 1
    assert_as_pillow(data)


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (exif(6), 6),
        (exif(1), 1),
        (exif(0), 1),
        (exif(6, kind=7), 1),  # bytes, which Pillow takes for an answer that turns nothing
        (exif(6, tag=0x0110), 3),
        (exif(6, kind=99), 3),
        (b"Exif\0\0II*\0\x08\0\0\0\0\0" + bytes(4), 3),
    ],
)
def test_xmp_counts_only_where_exif_has_no_orientation(kind: str, said: bytes, expected: int) -> None:
    data = BOTH[kind](said, xmp(3))
    assert found(data) == expected
    assert_as_pillow(data)


def test_an_exif_chunk_wins_over_a_profile_even_without_an_orientation() -> None:
    for said, expected in ((exif(8), 8), (exif(8, tag=0x0110), 1)):
        data = png(packed_text(PROFILE, profile(exif(6))), chunk(b"eXIf", said[6:]))
        assert found(data) == expected
        assert_as_pillow(data)


@pytest.mark.parametrize("said", [b"", b"\nexif\n", b"\nexif\n  8\nnot hexadecimal", b"\nexif\n 8\nabc", b"one line"])
def test_a_damaged_profile_does_not_spoil_the_image(said: bytes) -> None:
    """Pillow raises; what else says how the image stands is heard."""
    assert found(png(packed_text(PROFILE, said))) == 1
    assert found(png(packed_text(PROFILE, said), international(XMP, xmp(8)))) == 8


@pytest.mark.parametrize(
    ("kind", "values"),
    [("5", (12, 2)), ("10", (-12, -2)), ("5", (13, 2)), ("5", (6, 0)), ("11", (6.0,)), ("12", (6.0,)), ("11", (6.5,))],
)
def test_fractions_turn_as_in_pillow(kind: str, values: tuple[float, ...]) -> None:
    letters = {"5": "II", "10": "ii", "11": "f", "12": "d"}[kind]
    value = struct.pack(f"<{letters}", *values)
    inline = value.ljust(4, b"\0") if len(value) <= 4 else struct.pack("<I", 26)
    table = struct.pack("<HHHI", 1, 0x0112, int(kind), 1) + inline + bytes(4)
    data = saved("JPEG", exif=b"Exif\0\0II*\0\x08\0\0\0" + table + value)
    assert_as_pillow(data)


def table(*entries: tuple[int, int, int, bytes], end: bytes = bytes(4)) -> bytes:
    """EXIF of entries: a tag, a kind, a count, and the value or where it lies."""
    said = b"".join(struct.pack("<HHI", *entry) + inline.ljust(4, b"\0") for *entry, inline in entries)
    return b"Exif\0\0II*\0\x08\0\0\0" + struct.pack("<H", len(entries)) + said + end


TURNED: Final = (0x0112, 3, 1, b"\6")


@pytest.mark.filterwarnings(r"ignore::UserWarning:PIL\.")  # as the server has it
@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize(
    ("said", "expected"),
    [
        pytest.param(table((0x011A, 5, 1, b"\xff"), TURNED), 3, id="a value before it lies behind the end"),
        pytest.param(table((0x0110, 2, 8, b"\x26"), TURNED, end=bytes(11)), 3, id="a value before it is cut off"),
        pytest.param(table((0x0110, 2, 999, b"\x08"), TURNED), 6, id="a value before it is longer than all"),
        pytest.param(table(*[(tag, 2, 30, b"\0") for tag in (270, 271)], TURNED), 6, id="values overlap"),
        pytest.param(table((0x0110, 99, 1, b"\xff"), TURNED), 6, id="an entry before it is of no kind"),
        pytest.param(table((0x0112, 3, 0, b"\3"), TURNED), 6, id="the first has no value"),
        pytest.param(table(TURNED, (0x011A, 5, 1, b"\xff")), 6, id="a value after it lies behind the end"),
        pytest.param(table((0x0112, 5, 1, b"\xff"), TURNED), 3, id="its own value lies behind the end"),
        pytest.param(table(TURNED, end=b"")[:-1], 3, id="its own entry is cut off"),
        pytest.param(table(TURNED, end=b""), 6, id="nothing follows"),
    ],
)
def test_of_damaged_exif_as_much_counts_as_in_pillow(kind: str, said: bytes, expected: int) -> None:
    data = BOTH[kind](said, xmp(3))
    assert found(data) == expected
    assert_as_pillow(data)


@given(
    exifs=st.none() | st.builds(exif, st.integers(0, 9), kind=st.sampled_from([1, 2, 3, 4, 7, 8])),
    said=st.lists(
        st.builds(xmp, st.integers(0, 99) | st.sampled_from(["", "x6"]), is_element=st.booleans()), max_size=2
    ),
    kind=st.sampled_from(["JPEG", "PNG", "WEBP"]),
)
@settings(max_examples=150, deadline=None)
def test_any_mixture_turns_as_in_pillow(exifs: bytes | None, said: list[bytes], kind: str) -> None:
    options: dict[str, object] = {} if kind == "JPEG" else {"lossless": True}
    if exifs is not None:
        options["exif"] = exifs
    if kind == "PNG":
        chunks = [international(XMP, one) for one in said] + ([] if exifs is None else [chunk(b"eXIf", exifs[6:])])
        assert_as_pillow(png(*chunks))
    else:
        assert_as_pillow(saved(kind, **options, **({"xmp": b"".join(said)} if said else {})))


# What costs much.


def test_a_profile_that_unpacks_to_megabytes_is_refused() -> None:
    bomb = png(packed_text(PROFILE, b"\nexif\n  8\n" + b"0" * (1 << 24)))
    tracemalloc.start()
    try:
        with pytest.raises(InvalidImage):
            decode(bomb, partial(place, input_height=8, input_width=8, fit=Fit.RESIZE), LIMITS)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 8 << 20


def test_a_profile_of_megabytes_is_not_read() -> None:
    text = "\nexif\n  8\n" + exif(6).hex()
    assert orientation({"Raw profile type exif": text}) == 6
    assert orientation({"Raw profile type exif": text + " " * (1 << 20)}) == 1


@pytest.mark.parametrize("end", [(1 << 20) - 10, 1 << 20, (1 << 20) + 10, 3 << 20])
def test_xmp_is_searched_in_steps_without_a_gap(end: int) -> None:
    for value in ("<tiff:Orientation>6<", 'tiff:Orientation="6"'):
        packet = " " * (end - 8) + value
        assert orientation({"XML:com.adobe.xmp": packet}) == 6
        assert orientation({"xmp": packet.encode()}) == 6


def test_xmp_that_almost_says_it_a_million_times_is_searched_soon() -> None:
    packet = b"tiff:Orientation=" * 1_000_000
    started = time.perf_counter()
    assert orientation({"xmp": packet}) == 1
    assert time.perf_counter() - started < 2
