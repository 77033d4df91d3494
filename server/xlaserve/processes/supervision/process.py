"""A running process, as its supervisor and watchers see it."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from typing import Protocol

from xlaserve.processes.supervision.messages import OnMessage
from xlaserve.processes.supervision.parent import SILENCED
from xlaserve.processes.supervision.role import Role


class Process(Protocol):
    """A running process; `child_handle.ChildProcess` is one."""

    @property
    def pid(self) -> int:
        """The process number."""

    @property
    def ended(self) -> asyncio.Future[int]:
        """The exit status, negative for the signal that ended the process. Set after the last message was handled."""

    @property
    def output_closed(self) -> asyncio.Future[None]:
        """Done once nothing more of the process's stderr will come."""

    @property
    def beats(self) -> int:
        """How often the event loop of the process has counted (see `pulse`); 0 once the process has ended."""

    def send_signal(self, number: signal.Signals) -> None:
        """Sends the process a signal, unless it has ended."""

    def ask_for_metrics(self) -> None:
        """Asks for the metrics of the process; not to be called again before they have come."""

    def tell_outcome(self, outcome: object) -> None:
        """Sends the process the outcome of its wish for a successor: plain data of JSON."""


Launch = Callable[[Role, OnMessage], Process]
"""Starts a process. Raises OSError."""


def as_words(status: int) -> str:
    """Returns the exit status of a process, negative for the signal that ended it, in words."""
    if status >= 0:
        return f"status {status}"
    meaning = signal.strsignal(-status) or "unknown"
    if status == -SILENCED:
        meaning = f"its event loop stood still, or {meaning}"
    return f"signal {-status} ({meaning})"
