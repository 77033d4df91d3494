"""A line in the log for each request that failed, or for every request."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextvars import Context
from dataclasses import asdict
from typing import Final, Literal

from xlaserve.access.caller import CURRENT
from xlaserve.config import Mode
from xlaserve.telemetry import request_context
from xlaserve.timings import Timings

LEVELS: Final = {
    "INTERNAL": logging.ERROR,
    "FAILED_PRECONDITION": logging.WARNING,
    "RESOURCE_EXHAUSTED": logging.WARNING,
    "UNAVAILABLE": logging.WARNING,
    "DEADLINE_EXCEEDED": logging.WARNING,
}
"""By status: errors of the server, and what it could not serve in time. The rest is the clients' doing: info."""
BURST_LINES: Final = 100
"""Failures that get a line however fast they come; from then on LINES_PER_S."""
LINES_PER_S: Final = 5.0
LEFT_OUT_S: Final = 10.0
"""How often it is said how many lines were left out."""
MAX_TEXT_LENGTH: Final = 128
"""Characters of what clients call things."""

_PLAIN: Final = re.compile(r"[\w.:/@+-]+", re.ASCII)

log = logging.getLogger(__name__)


class AccessLog:
    """Writes the lines that the setting `access_log` asks for. Floods are bounded, for each level by itself."""

    def __init__(
        self, lines: Literal["off", "errors", "all"] = "errors", clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.has_answers = lines == "all"
        """Whether requests that succeed have lines."""
        self._least_level = logging.ERROR if lines == "off" else logging.INFO
        self._bounds = {level: _Bound(level, clock) for level in (logging.INFO, *LEVELS.values())}

    def answered(self, method: str, model: str, mode: Mode, images: int, timings: Timings) -> None:
        """Writes a line for a request that succeeded."""
        what = {"method": method, "status": "OK", "model": model, "mode": str(mode), "images": images}
        _write(logging.INFO, what | asdict(timings))

    def failed(self, method: str, status: str, reason: str, *, model: str = "", seconds: float | None = None) -> None:
        """Writes a line for a request that failed, after `seconds` where they were measured."""
        level = LEVELS.get(status, logging.INFO)
        if level < self._least_level or not log.isEnabledFor(level) or not self._bounds[level].admits(status):
            return
        timed = {} if seconds is None else {"total_s": seconds}
        what = {"method": method, "status": status, "model": model[:MAX_TEXT_LENGTH]}
        _write(level, what | timed | {"reason": reason})

    def flush(self) -> None:
        """Says now how many lines were left out."""
        for bound in self._bounds.values():
            bound.tell()


class _Bound:
    """Bounds the lines of one level."""

    def __init__(self, level: int, clock: Callable[[], float]) -> None:
        self._level = level
        self._clock = clock
        self._lines_left = float(BURST_LINES)
        self._at = clock()
        self._left_out: Counter[str] = Counter()

    def admits(self, status: str) -> bool:
        """Returns whether one more line may be written; counts it if not."""
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
            log.log(self._level, "left out the lines of %d more failures: %s", self._left_out.total(), counts)
            self._left_out.clear()


def _write(level: int, what: Mapping[str, object]) -> None:
    fields = {**what, "caller": CURRENT.get().name[:MAX_TEXT_LENGTH]}
    request = request_context.current()
    if request is not None:
        fields["message_id"] = request.message_id[:MAX_TEXT_LENGTH]
    fields = {name: value for name, value in fields.items() if value != ""}
    shown = " ".join(f"{name}={_shown(value)}" for name, value in fields.items())
    log.log(level, "%s", shown, extra=fields | request_context.log_fields())


def _shown(value: object) -> str:
    """Returns the value so that it can't be taken for another field, whoever wrote it."""
    if isinstance(value, float):
        return f"{value:.6f}"
    text = str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text)
