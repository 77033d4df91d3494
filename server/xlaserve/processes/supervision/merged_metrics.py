"""The metrics of all processes, kept fresh in the one that shows them."""

from __future__ import annotations

import asyncio
import logging
import os
from typing import Final

from prometheus_client.registry import Collector, CollectorRegistry

from xlaserve.processes.supervision.process import Process
from xlaserve.processes.supervision.role import Role
from xlaserve.processes.supervision.watcher import Watcher
from xlaserve.telemetry import registry_snapshot
from xlaserve.telemetry.counts import LoopCounter
from xlaserve.telemetry.merged import Merged
from xlaserve.telemetry.resources import SUPERVISOR

log = logging.getLogger(__name__)

EVERY_S: Final = 5.0
"""How often processes are asked while nobody looks: what one that is killed has counted since is lost."""
PATIENCE_S: Final = 0.4
"""How long `refresh` waits for those that do not answer. What they showed last is shown."""


class Restarted(Watcher):
    """Counts in `registry` the processes that ended without having been told to."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._is_stopping = False
        self._restarts = LoopCounter(
            "xlaserve_process_restarts",
            "Processes of a server with `fronts` that ended unasked; others took their places.",
            ("role",),
            registry=registry,
        )

    def stopping(self) -> None:
        """Ends are no restarts any more."""
        self._is_stopping = True

    def began(self, role: Role, process: Process) -> None:
        """Shows the role from now on."""
        self._restarts.labels(role.name)

    def ended(self, role: Role, process: Process, status: int, was_ready: bool) -> None:
        """Counts it, unless it has ended in order."""
        if status and not self._is_stopping:
            self._restarts.labels(role.name).inc()


class AllMetrics(Watcher):
    """Asks processes for their metrics and merges what they show, beside `own`, this process's."""

    def __init__(self, own: Collector) -> None:
        self.merged = Merged()
        """To be registered where metrics are shown."""
        self._own = own
        self._processes: dict[int, Process] = {}
        """By process number."""
        self._filling: dict[str, int] = {}
        """By role, the process that fills it."""
        self._answering: set[int] = set()
        """Those that have shown something: others may not have begun to answer."""
        self._awaited: dict[int, asyncio.Future[None]] = {}
        """Done once the process of this number has answered."""

    def began(self, role: Role, process: Process) -> None:
        """It will be asked from now on."""
        self._processes[process.pid] = process
        self.merged.stand_aside(process.pid, is_aside=True)

    def filled(self, role: Role, process: Process) -> None:
        """Shows the gauges of this one, and of no other of its role."""
        if (before := self._filling.get(role.name)) in self._processes and before is not None:
            self.merged.stand_aside(before, is_aside=True)
        self._filling[role.name] = process.pid
        self.merged.stand_aside(process.pid, is_aside=False)

    def became_ready(self, role: Role, process: Process) -> None:
        """It answers from now on."""
        self._processes[process.pid] = process
        self._answering.add(process.pid)

    def showed(self, role: Role, process: Process, metrics: bytes) -> None:
        """Merges them. Raises ValueError where they can't be read."""
        try:
            self.merged.update(process.pid, role.name, registry_snapshot.decode(metrics))
        finally:  # or it would not be asked again
            self._answering.add(process.pid)
            self._settle(process.pid)

    def ended(self, role: Role, process: Process, status: int, was_ready: bool) -> None:
        """Keeps what it had counted."""
        self._processes.pop(process.pid, None)
        self._answering.discard(process.pid)
        self.merged.ended(process.pid)
        self._settle(process.pid)

    async def refresh(self) -> None:
        """Returns once all that answer have shown what they have counted, or have not in time."""
        self.merged.update(os.getpid(), SUPERVISOR, registry_snapshot.take(self._own))
        for pid, process in self._processes.items():
            if pid not in self._awaited:  # one question at a time: more than a socket holds would be lost
                self._awaited[pid] = asyncio.get_running_loop().create_future()
                process.ask()
        if awaited := [answer for pid, answer in self._awaited.items() if pid in self._answering]:
            await asyncio.wait(awaited, timeout=PATIENCE_S)

    async def follow(self) -> None:
        """Refreshes again and again, for ever."""
        while True:
            try:
                await self.refresh()
            except Exception:  # no reason to stop serving
                log.exception("the metrics of the processes could not be read")
            await asyncio.sleep(EVERY_S)

    def _settle(self, pid: int) -> None:
        answered = self._awaited.pop(pid, None)
        if answered is not None and not answered.done():
            answered.set_result(None)
