"""Log lines on stderr, for people or for machines.

In both formats a record is one line: text from a client can neither break a line nor colour a terminal.
"""

from __future__ import annotations

import json
import logging
import os
import re
import time
import warnings
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import lru_cache, partial
from typing import Final, Literal, TextIO

from xlaserve.telemetry import request_context
from xlaserve.telemetry.log_writer import LogWriter

AUDIT: Final = "xlaserve.admission.audit"
"""The logger of actions of administrators."""
ACCESS: Final = "xlaserve.telemetry.access_log"
"""The logger of requests."""
OUTPUT: Final = "xlaserve.processes.supervision.output"
"""The logger of lines on a process's stderr that are not records, such as those of a library that aborts."""
_STANDARD: Final = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}
_RECORD: Final = re.compile(r'\{"time": ".*\}|\d\d:\d\d:\d\d (DEBUG|INFO |WARN |ERROR|CRITICAL) .*|    .*')

_ENCODER: Final = json.JSONEncoder(default=str, allow_nan=False)

Format = Literal["human", "json"]


def configure(level: str, format: Format, role: str = "") -> None:
    """Sends xlaserve's records of at least `level` to stderr, audit records always, and other libraries' warnings.

    `human`: `12:34:56 INFO  the message`, in local time; a traceback follows, indented. `json`: one object a line with
    `time` (UTC, milliseconds), `level`, `logger`, `message`, every field given as `extra`, and `exception` where there
    is one. A record that is logged while a call is answered has the call's id: `[request 5f3a]` at the end of the
    message, or the field `request_id`, and `trace_id` where it has a trace. In one of several processes a record has
    the process's `role`: `[front 2]` before the message, or the field `role`.
    """
    threshold = logging.getLevelNamesMapping()[level.upper()]
    # No format shows thread and process, and finding them costs time for each record.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    handler = _Handler()
    handler.setFormatter(_Json() if format == "json" else _Human())
    handler.addFilter(_name_call)
    if role:
        handler.addFilter(partial(_name_role, role))
    logging.basicConfig(handlers=[handler], level=max(threshold, logging.WARNING), force=True)
    logging.getLogger("xlaserve").setLevel(threshold)
    logging.getLogger(AUDIT).setLevel(min(threshold, logging.INFO))
    logging.getLogger(OUTPUT).setLevel(min(threshold, logging.WARNING))
    logging.captureWarnings(True)
    warnings.formatwarning = _format_warning
    # Pillow's warnings are about images of clients, and Python would remember each distinct text for ever.
    warnings.filterwarnings("ignore", module=r"PIL(\.|$)")
    logging.getLogger("PIL").setLevel(logging.CRITICAL)


def quiet_tensorflow() -> None:
    """Silences messages of TensorFlow's C++ code below errors, unless the environment sets their level.

    Has an effect only before TensorFlow is imported.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")


def _format_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """Returns a warning without the path and the source line that raised it."""
    return f"{category.__name__}: {message}"


def _name_call(record: logging.LogRecord) -> bool:
    if not hasattr(record, "request_id"):
        record.__dict__.update(request_context.log_fields())
    return True


def _name_role(role: str, record: logging.LogRecord) -> bool:
    record.role = role
    return True


def is_record(line: str) -> bool:
    """Returns whether a line looks like one of a record as `configure` formats it, a line of a traceback included."""
    return _RECORD.fullmatch(line) is not None and line.isprintable()


class _Handler(logging.StreamHandler[TextIO]):
    """Writes records to stderr. Those of the access log at INFO may wait, to be written together."""

    def emit(self, record: logging.LogRecord) -> None:
        """Writes a record, at once or within HOLD_S of `log_writer`."""
        if record.levelno > logging.INFO or record.name != ACCESS or not isinstance(self.stream, LogWriter):
            super().emit(record)
            return
        try:
            self.stream.write_soon(self.format(record) + self.terminator)
        except Exception:  # as StreamHandler does: an error of logging must not end its caller
            self.handleError(record)


class _Human(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        clock = _clock(int(record.created))
        level = "WARN" if record.levelno == logging.WARNING else record.levelname
        request_id = getattr(record, "request_id", "")
        call = f" [request {request_id}]" if request_id else ""
        role = getattr(record, "role", "")
        process = f"[{role}] " if role else ""
        lines = [f"{clock} {level:<5} {process}{_printable(record.getMessage().rstrip())}{call}"]
        if record.exc_info:
            lines += [f"    {_printable(line)}" for line in self.formatException(record.exc_info).split("\n")]
        return "\n".join(lines)


@lru_cache(maxsize=1)
def _clock(second: int) -> str:
    """Returns the local time of a second since the epoch."""
    return time.strftime("%H:%M:%S", time.localtime(second))


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        fields |= {key: value for key, value in record.__dict__.items() if key not in _STANDARD and key not in fields}
        return _dump(fields)


def _dump(fields: Mapping[str, object]) -> str:
    try:
        return _ENCODER.encode(fields)
    except (TypeError, ValueError):  # JSON has no NaN, and no keys but strings
        return json.dumps({key: str(value) for key, value in fields.items()})


def _printable(text: str) -> str:
    """Returns the text with line breaks, control and direction characters written as escapes."""
    if text.isprintable():
        return text
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode("ascii") for letter in text
    )
