"""The metrics of all processes, merged and kept fresh in the supervisor, which shows them."""

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
"""How often processes are asked while nobody looks. The counts of a killed process since then are lost."""
PATIENCE_S: Final = 0.4
"""How long `refresh` waits for processes that do not answer. Their last metrics are shown."""


class Restarted(Watcher):
    """Counts, in `registry`, processes that ended unasked."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._is_stopping = False
        self._restarts = LoopCounter(
            "xlaserve_process_restarts",
            "Processes of a server with `fronts` that ended unasked; others took their places.",
            ("role",),
            registry=registry,
        )

    def stopping(self) -> None:
        """Counts no ends any more: they are no restarts."""
        self._is_stopping = True

    def began(self, role: Role, process: Process) -> None:
        """Shows the role's count from now on."""
        self._restarts.labels(role.name)

    def ended(self, role: Role, process: Process, status: int, was_ready: bool) -> None:
        """Counts an end with another status than 0."""
        if status and not self._is_stopping:
            self._restarts.labels(role.name).inc()


class AllMetrics(Watcher):
    """Asks processes for their metrics and merges them with `own`, the metrics of this process."""

    def __init__(self, own: Collector) -> None:
        self.merged = Merged()
        """The merged metrics, a collector."""
        self._own = own
        self._processes: dict[int, Process] = {}
        """Running processes, by their numbers."""
        self._filling: dict[str, int] = {}
        """The number of the process that fills each role, by the role's name."""
        self._answering: set[int] = set()
        """Numbers of processes that are ready or have answered before: others may not be able to answer yet."""
        self._awaited: dict[int, asyncio.Future[None]] = {}
        """Questions by the number of the process, done once that has answered."""

    def began(self, role: Role, process: Process) -> None:
        """Asks the process from now on; its gauges are not shown until it fills its role."""
        self._processes[process.pid] = process
        self.merged.set_standby(process.pid, is_standby=True)

    def filled(self, role: Role, process: Process) -> None:
        """Shows the gauges of this process, and of no other of its role."""
        if (before := self._filling.get(role.name)) in self._processes and before is not None:
            self.merged.set_standby(before, is_standby=True)
        self._filling[role.name] = process.pid
        self.merged.set_standby(process.pid, is_standby=False)

    def became_ready(self, role: Role, process: Process) -> None:
        """Waits for answers of the process from now on."""
        self._processes[process.pid] = process
        self._answering.add(process.pid)

    def sent_metrics(self, role: Role, process: Process, metrics: bytes) -> None:
        """Merges the metrics. Raises ValueError where they can't be read."""
        try:
            self.merged.update(process.pid, role.name, registry_snapshot.decode(metrics))
        finally:  # else the process would not be asked again
            self._answering.add(process.pid)
            self._settle(process.pid)

    def ended(self, role: Role, process: Process, status: int, was_ready: bool) -> None:
        """Keeps the counts of the process."""
        self._processes.pop(process.pid, None)
        self._answering.discard(process.pid)
        self.merged.ended(process.pid)
        self._settle(process.pid)

    async def refresh(self) -> None:
        """Returns once all processes that can answer have sent their metrics, or `PATIENCE_S` have passed."""
        self.merged.update(os.getpid(), SUPERVISOR, registry_snapshot.take(self._own))
        for pid, process in self._processes.items():
            if pid not in self._awaited:  # one question at a time, so that they do not pile up
                self._awaited[pid] = asyncio.get_running_loop().create_future()
                process.ask_for_metrics()
        if awaited := [answer for pid, answer in self._awaited.items() if pid in self._answering]:
            await asyncio.wait(awaited, timeout=PATIENCE_S)

    async def follow(self) -> None:
        """Refreshes once in `EVERY_S`, for ever."""
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
