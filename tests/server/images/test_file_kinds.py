from __future__ import annotations

import io
import struct
import time
from typing import Final

import numpy as np
import pytest
from PIL import Image, features

from xlaserve.images.file_kinds import kind_of

PICTURE: Final = Image.fromarray(np.random.default_rng(0).integers(0, 256, (8, 9, 3), np.uint8))


def saved(kind: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    PICTURE.save(buffer, kind, **options)
    return buffer.getvalue()


def media(major: bytes, *compatible: bytes) -> bytes:
    """The start of a file of the ISO base media format."""
    brands = b"ftyp" + major + bytes(4) + b"".join(compatible)
    return struct.pack(">I", 4 + len(brands)) + brands + b"\0\0\0\x08meta"


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        pytest.param(saved("GIF"), "a GIF", id="GIF"),
        pytest.param(saved("TIFF"), "a TIFF image", id="TIFF"),
        pytest.param(b"MM\0*" + bytes(9), "a TIFF image", id="TIFF, big-endian"),
        pytest.param(saved("TIFF", big_tiff=True), "a TIFF image", id="BigTIFF"),
        pytest.param(saved("BMP"), "a BMP image", id="BMP"),
        pytest.param(saved("PDF"), "a PDF document", id="PDF"),
        pytest.param(media(b"heic", b"mif1", b"heic"), "a HEIC image", id="HEIC of a telephone"),
        pytest.param(media(b"mif1", b"miaf", b"heic"), "a HEIC image", id="HEIC of another brand"),
        pytest.param(media(b"avif", b"mif1", b"miaf"), "an AVIF image", id="AVIF"),
        pytest.param(media(b"mif1", b"avif", b"heic"), "an AVIF image", id="AVIF of another brand"),
        pytest.param(media(b"isom", b"mp42"), "a film, as of MP4", id="MP4"),
        pytest.param(b"\xff\x0a\xfa\x7f", "a JPEG XL image", id="JPEG XL, bare"),
        pytest.param(b"\0\0\0\x0cJXL \r\n\x87\n", "a JPEG XL image", id="JPEG XL"),
        pytest.param(b"\0\0\0\x0cjP  \r\n\x87\n", "a JPEG 2000 image", id="JPEG 2000"),
        pytest.param(b"\xff\x4f\xff\x51\0\x2f", "a JPEG 2000 image", id="JPEG 2000, bare"),
        pytest.param(bytes(128) + b"DICM", "a DICOM file", id="DICOM"),
        pytest.param(b'<svg xmlns="http://www.w3.org/2000/svg">', "an SVG drawing", id="SVG"),
        pytest.param(b'<?xml version="1.0"?>\n<!-- by hand -->\n<svg>', "an SVG drawing", id="SVG as XML"),
    ],
)
def test_an_image_of_another_format_is_named(data: bytes, kind: str) -> None:
    assert kind_of(data) == kind


@pytest.mark.skipif(not features.check("avif"), reason="this Pillow writes no AVIF")
def test_avif_as_it_is_written_is_named() -> None:
    assert kind_of(saved("AVIF")) == "an AVIF image"


@pytest.mark.skipif(not features.check("jpg_2000"), reason="this Pillow writes no JPEG 2000")
def test_jpeg_2000_as_it_is_written_is_named() -> None:
    assert kind_of(saved("JPEG2000")) == "a JPEG 2000 image"


@pytest.mark.parametrize(
    ("data", "part"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n", "Git LFS"),
        (b"<!DOCTYPE html>\n<html>", "HTML page"),
        (b"\xef\xbb\xbf\n<HTML><head><title>403</title>", "HTML page"),
        (b"<?xml version='1.0'?><!DOCTYPE html PUBLIC>", "HTML page"),
        (b"/9j/4AAQSkZJRg", "base64"),
        (b"iVBORw0KGgoAAAANSUhEUg", "base64"),
        (b"data:image/png;base64,iVBOR", "data: URI"),
        (b"PK\x03\x04", "ZIP"),
        (b"\x1f\x8b\x08", "gzip"),
        (b"\x93NUMPY\x01", "NumPy"),
    ],
)
def test_a_file_that_is_no_image_is_named(data: bytes, part: str) -> None:
    kind = kind_of(data)
    assert kind is not None
    assert part in kind


@pytest.mark.parametrize(
    "data", [b"", b"\0", b"hello", b"BM is how this text begins", b"<p>", b"\0\0\0\x18ftyx", bytes(600)]
)
def test_what_nobody_would_know_is_not_named(data: bytes) -> None:
    assert kind_of(data) is None


@pytest.mark.parametrize(
    "data", [b" " * 10**6, b"<!---->" * 10**5, b"\0\0\0\x18ftyp" + b"avi " * 10**5, b"<?xml" * 10**5]
)
def test_a_long_file_is_told_by_its_start(data: bytes) -> None:
    started = time.perf_counter()
    kind_of(data)
    assert time.perf_counter() - started < 0.1
