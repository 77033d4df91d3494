"""The list of a fleet's servers: entries that expire unless they are renewed, and a wait for changes."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

RENEW_S: Final = 2.0
"""How often a server renews its entry."""
LEASE_S: Final = 7.0
"""An entry that was not renewed for this time goes."""
TELL_TIMEOUT_S: Final = 5.0
"""How long a server waits for the name service to answer a renewal."""
SETTLE_S: Final = RENEW_S + TELL_TIMEOUT_S + 1
"""How long nothing is told after the start, so that every server has renewed its entry and no list is short.

A renewal that was on its way when the name service ended may hang for TELL_TIMEOUT_S.
"""
STILL_S: Final = 2.0
"""A pass over the leases that comes this long after the one before: the name service itself stood still."""
BUNDLE_S: Final = 0.25
"""How often, at most, clients are told of changes."""
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
    """Facts about the server for people; clients are not told."""


class Addresses:
    """The servers by id. All methods are for one event loop.

    Clients learn of changes by the generation of the list they are told, which grows with each list. It begins at the
    milliseconds of the clock on the wall, so that it still grows when a name service was started again.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, wall_clock: Callable[[], float] = time.time
    ) -> None:
        self._clock = clock
        self._settled_at = clock() + SETTLE_S
        self._entries: dict[str, Entry] = {}
        self._renewed_at: dict[str, float] = {}
        self._expired_at = clock()
        self._publishing: asyncio.TimerHandle | None = None
        self._publish_at = clock()
        """When the next list may be told, at the earliest."""
        self._changed = asyncio.Event()
        self.generation = int(wall_clock() * 1000)
        self._body = self._encoded()

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
        """Removes the entries that were not renewed in time. It has to be called more often than every STILL_S.

        Where it was not, the machine or this process stood still, and the renewals of that time are still to be
        handled: all leases begin anew.
        """
        now = self._clock()
        stood_still, self._expired_at = now - self._expired_at > STILL_S, now
        if stood_still:
            self._renewed_at = dict.fromkeys(self._renewed_at, now)
        oldest = now - LEASE_S
        for key in [key for key, renewed_at in self._renewed_at.items() if renewed_at < oldest]:
            self.remove(key)

    async def listing(self, after: int | None = None, wait_s: float = 0.0) -> bytes:
        """Returns the list as clients get it, in JSON; where it is that of `after`, the next, or after `wait_s` itself.

        All who ask get the same bytes, which are encoded once.
        """
        await asyncio.sleep(max(0.0, self._settled_at - self._clock()))
        give_up_at = self._clock() + wait_s
        while after == self.generation and (left_s := give_up_at - self._clock()) > 0:
            changed = self._changed
            try:
                async with asyncio.timeout(left_s):
                    await changed.wait()
            except TimeoutError:
                break
        return self._body

    def _change(self) -> None:
        """Has clients told: at once, or as soon as BUNDLE_S have passed since they were told last."""
        if self._publishing is not None:
            return
        left_s = self._publish_at - self._clock()
        if left_s <= 0:
            self._publish()
        else:
            self._publishing = asyncio.get_running_loop().call_later(left_s, self._publish)

    def _publish(self) -> None:
        self._publishing = None
        self._publish_at = self._clock() + BUNDLE_S
        self.generation += 1
        self._body = self._encoded()
        self._changed.set()
        self._changed = asyncio.Event()

    def _encoded(self) -> bytes:
        told = {"servers": [_told(entry) for entry in self.entries], "generation": self.generation}
        return json.dumps(told, separators=(",", ":")).encode()


def _told(entry: Entry) -> dict[str, str]:
    return {"address": entry.address, "http": entry.http, "state": entry.state, "id": entry.id}
