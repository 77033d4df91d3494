"""Text of servers and files, made safe to print."""

from __future__ import annotations

import re
from typing import Final

MAX_MESSAGE: Final = 500
"""Length of the longest message of a server that is kept, in characters."""

_CONTROLS: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def printable(text: str) -> str:
    """Returns a text without control characters other than tab and line feed: a terminal would obey them."""
    return _CONTROLS.sub("\N{REPLACEMENT CHARACTER}", text)


def shortened(message: str) -> str:
    """Returns a message cut to MAX_MESSAGE characters."""
    return message if len(message) <= MAX_MESSAGE else f"{message[: MAX_MESSAGE - 1]}…"
