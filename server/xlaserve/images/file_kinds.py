"""Kinds of files that are no JPEG, PNG or WebP, for the error of a client that sent one by mistake."""

from __future__ import annotations

import re
from typing import Final

_LOOKED_AT_BYTES: Final = 512

_MARKUP: Final = rb"(\xef\xbb\xbf)?\s*(<[?]xml[^>]*>\s*)?(<!--[^>]*>\s*)*"

_KINDS: Final = {
    "a GIF": rb"GIF8",
    "an AVIF image": rb".{4}ftyp(.{4})*?avi[fs]",
    "a HEIC image": rb".{4}ftyp(.{4})*?(hei[cxms]|hev[cx]|mif1|msf1)",
    "a film, as of MP4": rb".{4}ftyp",
    "a TIFF image": rb"II[*+]\0|MM\0[*+]",
    "a BMP image": rb"BM.{12}[\x0c\x28\x34\x38\x40\x6c\x7c]\0\0\0",
    "a JPEG XL image": rb"\xff\x0a|\0\0\0\x0cJXL ",
    "a JPEG 2000 image": rb"\xff\x4f\xff\x51|\0\0\0\x0cjP  ",
    "a DICOM file": rb".{128}DICM",
    "a Photoshop document": rb"8BPS",
    "a PDF document": rb"%PDF-",
    "an SVG drawing": _MARKUP + rb"<(!doctype svg|svg)",
    "an HTML page, perhaps that of an error or a login": _MARKUP + rb"<(!doctype html|html|head)",
    "a pointer of Git LFS in place of the file (git lfs pull fetches it)": rb"version https://git-lfs",
    "the text of a data: URI in place of an image's bytes": rb"data:",
    "the base64 text of an image in place of its bytes": rb"/9j/|_9j_|iVBORw0KGgo|UklGR",
    "a ZIP archive": rb"PK\x03\x04",
    "a gzip file": rb"\x1f\x8b",
    "a NumPy file": rb"\x93NUMPY",
}
"""The beginning of files of each kind. The first that matches counts."""
_COMPILED: Final = {kind: re.compile(start, re.DOTALL | re.IGNORECASE) for kind, start in _KINDS.items()}


def kind_of(data: bytes) -> str | None:
    """Returns the kind of a file, with its article, from its first bytes; None where it is not known."""
    head = data[:_LOOKED_AT_BYTES]
    return next((kind for kind, start in _COMPILED.items() if start.match(head)), None)
