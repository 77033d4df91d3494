"""A line in the log for each request that failed, or for every request."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Final, Literal

from xlaserve.access.caller import CURRENT
from xlaserve.config import Mode
from xlaserve.log_lines import LineBound, shown
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
MAX_TEXT_LENGTH: Final = 128
"""Characters of what clients call things."""

log = logging.getLogger(__name__)


class AccessLog:
    """Writes the lines that the setting `access_log` asks for. Floods are bounded, for each level by itself."""

    def __init__(
        self, lines: Literal["off", "errors", "all"] = "errors", clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.has_answers = lines == "all"
        """Whether requests that succeed have lines."""
        self._least_level = logging.ERROR if lines == "off" else logging.INFO
        self._bounds = {level: LineBound(log, level, "failures", clock) for level in (logging.INFO, *LEVELS.values())}

    def answered(self, method: str, model: str, version: str, mode: Mode, *, images: int, timings: Timings) -> None:
        """Writes a line for a request that succeeded."""
        what = {"method": method, "status": "OK", "model": model, "version": version, "mode": str(mode)}
        _write(logging.INFO, what | {"images": images} | asdict(timings))

    def failed(
        self,
        method: str,
        status: str,
        reason: str,
        *,
        model: str = "",
        version: str = "",
        seconds: float | None = None,
    ) -> None:
        """Writes a line for a request that failed, with the `version` and the `seconds` if they are known."""
        level = LEVELS.get(status, logging.INFO)
        if level < self._least_level or not log.isEnabledFor(level) or not self._bounds[level].admits(status):
            return
        timed = {} if seconds is None else {"total_s": seconds}
        what = {"method": method, "status": status, "model": model[:MAX_TEXT_LENGTH], "version": version}
        _write(level, what | timed | {"reason": reason})

    def flush(self) -> None:
        """Says now how many lines were left out."""
        for bound in self._bounds.values():
            bound.tell()


def _write(level: int, what: Mapping[str, object]) -> None:
    fields = {**what, "caller": CURRENT.get().name[:MAX_TEXT_LENGTH]}
    request = request_context.current()
    if request is not None:
        fields["message_id"] = request.message_id[:MAX_TEXT_LENGTH]
    fields = {name: value for name, value in fields.items() if value != ""}
    text = " ".join(f"{name}={shown(value)}" for name, value in fields.items())
    log.log(level, "%s", text, extra=fields | request_context.log_fields())
