"""Upgrades of a server of several processes: another server is started, and takes this one's place once it serves."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable
from typing import Final

from xlaserve.admission.shared_counts import SharedCounts, Upgrade
from xlaserve.processes.handover import Successor, changes_are_made
from xlaserve.processes.supervision import linux

UPGRADING: Final = "upgrading"
"""Name of a server's process from the request for an upgrade until that is done or has failed."""
SHOWN_S: Final = 0.5
"""How long a process has that name at least, even where the other server ends at once: `xlaserve upgrade` looks for
it several times meanwhile."""
LEAVING: Final = "xlaserve leaving"
"""Title in `ps` of a server whose place another one has taken."""

log = logging.getLogger(__name__)


class Upgrades:
    """Upgrades of this server, of which at most one is under way, and which end with the first that succeeds.

    The stage of an upgrade stands in `usage`, where fronts read it. `start` starts the other server, and may raise
    OSError; `leave` is called once that server serves, `on_failed` after a failed upgrade. On the event loop.
    """

    def __init__(
        self,
        usage: SharedCounts,
        start: Callable[[], Successor],
        leave: Callable[[Successor], None],
        on_failed: Callable[[], None],
    ) -> None:
        self._usage = usage
        self._start = start
        self._leave = leave
        self._on_failed = on_failed
        self._is_stopping = False
        self._successor: Successor | None = None
        """The server that takes this one's place, from its start on; None again if that fails."""

    @property
    def is_idle(self) -> bool:
        """Whether no upgrade is under way or done."""
        return self._usage.upgrade is Upgrade.NONE

    @property
    def _has_handed_over(self) -> bool:
        """Whether another server has taken this one's place."""
        return self._usage.upgrade is Upgrade.DONE

    @property
    def title(self) -> str:
        """The other server, for messages."""
        return "another server" if self._successor is None else f"process {self._successor.pid}"

    def begin(self) -> None:
        """Has fronts hold back clients' changes of models from now on; to be followed by `run`."""
        self._usage.upgrade = Upgrade.STARTING

    async def run(self) -> None:
        """Starts another server, and has this one leave once that serves. Logs any error."""
        successor: Successor | None = None
        shown = asyncio.create_task(asyncio.sleep(SHOWN_S))
        try:
            with linux.named(UPGRADING):
                try:
                    successor = await self._ready_successor()
                finally:
                    if successor is None and not self._is_stopping:
                        await shown
        except Exception:
            log.exception("upgrade: an error of this server, which goes on")
            if self._successor is not None:
                await self._successor.end()
        finally:
            shown.cancel()
            if successor is not None:
                self._usage.upgrade = Upgrade.DONE
                log.info("upgrade: process %d serves, this one leaves", successor.pid)
                self._leave(successor)
            elif not self._is_stopping:
                self._successor, self._usage.upgrade = None, Upgrade.NONE
                self._on_failed()

    async def _ready_successor(self) -> Successor | None:
        """Starts another server, and returns it once it serves; None if it fails or this server is to end."""
        if not await changes_are_made(self._usage):
            log.error("upgrade: a client is changing models, this server goes on; ask again once that is done")
            return None
        if self._is_stopping:
            return None
        try:
            self._successor = successor = self._start()
        except OSError as error:
            log.error("upgrade: another server can't be started, this one goes on: %s", error)
            return None
        log.info("upgrade: process %d starts", successor.pid)
        is_ready = await successor.is_ready()
        if self._is_stopping:  # `stop` has ended the other server, too
            return None
        if not is_ready:
            log.error("upgrade: process %d %s, this one goes on", successor.pid, await successor.end())
            return None
        return successor

    def reload(self) -> None:
        """Has the other server, if there is one, read the configuration again, too."""
        if self._successor is not None:
            self._successor.request_reload()

    def stop(self) -> None:
        """Ends the upgrade that is under way, since this server is to end: changes of models no longer wait for it."""
        self._is_stopping = True
        if not self._has_handed_over:
            self._usage.upgrade = Upgrade.NONE
            if self._successor is not None:
                self._successor.send_signal(signal.SIGTERM)

    async def end(self) -> None:
        """Waits for the end of another server that has not taken this one's place."""
        if self._successor is not None and not self._has_handed_over:
            await self._successor.end()
