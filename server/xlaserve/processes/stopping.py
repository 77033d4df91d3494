"""How signals end a process that serves: the first begins it, the second ends a wait, the third goes at once."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import signal
import time
from collections.abc import Callable
from typing import Final

from xlaserve.telemetry import log_writer

SECOND_SIGNAL_S: Final = 0.5
"""A signal that comes sooner after another is the same one: supervisors send it to a process and to its group."""
LAST_WORDS_S: Final = 0.2
"""How long the log may take to be written where it stops at once."""

log = logging.getLogger(__name__)


class Stopping:
    """Listens for SIGTERM and SIGINT on the running event loop. `at_once` is called before it goes at once."""

    def __init__(
        self, at_once: Callable[[], None] = lambda: None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.begun = asyncio.Event()
        """Set once the process is to end."""
        self.draining = asyncio.Event()
        """Set once it refuses new requests, or is about to."""
        self.leaving = asyncio.Event()
        """Set once new clients are served by another process, and those that are here have some time to go there."""
        self.has_crashed = False
        self._at_once = at_once
        self._clock = clock
        self._last_signal_at = -math.inf

    def listen(self) -> None:
        """Acts on signals from now on."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.on_signal, number)

    def listen_for_leave(self) -> None:
        """Acts on SIGUSR2 as well, which has a process leave."""
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR2, self.leaving.set)

    def crash(self) -> None:
        """Ends the process, which has failed."""
        self.has_crashed = True
        self.begun.set()

    def on_signal(self, number: int) -> None:
        """Goes one step further."""
        now = self._clock()
        if now - self._last_signal_at < SECOND_SIGNAL_S:
            return
        self._last_signal_at = now
        if not self.begun.is_set():
            self.begun.set()
        elif not self.draining.is_set():
            self.draining.set()
        else:
            log.warning("another signal: stopping at once")
            self._at_once()
            log_writer.finish(LAST_WORDS_S)
            os._exit(128 + number)
