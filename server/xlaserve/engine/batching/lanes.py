"""Lanes: how many batches a device runs at the same time, and whose turn it is.

Models share a device by start-time fair queueing (Goyal, Vin and Cheng, 1996): each batch advances its model's virtual
time by the seconds it takes, and a free lane goes to the model whose virtual time is least. A model that was quiet
starts at the device's virtual time: it is served next, but saves up no credit.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(eq=False)
class Share:
    """One model's part of the device."""

    is_full: Callable[[], bool]
    """Whether its next batch gains nothing by waiting for more images."""
    virtual_s: float = 0.0
    """Seconds of its batches: the expected seconds of each when it begins, corrected when it ends."""


class Lanes:
    """Grants lanes to shares. All methods run on one event loop.

    In addition to the batches in the `count` lanes, `ahead` more may be in flight, one for each device that has some of
    the lanes, so that they are gathered while the others run. These places are only given to full batches: any other
    would gain by waiting for more images until a lane is free. No batch overtakes another by them: while a batch
    that is not full is next, they stay empty.
    """

    def __init__(self, count: int, ahead: int = 1, *, clock: Callable[[], float] = time.perf_counter) -> None:
        if count < 1:
            raise ValueError(f"a device has at least one lane, got {count}")
        self.count = count
        self._places = count + ahead
        self._clock = clock
        self._in_flight = 0
        self._busy_s = 0.0
        self._counted_at = clock()
        self._virtual_s = 0.0
        self._busy_until = 0.0
        self._waiting: dict[Share, asyncio.Future[None]] = {}

    @property
    def busy(self) -> int:
        """Lanes that run other batches, as seen by a share that has just acquired one."""
        return min(self._in_flight, self.count) - 1

    @property
    def busy_s(self) -> float:
        """Seconds for which lanes were in use, of all lanes together."""
        self._place(0)
        return self._busy_s

    def _place(self, batches: int) -> None:
        """Counts `batches` more in flight."""
        now = self._clock()
        self._busy_s += (now - self._counted_at) * min(self._in_flight, self.count)
        self._counted_at = now
        self._in_flight += batches

    def count_others(self, share: Share) -> int:
        """Returns the number of shares that wait, not counting `share`."""
        return len(self._waiting) - (share in self._waiting)

    def wait_s(self, now: float) -> float:
        """Returns the seconds in which the batches in flight are expected to end; 0 where a lane is free."""
        return max(0.0, self._busy_until - now) if self._in_flight >= self.count else 0.0

    def began(self, expected_s: float, now: float) -> None:
        """Counts a batch that is expected to take one lane `expected_s`."""
        self._busy_until = max(self._busy_until, now) + expected_s / self.count

    def ended(self, expected_s: float, took_s: float) -> None:
        """Corrects the expected seconds of a batch that `began` counted."""
        self._busy_until += (took_s - expected_s) / self.count

    async def acquire(self, share: Share) -> None:
        """Waits for the turn of `share`. Every return must be followed by one `release`.

        A share has one turn at a time: RuntimeError where it waits already.
        """
        if share in self._waiting:
            raise RuntimeError("this share waits for a lane already")
        loop = asyncio.get_running_loop()
        share.virtual_s = max(share.virtual_s, self._virtual_s)
        turn = self._waiting[share] = loop.create_future()
        try:
            self.grant()
            await turn
        except BaseException:
            if turn.done() and not turn.cancelled():  # granted, but the caller will not release it
                self._place(-1)
            raise
        finally:
            del self._waiting[share]
            loop.call_soon(self.grant)

    def try_acquire(self, share: Share) -> bool:
        """Acquires a lane for `share` if one is free and no share waits; returns whether it did."""
        if self._waiting or self._in_flight >= self.count:
            return False
        share.virtual_s = self._virtual_s = max(share.virtual_s, self._virtual_s)
        self._place(1)
        return True

    def acquire_idle(self) -> bool:
        """Acquires a lane if none is in use and no share waits; returns whether it did. Followed by one `release`."""
        if self._waiting or self._in_flight:
            return False
        self._place(1)
        return True

    def release(self) -> None:
        """Releases a lane: its batch has run, or there was none."""
        self._place(-1)
        self.grant()

    def grant(self) -> None:
        """Grants one place; called whenever places may have become free, or a share full.

        One at a time: a share whose turn has come may want the next place too, and must not be passed over because its
        task has not resumed yet. Once it has, the next place is granted.
        """
        if self._in_flight >= self._places or not self._waiting:
            return
        if any(turn.done() for turn in self._waiting.values()):
            return
        share = min(self._waiting, key=lambda share: share.virtual_s)
        if self._in_flight >= self.count and not share.is_full():
            return
        self._place(1)
        self._virtual_s = max(self._virtual_s, share.virtual_s)
        self._waiting[share].set_result(None)
