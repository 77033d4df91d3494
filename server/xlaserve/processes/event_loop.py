"""The event loop of a process that serves: how it runs, its background tasks, and the signals that end it."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import signal
import time
from collections.abc import Callable, Coroutine
from typing import Any, Final, NoReturn

from xlaserve.telemetry import log_writer

SECOND_SIGNAL_S: Final = 0.5
"""A signal within this time after another is the same one: supervisors send it to a process and to its group."""
LAST_WORDS_S: Final = 0.2
"""How long the log may take to be written before a process ends at once."""

log = logging.getLogger(__name__)


def run_loop(main: Coroutine[Any, Any, int]) -> int:
    """Runs `main` on a new event loop of uvloop, and returns its result."""
    import uvloop  # noqa: PLC0415

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


def in_background(work: Coroutine[Any, Any, None], failed: Callable[[], object] = lambda: None) -> asyncio.Task[None]:
    """Starts a task whose result nobody awaits. If it raises, that is logged as critical, and `failed` is called."""

    def ended(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            log.critical("a task failed", exc_info=error)
            failed()

    task = asyncio.create_task(work)
    task.add_done_callback(ended)
    return task


def end_at_once(status: int) -> NoReturn:
    """Ends this process, with no more than its log written. On any thread."""
    log_writer.finish(LAST_WORDS_S)
    os._exit(status)


class Stopping:
    """Stages of the end of this process, by SIGTERM and SIGINT: the first signal begins the end, the second one ends a
    wait before draining, and the third one ends the process at once, after a call of `at_once`. On the event loop.
    """

    def __init__(
        self, at_once: Callable[[], None] = lambda: None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.begun = asyncio.Event()
        """Set once the process is to end."""
        self.draining = asyncio.Event()
        """Set once new requests are refused, or are about to be."""
        self.leaving = asyncio.Event()
        """Set once another process serves new clients, and clients of this one have some time to connect there."""
        self.has_crashed = False
        self._at_once = at_once
        self._clock = clock
        self._last_signal_at = -math.inf

    def listen(self) -> None:
        """Acts on SIGTERM and SIGINT from now on."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.on_signal, number)

    def listen_for_leave(self) -> None:
        """Acts on SIGUSR2 as well, which sets `leaving`."""
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR2, self.leaving.set)

    def crash(self) -> None:
        """Begins the end of this process because of an error that it can't recover from."""
        self.has_crashed = True
        self.begun.set()

    def on_signal(self, number: int) -> None:
        """Begins the next stage of the end, unless the signal is the same one as before (`SECOND_SIGNAL_S`)."""
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
            end_at_once(128 + number)
