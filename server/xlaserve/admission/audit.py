"""A line in the log for each thing that an administrator did, and for each refusal of what is for administrators."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from xlaserve.admission.caller import ADMIN, CURRENT, Role
from xlaserve.admission.log_lines import LineBound, shown
from xlaserve.errors import status_of

MAX_LENGTH: Final = 128
"""Characters of a name that somebody else chose."""

log = logging.getLogger(__name__)


@contextmanager
def audited(action: str, subject: str = "") -> Iterator[None]:
    """Logs who did `action`, to `subject`, and how it ended, once it has."""
    outcome = "OK"
    try:
        yield
    except BaseException as error:
        outcome = status_of(error)[0].grpc if isinstance(error, Exception) else "CANCELLED"
        raise
    finally:
        _write(logging.INFO, action, outcome, subject)


class Refusals:
    """Logs who was refused what is for administrators: a hundred lines at once, and some a second from then on."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._bound = LineBound(log, logging.WARNING, "refusals of what is for administrators", clock)

    def note(self, action: str, roles: Sequence[Role], error: Exception) -> None:
        """Logs that the current caller was refused `action` with `error`, where it is for administrators alone."""
        status = status_of(error)[0].grpc
        if (*roles,) == ADMIN and self._bound.admits(status):
            _write(logging.WARNING, action, status)


def _write(level: int, action: str, outcome: str, subject: str = "") -> None:
    fields = {"caller": CURRENT.get().name[:MAX_LENGTH], "action": action, "status": outcome}
    if subject:
        fields["subject"] = subject[:MAX_LENGTH]
    what = f"{action} {shown(fields['subject'])}" if subject else action
    log.log(level, "audit: %s by %s: %s", what, shown(fields["caller"]), outcome, extra=fields)
