"""A supervisor of fake processes, in virtual time."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence
from signal import SIGKILL, SIGTERM, SIGUSR2

from xlaserve.processes.supervision.messages import Kind, OnMessage
from xlaserve.processes.supervision.process import Process
from xlaserve.processes.supervision.restart_policy import RestartPolicy
from xlaserve.processes.supervision.role import Role
from xlaserve.processes.supervision.supervisor import Supervisor
from xlaserve.processes.supervision.watcher import Watcher

POLICY = RestartPolicy(window_s=60, at_once=1, first_wait_s=0.5, longest_wait_s=4, most=3, jitter=0.5)
ENGINE = Role(name="engine 0", target="", stage=0, stop_timeout_s=16, restarts=POLICY)
FRONT = Role(name="front 1", target="", stage=1, stop_timeout_s=4, restarts=POLICY)


class FakeProcess:
    def __init__(self, pid: int, role: Role, hear: OnMessage) -> None:
        loop = asyncio.get_running_loop()
        self.pid, self.role, self.hear = pid, role, hear
        self.ended: asyncio.Future[int] = loop.create_future()
        self.output_closed: asyncio.Future[None] = loop.create_future()
        self.signals: list[signal.Signals] = []
        self.stop_s: float | None = 0.0
        """How long it takes to end; None for ever."""
        self.is_immortal = False
        self.asked = self.beats = 0

    def send_signal(self, number: signal.Signals) -> None:
        if self.ended.done():
            return
        self.signals.append(number)
        if number is SIGKILL and not self.is_immortal:
            self.end(-SIGKILL)
        elif number in (SIGTERM, SIGUSR2) and self.stop_s is not None:
            asyncio.get_running_loop().call_later(self.stop_s, self.end, 0)

    def ask_for_metrics(self) -> None:
        self.asked += 1

    def tell_outcome(self, outcome: object) -> None:
        raise AssertionError("its watcher tells it")

    def end(self, status: int) -> None:
        if not self.ended.done():
            self.output_closed.set_result(None)
            self.ended.set_result(status)


class World(Watcher):
    """A supervisor of fake processes, and the events that it told."""

    def __init__(self, *roles: Role, watchers: Sequence[Watcher] = (), draw: float = 0.0) -> None:
        self.loop = asyncio.get_running_loop()
        self.started: list[FakeProcess] = []
        self.started_at: list[float] = []
        self.ends: list[tuple[str, int, bool]] = []
        self.filling: list[int] = []
        """The numbers of the processes that have filled a role, as they came."""
        self.wishes: list[bytes] = []
        self.kept: list[bytes] = []
        self.ready: list[int] = []
        """The numbers of the processes that were said to be ready."""
        self.refuses = 0
        self.supervisor = Supervisor(roles, self._launch, watchers or [self], lambda: draw)
        self.running = asyncio.create_task(self.supervisor.run())

    def _launch(self, role: Role, hear: OnMessage) -> FakeProcess:
        self.started_at.append(self.loop.time())
        if self.refuses:
            self.refuses -= 1
            raise OSError("no processes left")
        process = FakeProcess(100 + len(self.started), role, hear)
        self.started.append(process)
        return process

    def ended(self, role: Role, process: Process, status: int, was_ready: bool) -> None:
        self.ends.append((role.name, status, was_ready))

    def filled(self, role: Role, process: Process) -> None:
        self.filling.append(process.pid)

    def became_ready(self, role: Role, process: Process) -> None:
        self.ready.append(process.pid)

    def asked_for_successor(self, role: Role, process: Process, content: bytes) -> None:
        self.wishes.append(content)

    def keeps(self, role: Role, process: Process, content: bytes) -> None:
        self.kept.append(content)

    async def succession(self) -> tuple[FakeProcess, FakeProcess, asyncio.Task[str]]:
        """Returns a process that is ready, one that is to take its place, and the outcome of that."""
        old = await self.last()
        old.hear(Kind.READY, b"{}")
        succeeding = asyncio.create_task(self.supervisor.succeed(ENGINE, lambda about: str(about.get("reason", ""))))
        new = await self.last()
        assert new is not old
        return old, new, succeeding

    async def last(self) -> FakeProcess:
        """Returns the process that was started last, after all has been done that can be."""
        await asyncio.sleep(0.001)
        return self.started[-1]

    async def stop(self) -> int:
        self.supervisor.stop()
        return await self.running
