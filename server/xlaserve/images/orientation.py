"""The orientation of an image, from the metadata of its file.

It is read where Pillow's `ImageOps.exif_transpose` reads it, in the same order: EXIF, in a PNG also as the text that
ImageMagick writes, and, where no EXIF has the tag, XMP. Pillow's own TIFF parser is not used: it reads every entry, and
writes warnings about them.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from typing import Any, Final

from PIL import Image

TURNS: Final = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""The operation that turns an image upright, by its orientation."""
SIDEWAYS: Final = (5, 6, 7, 8)
"""The orientations whose turn swaps width and height."""

UPRIGHT: Final = 1

_EXIF: Final = "exif"
_RAW_PROFILE: Final = "Raw profile type exif"
_XMP_TEXT, _XMP_BYTES = "XML:com.adobe.xmp", "xmp"
_MAX_PROFILE_LENGTH: Final = 1 << 20
"""Characters of EXIF in hexadecimal, and the most that Pillow unpacks; it takes milliseconds to read so many."""
_PROFILE_HEAD_LINES: Final = 3  # an empty one, the profile's name and its length

_TAG: Final = 0x0112
_PREFIX: Final = re.compile(rb"^(Exif\0\0){1,2}")
_ORDERS: Final = {b"II*\0": "<", b"MM\0*": ">", b"II\0*": "<", b"MM*\0": ">"}
"""The byte order of a TIFF file by how it begins; the last two are wrong, and some cameras write them."""
_NUMBERS: Final = {3: "H", 4: "I", 5: "II", 6: "b", 8: "h", 9: "i", 10: "ii", 11: "f", 12: "d", 13: "I", 16: "Q"}
"""TIFF's kinds of numbers, as `struct` calls them; two integers are a numerator and a denominator."""
_TEXTS: Final = (1, 2, 7)
"""TIFF's kinds of single bytes, which Pillow takes for text: an orientation of such a kind turns nothing."""

_SIZES: Final = {**{kind: struct.calcsize(f"={_NUMBERS[kind]}") for kind in _NUMBERS}, **dict.fromkeys(_TEXTS, 1)}
"""The bytes of one value of each kind that Pillow knows."""

_XMP_VALUE: Final = 'tiff:Orientation(="|>)([0-9])'
_IN_TEXT: Final = re.compile(_XMP_VALUE)
_IN_BYTES: Final = re.compile(_XMP_VALUE.encode())
_XMP_STEP: Final = 1 << 20  # each search holds the interpreter's lock
_XMP_VALUE_LENGTH: Final = 19


def orientation(info: Mapping[Any, Any]) -> int:
    """Returns the orientation from 1, which is upright, to 8; 1 where there is none that can be read.

    `info` is the metadata of a JPEG, PNG or WebP file as Pillow's plug-ins read it.
    """
    exif = info.get(_EXIF)
    if exif is None and _RAW_PROFILE in info:
        exif = _from_hexadecimal(info[_RAW_PROFILE])
    value = _in_exif(exif) if isinstance(exif, bytes) else None
    if value is None:
        value = _in_xmp(info.get(_XMP_TEXT) or info.get(_XMP_BYTES))
    return int(value) if value in TURNS else UPRIGHT


def _from_hexadecimal(profile: str) -> bytes | None:
    if len(profile) > _MAX_PROFILE_LENGTH:
        return None
    try:
        return bytes.fromhex("".join(profile.split("\n", _PROFILE_HEAD_LINES)[_PROFILE_HEAD_LINES:]))
    except ValueError:
        return None


def _in_exif(exif: bytes) -> float | None:
    """Returns the value of the tag, 0 where it is none that Pillow takes for a number; None where there is no tag.

    Of a damaged table, as much counts as Pillow reads: up to an entry that is cut off or whose value lies behind the
    end, without values that together are longer than all of it.
    """
    tiff = _PREFIX.sub(b"", exif)
    order = _ORDERS.get(tiff[:4])
    if order is None:
        return None
    try:
        (start,) = struct.unpack_from(f"{order}I", tiff, 4)
        (entries,) = struct.unpack_from(f"{order}H", tiff, start)
        loaded: set[int] = set()
        elsewhere_bytes = 0
        for entry in range(start + 2, start + 2 + 12 * entries, 12):
            tag, kind, count, inline = struct.unpack_from(f"{order}HHI4s", tiff, entry)
            if tag in loaded or kind not in _SIZES:
                continue
            length, at = count * _SIZES[kind], entry + 8
            if length > len(inline):  # it lies elsewhere
                elsewhere_bytes += length
                if elsewhere_bytes > len(tiff):
                    continue
                (at,) = struct.unpack(f"{order}I", inline)
            if at + length > len(tiff):
                return None
            if not length:
                continue
            if tag == _TAG:
                return _value(order, kind, tiff, at)
            loaded.add(tag)
    except struct.error:
        pass
    return None


def _value(order: str, kind: int, tiff: bytes, at: int) -> float:
    """Returns the first number of a value, 0 where Pillow takes it for text."""
    if kind in _TEXTS:
        return 0
    value, *denominator = struct.unpack_from(order + _NUMBERS[kind], tiff, at)
    return float(value / (denominator[0] or float("nan"))) if denominator else float(value)


def _in_xmp(xmp: str | bytes | None) -> int | None:
    if not xmp:
        return None
    for start in range(0, len(xmp), _XMP_STEP):
        end = start + _XMP_STEP + _XMP_VALUE_LENGTH
        found = _IN_TEXT.search(xmp, start, end) if isinstance(xmp, str) else _IN_BYTES.search(xmp, start, end)
        if found:
            return int(found[2])
    return None
