"""Lines of the log that others cause: bounded in number, and with what others wrote in them marked as such."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections import Counter
from collections.abc import Callable
from contextvars import Context
from typing import Final

BURST_LINES: Final = 100
"""Lines that are written however fast they come; from then on LINES_PER_S."""
LINES_PER_S: Final = 5.0
LEFT_OUT_S: Final = 10.0
"""How often it is said how many lines were left out."""

_PLAIN: Final = re.compile(r"[\w.:/@+-]+", re.ASCII)


def shown(value: object) -> str:
    """Returns the value so that it can't be taken for another part of its line, whoever wrote it."""
    if isinstance(value, float):
        return f"{value:.6f}"
    text = str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text)


class LineBound:
    """Bounds the lines of `log` at one level about `things`, such as failures."""

    def __init__(self, log: logging.Logger, level: int, things: str, clock: Callable[[], float]) -> None:
        self._log = log
        self._level = level
        self._things = things
        self._clock = clock
        self._lines_left = float(BURST_LINES)
        self._at = clock()
        self._left_out: Counter[str] = Counter()

    def admits(self, status: str) -> bool:
        """Returns whether one more line may be written; counts it by its status if not."""
        now = self._clock()
        self._lines_left = min(BURST_LINES, self._lines_left + (now - self._at) * LINES_PER_S)
        self._at = now
        if self._lines_left >= 1:
            self._lines_left -= 1
            return True
        if not self._left_out:
            # Not in this request's context: the line will not be about it.
            asyncio.get_running_loop().call_later(LEFT_OUT_S, self.tell, context=Context())
        self._left_out[status] += 1
        return False

    def tell(self) -> None:
        """Says how many lines were left out, if any were."""
        if self._left_out:
            counts = ", ".join(f"{status} {count}" for status, count in self._left_out.most_common())
            said = "left out the lines of %d more %s: %s"
            self._log.log(self._level, said, self._left_out.total(), self._things, counts)
            self._left_out.clear()
