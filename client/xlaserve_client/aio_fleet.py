"""A fleet for asyncio: a task follows its name service."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Generic

from xlaserve_client.fleet import ChannelT, Fleet
from xlaserve_client.name_service import NameService, follow


class AsyncFleet(Generic[ChannelT]):
    """Follows the name service until `close`. Belongs to the event loop that runs when it is made."""

    def __init__(
        self,
        service: NameService,
        open_channel: Callable[[str], ChannelT],
        close_channel: Callable[[ChannelT], Coroutine[Any, Any, None]],
    ) -> None:
        self._has_update = asyncio.Event()
        self._close_channel = close_channel
        self._closing: set[asyncio.Task[None]] = set()
        self.members = Fleet(service, open_channel, self._begin_to_close, on_update=self._has_update.set)
        """The servers, of which it gives each call one."""
        self._follower = asyncio.create_task(follow(service, self.members), name=service.target)

    async def wait_for_update(self, timeout_s: float) -> None:
        """Waits for the first answer or failure of the name service, for `timeout_s` at most."""
        if not self._has_update.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(self._has_update.wait(), timeout_s)

    async def close(self) -> None:
        """Ends the task, and closes the channels."""
        self._follower.cancel()
        await asyncio.wait((self._follower,))
        self.members.close()
        self._has_update.set()
        if self._closing:
            await asyncio.wait(self._closing)

    def _begin_to_close(self, channel: ChannelT) -> None:
        closing = asyncio.create_task(self._close_channel(channel))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
