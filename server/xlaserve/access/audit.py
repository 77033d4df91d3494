"""A line in the log for each thing that an administrator did or was refused."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from xlaserve.access.caller import CURRENT
from xlaserve.status import status_of

MAX_SUBJECT_LENGTH: Final = 128

log = logging.getLogger(__name__)


@contextmanager
def audited(action: str, subject: str) -> Iterator[None]:
    """Logs who did `action` to `subject`, and how it ended, once it has."""
    outcome = "OK"
    try:
        yield
    except BaseException as error:
        outcome = status_of(error)[0].grpc if isinstance(error, Exception) else "CANCELLED"
        raise
    finally:
        caller = CURRENT.get().name
        fields = {"caller": caller, "action": action, "subject": subject[:MAX_SUBJECT_LENGTH], "status": outcome}
        log.info("audit: %(action)s %(subject)s by %(caller)s: %(status)s", fields, extra=fields)
