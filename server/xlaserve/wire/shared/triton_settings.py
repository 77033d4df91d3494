"""Answers to Triton's trace and logging extensions from a server without them: nothing traced, logs as configured.

Clients may write back what they read; all else is refused, as these are the operator's settings.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Final

from xlaserve.errors import UnsupportedFeature

TRACE: Final[Mapping[str, Sequence[str]]] = {
    "trace_level": ["OFF"],
    "trace_rate": ["1000"],
    "trace_count": ["-1"],
    "trace_mode": ["triton"],
    "trace_file": [""],
    "log_frequency": ["0"],
}
"""Trace settings as Triton shows them by default."""

LogSetting = bool | int | str

log = logging.getLogger(__name__)


def trace_settings(changes: Mapping[str, Sequence[str]]) -> Mapping[str, Sequence[str]]:
    """Returns the trace settings; an empty list among `changes` resets one. Raises UnsupportedFeature."""
    for key, values in changes.items():
        if values and [*values] != TRACE.get(key):
            raise UnsupportedFeature(f"settings.{key[:64]}: this server records no traces")
    return TRACE


def log_settings(changes: Mapping[str, object]) -> Mapping[str, LogSetting]:
    """Returns the log settings. Raises UnsupportedFeature where `changes` differ from them."""
    settings: dict[str, LogSetting] = {
        "log_file": "",
        "log_info": log.isEnabledFor(logging.INFO),
        "log_warning": log.isEnabledFor(logging.WARNING),
        "log_error": log.isEnabledFor(logging.ERROR),
        "log_verbose_level": int(log.isEnabledFor(logging.DEBUG)),
        "log_format": "default",
    }
    for key, value in changes.items():
        if key not in settings or value != settings[key]:
            raise UnsupportedFeature(f"settings.{key[:64]}: set log_level in the server's configuration")
    return settings
