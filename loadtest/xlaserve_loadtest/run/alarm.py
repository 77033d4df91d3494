"""Wakes an event loop at a moment of the monotonic clock, to within a tenth of a millisecond.

uvloop's own timers are a millisecond coarse, and to poll the clock for so long takes a processor from the target on the
same machine. Linux has timers that are descriptors, which Python offers from 3.13 on only.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import struct
import time
from contextlib import suppress
from typing import Final, Self

_ABSOLUTE: Final = 1
_NS: Final = 10**9


class Alarm:
    """A timer of the running loop, for one waiter at a time. Raises OSError where the system has none."""

    def __init__(self) -> None:
        self._system = ctypes.CDLL(None, use_errno=True)
        try:
            create, self._set = self._system.timerfd_create, self._system.timerfd_settime
        except AttributeError:
            raise OSError("no timerfd") from None
        self._descriptor = create(time.CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self._descriptor < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._descriptor, self._ring)
        self._waiter: asyncio.Future[None] | None = None

    @classmethod
    def or_none(cls) -> Self | None:
        """Returns an alarm; None where the system has none."""
        with suppress(OSError):
            return cls()
        return None

    async def wait_until(self, at_ns: int) -> None:
        """Returns once `time.monotonic_ns()` is `at_ns`, which lies ahead."""
        self._waiter = self._loop.create_future()
        # No interval, and the moment.
        self._set(self._descriptor, _ABSOLUTE, struct.pack("@4l", 0, 0, *divmod(at_ns, _NS)), None)
        await self._waiter

    def close(self) -> None:
        """Ends it; nobody may wait."""
        self._loop.remove_reader(self._descriptor)
        os.close(self._descriptor)

    def _ring(self) -> None:
        with suppress(BlockingIOError):  # it was set anew meanwhile
            os.read(self._descriptor, 8)
            if self._waiter and not self._waiter.done():
                self._waiter.set_result(None)
