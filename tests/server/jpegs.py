"""JPEGs that Pillow does not write."""

from __future__ import annotations

import struct


def _segment(marker: int, body: bytes) -> bytes:
    return bytes([0xFF, marker]) + struct.pack(">H", len(body) + 2) + body


def grey_jpeg(width: int, height: int, scans: tuple[bytes, ...] = (b"\1\2\3",), *, lossless: bool = False) -> bytes:
    """A JPEG of one grey and three components, each in one of the `scans`: every value in it is coded as one bit, 0."""
    table = bytes([1, *[0] * 15, 0])  # one code, of one bit, for the value 0
    components = b"".join(bytes([number, 0x11, 0]) for number in (1, 2, 3))
    parts = [b"\xff\xd8", _segment(0xDB, bytes([0, *[1] * 64]))]
    parts.append(_segment(0xC3 if lossless else 0xC0, struct.pack(">BHHB", 8, height, width, 3) + components))
    parts += [_segment(0xC4, b"\0" + table), _segment(0xC4, b"\x10" + table)]
    bits = width * height if lossless else -(-width // 8) * -(-height // 8) * 2
    for scan in scans:
        selection = b"\1\0\0" if lossless else b"\0\x3f\0"
        parts.append(_segment(0xDA, bytes([len(scan)]) + b"".join(bytes([number, 0]) for number in scan) + selection))
        parts.append(bytes(-(-bits * len(scan) // 8)))
    return b"".join(parts) + b"\xff\xd9"
