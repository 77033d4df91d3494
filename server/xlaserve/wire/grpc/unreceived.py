"""Calls that end before their message is here. gRPC's core does not say which messages and metadata it refuses."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final

from xlaserve.admission.log_lines import LineBound

STATUS: Final = "CANCELLED"
"""The status that they are counted with: whether their client hung up is not known."""

MAX_METADATA_BYTES: Final = 16 * 1024
"""Metadata of a call: names, values and 32 bytes for each, as HTTP/2 counts them. By default gRPC's core refuses some
calls with more than half of that."""

log = logging.getLogger(__name__)


class Unreceived:
    """Counts and logs calls whose message never arrived. Floods of them have few lines.

    `count` is called with the method and the status of each.
    """

    def __init__(
        self, max_message_bytes: int, count: Callable[[str, str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_message_bytes = max_message_bytes
        self._count = count
        self._lines = LineBound(log, logging.INFO, "calls whose message did not arrive", clock)

    def note(self, method: str) -> None:
        """Counts one."""
        self._count(method, STATUS)
        if self._lines.admits(method):
            log.info(
                "%s: a message did not arrive: it has more bytes than max_message_bytes %d, its metadata have more than"
                " %d, or its client hung up",
                method,
                self._max_message_bytes,
                MAX_METADATA_BYTES,
            )
