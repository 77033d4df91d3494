"""Text of servers and files, made safe to print."""

from __future__ import annotations

import re
from typing import Final

MAX_MESSAGE: Final = 500
"""Length of the longest message of a server that is kept, in characters."""

_CONTROLS: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """Returns a text without control characters other than tab and line feed: a terminal would obey them.

    Those that turn the direction of the text around them are control characters, too.
    """
    return _CONTROLS.sub("\N{REPLACEMENT CHARACTER}", text)


def one_line(text: str) -> str:
    """Returns a printable text in one line, so that no name can look like a line of a report."""
    return " ".join(printable(text).split())


def shortened(message: str) -> str:
    """Returns a message cut to MAX_MESSAGE characters."""
    return message if len(message) <= MAX_MESSAGE else f"{message[: MAX_MESSAGE - 1]}…"
