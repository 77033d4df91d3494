"""The interpreter's lock, and how long other threads may keep it from the event loop."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, TypeVar

T = TypeVar("T")

SWITCH_S: Final = sys.getswitchinterval()
SHARED_SWITCH_S: Final = 0.001
"""How long a thread may keep the interpreter's lock from others: as a rule, and while several work. The event loop
waits that long for each thread before it, some times a request. Without such threads a short interval would only cost:
requests/s of small ones fall by a tenth."""

_lock = threading.Lock()
_working = 0


@contextmanager
def shared() -> Iterator[None]:
    """Surrounds work in Python on other threads than the event loop's. May be entered by any thread, several times."""
    _count(1)
    try:
        yield
    finally:
        _count(-1)


async def on_thread(work: Callable[[], T]) -> T:
    """Runs `work`, which is Python code, on another thread, and returns its result."""
    return await asyncio.to_thread(_shared, work)


def _shared(work: Callable[[], T]) -> T:
    with shared():
        return work()


def _count(change: int) -> None:
    global _working  # noqa: PLW0603 - there is one interpreter
    with _lock:
        _working += change
        sys.setswitchinterval(SHARED_SWITCH_S if _working else SWITCH_S)
