"""Encoded images, and the decoder with limits of tests."""

from __future__ import annotations

import io
import struct
import zlib
from functools import partial

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from xlaserve.config import Color, Decoding, Fit, ResizeSettings
from xlaserve.images import decoder as image_module
from xlaserve.images.decoder import Decoded, ImageLimits
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


def decode_and_place(
    data: bytes, *, height: int, width: int, fit: Fit, limits: ImageLimits = LIMITS, color: Color = Color.RGB
) -> Decoded:
    where = partial(place, input_height=height, input_width=width, fit=fit)
    return image_module.decode(data, where, limits, color=color)


def decode(data: bytes, *, height: int, width: int, limits: ImageLimits) -> NDArray[np.uint8]:
    return decode_and_place(data, height=height, width=width, fit=Fit.RESIZE, limits=limits).pixels


def decode_resized(
    data: bytes,
    *,
    height: int,
    width: int,
    resize: ResizeSettings,
    decoding: Decoding = Decoding.EXACT,
    color: Color = Color.RGB,
) -> NDArray[np.uint8]:
    where = partial(place, input_height=height, input_width=width, fit=Fit.RESIZE)
    return image_module.decode(data, where, LIMITS, decoding=decoding, color=color, resize=resize).pixels


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
