"""The end of processes whose event loops have stopped: their connections stay open, and nobody else would notice."""

from __future__ import annotations

import asyncio
import logging
import signal
from dataclasses import dataclass
from typing import Final

from xlaserve.processes.supervision.parent import KILL_LOOKS, SILENCED
from xlaserve.processes.supervision.process import Process
from xlaserve.processes.supervision.role import Role
from xlaserve.processes.supervision.watcher import Watcher

LOOK_S: Final = 1.0
SILENT_LOOKS: Final = 30
"""Consecutive looks without a beat after which a process is killed. Looks are counted, not seconds: there are none
while this process is stopped as well, as on a machine that is suspended.

An engine's event loop stood still for 0.6 s at most while it compiled ResNet50 and ConvNeXtBase in its own process, and
for 1.2 s where garbage was collected after that, on two cores that other work kept busy."""

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Watched:
    """A process that was ready."""

    role: Role
    process: Process
    beats: int
    """The beats at the last look."""
    silent_looks: int = 0


class Liveness(Watcher):
    """Kills processes that were ready and whose event loops beat no more; others take their places, as after any end.

    A process that has never beaten is left alone.
    """

    def __init__(self) -> None:
        self._watched: dict[int, _Watched] = {}
        """Processes by their numbers."""

    def became_ready(self, role: Role, process: Process) -> None:
        """Watches the process from now on."""
        self._watched.setdefault(process.pid, _Watched(role, process, process.beats))

    def ended(self, role: Role, process: Process, status: int, was_ready: bool) -> None:
        """Watches the process no more."""
        self._watched.pop(process.pid, None)

    async def follow(self) -> None:
        """Looks at all processes once in `LOOK_S`, for ever."""
        while True:
            await asyncio.sleep(LOOK_S)
            self.look()

    def look(self) -> None:
        """Looks at all processes, and kills those that were silent for too long."""
        for one in self._watched.values():
            before, one.beats = one.beats, one.process.beats
            one.silent_looks = one.silent_looks + 1 if one.beats and one.beats == before else 0
            if one.silent_looks == SILENT_LOOKS:
                silent_s, pid = SILENT_LOOKS * LOOK_S, one.process.pid
                log.error("%s: process %d hangs, silent for %g s; it is killed", one.role.name, pid, silent_s)
                one.process.send_signal(SILENCED)  # an engine says then which thread it was in
            elif one.silent_looks == SILENT_LOOKS + KILL_LOOKS:
                one.process.send_signal(signal.SIGKILL)
