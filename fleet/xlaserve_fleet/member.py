"""A server of the fleet with its entry in the name service, from its start until it has drained."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from xlaserve_fleet.addresses import DRAINING, READY, RENEW_S, TELL_TIMEOUT_S, Entry
from xlaserve_fleet.process import Found, Recovering, ServerFailed

log = logging.getLogger(__name__)

WATCH_S: Final = 0.1
"""How soon it is noticed that a server has ended."""


class Process(Protocol):
    """A server's process, as `ServerProcess` has it."""

    found: Found

    @property
    def pid(self) -> int | None:
        """Its process number, once there is one."""

    @property
    def has_ended(self) -> bool:
        """Whether it was started and is no more."""

    async def start(self) -> None:
        """Returns once it is ready. Raises ServerFailed."""

    async def check(self) -> None:
        """Raises ServerFailed where it does not serve: Recovering, where it may by itself."""

    async def load(self) -> dict[str, float]:
        """Returns how loaded it is. Raises ServerFailed."""

    async def stop(self) -> None:
        """Drains and ends it."""


class Names(Protocol):
    """The name service, as seen from afar. Anything may be raised where it can't be reached."""

    def renew(self, entry: Entry) -> Awaitable[None]:
        """Adds, changes or keeps an entry."""

    def remove(self, key: str) -> Awaitable[None]:
        """Removes an entry."""


@dataclass(slots=True)
class Member:
    """A server that is in the list while it serves: entered once it is ready, removed at once when it ends.

    While `check` fails its entry is not renewed, so it leaves the list with its lease, and comes back once it is well.

    One that leaves is `draining` in the list first, for at least as long as the name service takes to know it.
    """

    id: str
    process: Process
    names: Names
    about: Mapping[str, Any] = field(default_factory=dict)
    _load: dict[str, float] = field(default_factory=dict)
    _is_well: bool = True
    _following: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Returns once the server is ready and, where the name service answers, in the list. Raises ServerFailed."""
        await self.process.start()
        await self._tell(self.names.renew(self._entry(READY)))
        self._following = asyncio.create_task(self._follow())

    async def check(self) -> None:
        """Raises ServerFailed where the server has ended or does not serve, and is not about to by itself."""
        try:
            await self.process.check()
        except ServerFailed as error:
            self._is_well = False
            if isinstance(error, Recovering):
                return
            raise
        self._is_well = True

    async def load(self) -> dict[str, float]:
        """Returns how loaded the server is. Raises ServerFailed."""
        self._load = await self.process.load()
        return self._load

    async def stop(self) -> None:
        """Has the server leave the list, then drain, then end."""
        if self._following is not None:
            self._following.cancel()
            with suppress(asyncio.CancelledError):
                await self._following
        if self.process.pid is not None and not self.process.has_ended:
            await self._tell(self.names.renew(self._entry(DRAINING)))
        await self.process.stop()
        await self._tell(self.names.remove(self.id))

    async def _follow(self) -> None:
        """Renews the entry while the server lives and is well."""
        loop = asyncio.get_running_loop()
        renew_at = loop.time() + RENEW_S
        while not self.process.has_ended:
            await asyncio.sleep(WATCH_S)
            if loop.time() >= renew_at:
                renew_at = loop.time() + RENEW_S
                if self._is_well:
                    await self._tell(self.names.renew(self._entry(READY)))
        log.error("the server %s has ended", self.id)
        await self._tell(self.names.remove(self.id))

    async def _tell(self, told: Awaitable[None]) -> None:
        """Waits for the name service, without which everything goes on."""
        try:
            async with asyncio.timeout(TELL_TIMEOUT_S):
                await told
        except Exception as error:  # of whatever kind: the next renewal tries again
            log.warning("the name service does not answer: %r", error)

    def _entry(self, state: str) -> Entry:
        found = self.process.found
        about = {**self.about, **self._load, "pid": self.process.pid, "metrics": found.metrics}
        return Entry(self.id, found.grpc, found.http, state, about)
