"""An event loop in virtual time."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable
from typing import Any


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop whose time stands still while anything can happen, and then jumps to the next timer.

    Work of threads is not known to it: a loop that waits for a thread alone raises RuntimeError. Times that are
    to meet exactly should be multiples of a power of two.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.when_quiet: list[Callable[[], None]] = []
        """Functions called whenever nothing is ready and time is about to advance."""
        super().__init__(_Selector(self))

    def time(self) -> float:
        """Returns the virtual time, in seconds."""
        return self.now


class _Selector(selectors.SelectSelector):
    def __init__(self, loop: VirtualTimeLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[Any]:
        ready = super().select(0)
        if ready or timeout == 0:
            return ready
        for check in self._loop.when_quiet:
            check()
        if timeout is None:
            raise RuntimeError("everybody waits and nothing will ever happen")
        self._loop.now += timeout
        return []
