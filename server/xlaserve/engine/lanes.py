"""Lanes: how many batches a device runs at the same time, and whose turn it is.

Models share a device by start-time fair queueing (Goyal, Vin and Cheng, 1996): each batch advances its model's virtual
time by the seconds it costs, and a free lane goes to the model whose virtual time is least. A model that was quiet
starts at the device's virtual time: it is served next, but saves up no credit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Share:
    """One model's part of the device."""

    def __init__(self, is_full: Callable[[], bool]) -> None:
        self.is_full = is_full
        """Whether its next batch gains nothing by waiting for more images."""
        self.virtual_s = 0.0
        self.waiter: asyncio.Future[None] | None = None


class Lanes:
    """Grants lanes to shares. All methods run on one event loop.

    Besides the batches in the `count` lanes, one more may be under way, so that it is gathered while the others run.
    That place is only given to a full batch: any other would gain by waiting for company until a lane is free.
    """

    def __init__(self, count: int) -> None:
        if count < 1:
            raise ValueError(f"a device has at least one lane, got {count}")
        self.count = count
        self._under_way = 0
        self._virtual_s = 0.0
        self._waiting: list[Share] = []

    @property
    def busy(self) -> int:
        """Lanes that run a batch of somebody else's, as seen by a share that has just acquired one."""
        return min(self._under_way, self.count) - 1

    async def acquire(self, share: Share) -> None:
        """Waits for the turn of `share`. Every return is answered by one `release`."""
        share.virtual_s = max(share.virtual_s, self._virtual_s)
        share.waiter = asyncio.get_running_loop().create_future()
        self._waiting.append(share)
        self.grant()
        try:
            await share.waiter
        except asyncio.CancelledError:
            if share.waiter.done() and not share.waiter.cancelled():
                self.release()
            else:
                self._waiting.remove(share)
            raise

    def charge(self, share: Share, cost_s: float) -> None:
        """Counts the batch for which `share` acquired its lane."""
        share.virtual_s += cost_s

    def release(self) -> None:
        """Gives a lane back: its batch has run, or there was none."""
        self._under_way -= 1
        self.grant()

    def grant(self) -> None:
        """Hands out what is free; called whenever that, or whether a share is full, may have changed."""
        while self._waiting and self._under_way <= self.count:
            if self._under_way < self.count:
                able = self._waiting
            else:
                able = [share for share in self._waiting if share.is_full()]
                if not able:
                    return
            share = min(able, key=lambda share: share.virtual_s)
            self._waiting.remove(share)
            self._under_way += 1
            self._virtual_s = max(self._virtual_s, share.virtual_s)
            assert share.waiter is not None
            share.waiter.set_result(None)
