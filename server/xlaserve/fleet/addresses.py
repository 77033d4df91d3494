"""Where the servers of a fleet are: entries that go unless they are renewed, and a wait for changes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

RENEW_S: Final = 2.0
"""How often a server renews its entry."""
LEASE_S: Final = 7.0
"""An entry that was not renewed for this time goes."""
SETTLE_S: Final = 3.0
"""How long nothing is told after the start, so that every server has renewed its entry and no list is short."""
READY: Final = "ready"
DRAINING: Final = "draining"


@dataclass(frozen=True, slots=True)
class Entry:
    """A server of the fleet."""

    id: str
    address: str
    """HOST:PORT of gRPC."""
    http: str
    """HOST:PORT of HTTP."""
    state: str
    """READY, or DRAINING for one that should get no new requests."""
    about: Mapping[str, Any] = field(default_factory=dict)
    """What people want to know of it; clients are not told."""


class Addresses:
    """The servers by id. All methods are for one event loop.

    Clients learn of a change by its generation, which grows with each. It begins at the milliseconds of the clock on
    the wall, so that it still grows when a name service was started again.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, wall_clock: Callable[[], float] = time.time
    ) -> None:
        self._clock = clock
        self._settled_at = clock() + SETTLE_S
        self._entries: dict[str, Entry] = {}
        self._renewed_at: dict[str, float] = {}
        self._changed = asyncio.Event()
        self.generation = int(wall_clock() * 1000)

    @property
    def entries(self) -> list[Entry]:
        """All of them, by id."""
        return [self._entries[key] for key in sorted(self._entries)]

    def renew(self, entry: Entry) -> None:
        """Adds or changes an entry, and keeps it for LEASE_S."""
        before = self._entries.get(entry.id)
        self._entries[entry.id] = entry
        self._renewed_at[entry.id] = self._clock()
        if before is None or _told(before) != _told(entry):
            self._change()

    def remove(self, key: str) -> None:
        """Removes an entry, if it is there."""
        if self._entries.pop(key, None) is not None:
            del self._renewed_at[key]
            self._change()

    def expire(self) -> None:
        """Removes the entries that were not renewed in time."""
        oldest = self._clock() - LEASE_S
        for key in [key for key, renewed_at in self._renewed_at.items() if renewed_at < oldest]:
            self.remove(key)

    async def listing(self, after: int | None = None, wait_s: float = 0.0) -> dict[str, Any]:
        """Returns the list as clients get it; where its generation is `after`, once it changes or `wait_s` are over."""
        await asyncio.sleep(max(0.0, self._settled_at - self._clock()))
        give_up_at = self._clock() + wait_s
        while after == self.generation and (left_s := give_up_at - self._clock()) > 0:
            changed = self._changed
            try:
                async with asyncio.timeout(left_s):
                    await changed.wait()
            except TimeoutError:
                break
        return {"servers": [_told(entry) for entry in self.entries], "generation": self.generation}

    def _change(self) -> None:
        self.generation += 1
        self._changed.set()
        self._changed = asyncio.Event()


def _told(entry: Entry) -> dict[str, str]:
    return {"address": entry.address, "http": entry.http, "state": entry.state, "id": entry.id}
