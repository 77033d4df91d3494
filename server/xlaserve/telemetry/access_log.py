"""A line in the log for each request that failed, or for every request."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from functools import lru_cache
from operator import attrgetter
from types import MappingProxyType
from typing import Final, Literal

from xlaserve.admission.log_lines import LineBound, shown
from xlaserve.config import Mode
from xlaserve.engine.timings import STAGES, Timings
from xlaserve.telemetry import request_context

LEVELS: Final = {
    "INTERNAL": logging.ERROR,
    "FAILED_PRECONDITION": logging.WARNING,
    "RESOURCE_EXHAUSTED": logging.WARNING,
    "UNAVAILABLE": logging.WARNING,
    "DEADLINE_EXCEEDED": logging.WARNING,
}
"""Log level by status: ERROR for faults of the server, WARNING for requests that it could not serve in time. All other
statuses are caused by clients and logged at INFO."""
MAX_TEXT_LENGTH: Final = 128
"""Characters of a name or text from a client that a line shows."""

_STAGES_TEXT: Final = " ".join(f"{stage}=%.6f" for stage in STAGES)
_seconds_of: Final = attrgetter(*STAGES)

log = logging.getLogger(__name__)


class AccessLog:
    """Writes a line for each request, as the setting `access_log` chooses; each level has its own limit of lines."""

    def __init__(
        self, lines: Literal["off", "errors", "all"] = "errors", clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.has_answers = lines == "all"
        """Whether requests that succeed have lines."""
        self._least_level = logging.ERROR if lines == "off" else logging.INFO
        self._bounds = {level: LineBound(log, level, "failures", clock) for level in (logging.INFO, *LEVELS.values())}

    def answered(
        self, method: str, model: str, version: str, mode: Mode, *, images: int, timings: Timings, caller: str = ""
    ) -> None:
        """Writes a line for a request of `caller` that succeeded."""
        fields, text = _answered(method, model, version, mode)
        seconds = _seconds_of(timings)
        text = f"{text} images={images} {_STAGES_TEXT % seconds}"
        fields = {**fields, "images": images, **dict(zip(STAGES, seconds, strict=True))}
        _write(logging.INFO, fields, text, caller)

    def failed(
        self,
        method: str,
        status: str,
        reason: str,
        *,
        caller: str = "",
        model: str = "",
        version: str = "",
        seconds: float | None = None,
    ) -> None:
        """Writes a line for a request that failed, with the caller, version and seconds as far as they are known."""
        level = LEVELS.get(status, logging.INFO)
        if level < self._least_level or not log.isEnabledFor(level) or not self._bounds[level].admits(status):
            return
        timed = {} if seconds is None else {"total_s": seconds}
        call = {"method": method, "status": status, "model": model[:MAX_TEXT_LENGTH], "version": version}
        fields = {name: value for name, value in (call | timed | {"reason": reason}).items() if value != ""}
        _write(level, fields, _text(fields), caller)

    def flush(self) -> None:
        """Logs now how many lines the limits left out."""
        for bound in self._bounds.values():
            bound.tell()


@lru_cache(maxsize=1024)
def _answered(method: str, model: str, version: str, mode: Mode) -> tuple[Mapping[str, object], str]:
    """Returns the fields that all answers of a method by one program share, and their text."""
    fields = {"method": method, "status": "OK", "model": model, "version": version, "mode": str(mode)}
    return MappingProxyType(fields), _text(fields)


@lru_cache(maxsize=1024)
def _caller(name: str) -> tuple[str, str]:
    """Returns the caller's field and its text."""
    name = name[:MAX_TEXT_LENGTH]
    return name, f" caller={shown(name)}" if name else ""


def _write(level: int, about: Mapping[str, object], text: str, caller: str) -> None:
    """Writes the line `text`, of the fields `about`, with the caller and the ids of the request."""
    if not log.isEnabledFor(level):
        return
    name, shown_caller = _caller(caller)
    text += shown_caller
    fields = dict(about)
    if name:
        fields["caller"] = name
    request = request_context.current()
    if request is not None and request.message_id:
        fields["message_id"] = message_id = request.message_id[:MAX_TEXT_LENGTH]
        text += f" message_id={shown(message_id)}"
    # Not `log.log`: it walks the stack to find its caller, which costs as much as the line itself.
    extra = fields | request_context.log_fields()
    log.handle(log.makeRecord(log.name, level, __file__, 0, text, (), None, extra=extra))


def _text(fields: Mapping[str, object]) -> str:
    return " ".join(f"{name}={shown(value)}" for name, value in fields.items())
