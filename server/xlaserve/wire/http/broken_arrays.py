"""The reason that keeps a long array of JSON from being one of numbers alone, for the error that refuses it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

import numpy as np
from numpy.typing import NDArray

MOST_LEFT: Final = 16
"""Places at the ends of what was not read as an array, of which an error looks at the text."""
_AROUND_BYTES: Final = 64
_OTHER: Final = rb'(-?\b(?:NaN|Infinity|true|false|null)\b|"[^"\\]{0,32}"(?!\s*:))'
_AMONG_NUMBERS: Final = re.compile(rb"\d\s*,[\s\[]*" + _OTHER + rb"|" + _OTHER + rb"\s*,[\s\[]*-?\d")
"""A value that is no number, behind or before one in an array."""


def around(octets: NDArray[np.uint8], place: int) -> bytes:
    """Returns the text before and behind a place."""
    return octets[max(0, place - _AROUND_BYTES) : place + _AROUND_BYTES].tobytes()


def among_numbers(texts: Iterable[bytes], secret: str) -> str:
    """Returns the first value in `texts` that stands among the numbers of an array and is none; empty without one.

    Strings that begin with `secret` stand for arrays that were read.
    """
    found = (match[1] or match[2] for text in texts for match in _AMONG_NUMBERS.finditer(text))
    return next((one.decode(errors="replace") for one in found if not one.startswith(b'"' + secret.encode())), "")
