"""Images as they stand in JSON: in base64, in either alphabet, wrapped into lines or not, or as a `data:` URI."""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Final

import numpy as np

EXPECTED: Final = "base64, or a data: URI in base64"

_STEP_BYTES: Final = 2**18
"""Text that is decoded at once, whole groups of four letters: each step holds the interpreter's lock."""
_LONGEST_ESCAPE: Final = 6  # as in "\u002b"
_URI: Final = re.compile(rb"data:[^,]*", re.IGNORECASE)
_URI_END: Final = b";base64"
_MAX_URI_BYTES: Final = 256
"""Bytes of a `data:` URI in front of its data."""
_BEGINS: Final = re.compile(rb" {0,256}+(?:[\w+/=-]|\\/|\\u00(?:2[bf]|3d)){20}", re.IGNORECASE)
"""No text in words begins so, nor one of another script in escapes. Blanks are bounded, as each match holds the
interpreter's lock."""
_STRING_OPENS: Final = re.compile(rb'(?<!\\)"(?:data:[^"]*;base64,)?\Z', re.IGNORECASE)
_WHITESPACE: Final = b" \t\r\n"
_URL_TO_STANDARD: Final = bytes.maketrans(b"-_", b"+/")
_NO_LETTER: Final = re.compile(rb"[^A-Za-z0-9+/=_ \t\r\n-]")


class NotBase64(ValueError):
    """A text that is not in base64: its message says what came instead, to follow "got"."""

    def __init__(self, got: str) -> None:
        super().__init__(got)
        self.path = ""
        """Where it stands in its JSON, such as `inputs[0].data[2]`."""

    def within(self, key: str | int) -> NotBase64:
        """Returns it with the list's index or the object's key in front of its path."""
        dot = "." if self.path and not self.path.startswith("[") else ""
        self.path = f"[{key}]{dot}{self.path}" if isinstance(key, int) else f"{key[:64]}{dot}{self.path}"
        return self


def most_bytes(letters: int) -> int:
    """Returns how many bytes a text of so many letters stands for at most."""
    return letters * 3 // 4


def decoded(text: bytes | memoryview) -> memoryview:
    """Returns the bytes that a text stands for, with or without padding. Raises NotBase64.

    JSON's escapes in it count as what they stand for, since long texts are taken out of JSON as they are.
    """
    if len(text) <= _STEP_BYTES:
        with suppress(binascii.Error):
            return memoryview(base64.b64decode(text, validate=True))
    begin = _after_uri(text)
    letters = memoryview(text)[begin:]
    octets = np.empty(most_bytes(len(letters)), np.uint8).data
    steps = (letters[start : start + _STEP_BYTES] for start in range(0, len(letters), _STEP_BYTES))
    try:
        return octets[: _fill(octets, steps)]
    except binascii.Error:  # rare, and read at a higher cost
        pass
    try:
        return octets[: _fill(octets, _standard(letters, begin))]
    except binascii.Error:
        raise NotBase64("text that ends within a byte, or goes on behind its padding (=)") from None


def string_begin(text: memoryview, begin: int, end: int) -> int | None:
    """Returns where the string of JSON begins whose base64 `text[begin:end]` is; None where that looks like none."""
    if not _BEGINS.match(text[begin:end]):
        return None
    before = text[max(0, begin - _MAX_URI_BYTES) : begin]
    opening = _STRING_OPENS.search(before)
    return None if opening is None else begin - len(before) + opening.start()


def _after_uri(text: bytes | memoryview) -> int:
    """Returns where the data begin in a `data:` URI; 0 where the text is none."""
    if not (uri := _URI.match(text)):
        return 0
    if uri[0].lower().endswith(_URI_END) and uri.end() < len(text):
        return uri.end() + 1
    raise NotBase64("a data: URI without ;base64,")


def _fill(octets: memoryview, steps: Iterable[bytes | memoryview]) -> int:
    """Decodes each step behind what the ones before it gave, and returns the number of bytes. Raises binascii.Error."""
    size_bytes, is_over = 0, False
    for step in steps:
        if is_over:
            raise binascii.Error
        part = base64.b64decode(step, validate=True)
        octets[size_bytes : size_bytes + len(part)] = part
        size_bytes += len(part)
        is_over = len(part) * 4 != len(step) * 3  # it was padded
    return size_bytes


def _standard(letters: memoryview, begin: int) -> Iterator[bytes]:
    """Yields the letters in the standard alphabet, without whitespace and with padding, in groups of four.

    Raises NotBase64 with the place of what is no letter; the text that has it begins `begin` characters before.
    """
    left, start = b"", 0
    while start < len(letters):
        step = letters[start : start + _STEP_BYTES].tobytes()
        if start + len(step) < len(letters) and (cut := step.rfind(b"\\", 1 - _LONGEST_ESCAPE)) > 0:
            step = step[:cut]
        plain = _unescaped(step)
        if wrong := _NO_LETTER.search(plain):
            raise NotBase64(f"{chr(wrong[0][0])!r} as character {begin + start + wrong.start() + 1}")
        start += len(step)
        left += plain.translate(_URL_TO_STANDARD, _WHITESPACE)
        whole = len(left) // 4 * 4
        if whole:
            yield left[:whole]
        left = left[whole:]
    if left:
        yield left + b"=" * (4 - len(left))


def _unescaped(step: bytes) -> bytes:
    if b"\\" not in step:
        return step
    try:
        text: str = json.loads(b'"%b"' % step)
    except ValueError:
        return step  # whose backslash is refused
    return text.encode("latin-1", "replace")
