"""The supervisor of a server's processes: keeps every role filled, and ends all processes stage by stage."""

from __future__ import annotations

import asyncio
import logging
import random
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, Final

from xlaserve.processes.supervision.process import Launch, Process
from xlaserve.processes.supervision.restart_policy import Restarts
from xlaserve.processes.supervision.role import Role, State
from xlaserve.processes.supervision.role_process import RoleProcess
from xlaserve.processes.supervision.supervised_role import SupervisedRole
from xlaserve.processes.supervision.watcher import Watcher

log = logging.getLogger(__name__)

FAILED: Final = 1
LAST_LINES_S: Final = 2.0
"""How long `run` waits at its end for what processes have written last on stderr."""


class Supervisor:
    """Fills `roles` with processes that `launch` starts, and tells `watchers` of them. On the event loop.

    `draw` returns random numbers from 0 to 1: the jitter of restarts.
    """

    def __init__(
        self,
        roles: Sequence[Role],
        launch: Launch,
        watchers: Sequence[Watcher] = (),
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._draw = draw
        self._launch = launch
        self._watchers = watchers
        self._stopping = asyncio.Event()
        self._roles = [self._supervised(role) for role in roles]
        self._keeping: list[asyncio.Task[None]] = []
        self._ending: list[RoleProcess] = []
        """Processes of the stage that was told to end last."""
        self._has_failed = self._is_draining = False

    @property
    def states(self) -> dict[str, State]:
        """The state of each role, by name."""
        return {one.role.name: one.state for one in self._roles}

    @property
    def about(self) -> dict[str, Mapping[str, Any]]:
        """The details that the process of each role that is ready gave last, by the role's name."""
        return {one.role.name: one.ready.about for one in self._roles if one.ready is not None}

    @property
    def ready(self) -> list[Process]:
        """The processes that are ready."""
        return [one.ready.process for one in self._roles if one.ready is not None]

    async def run(self) -> int:
        """Runs until SIGTERM, SIGINT, `stop`, `drain` or `fail`. Returns the exit status: 0, or 1 after `fail`.

        SIGHUP is passed on. At the end all processes are told to end, stage by stage.
        """
        loop = asyncio.get_running_loop()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # where it is inherited as ignored, no status could be waited for
        actions = {signal.SIGTERM: self.stop, signal.SIGINT: self.stop, signal.SIGHUP: self._reload}
        for number, action in actions.items():
            loop.add_signal_handler(number, action)
        self._keeping += [asyncio.create_task(one.keep_filled()) for one in self._roles]
        try:
            await self._stopping.wait()
        finally:
            self._stopping.set()
            for watcher in self._watchers:
                watcher.stopping()
            await self._end()
            for task in self._keeping:
                task.cancel()
            outputs = chain.from_iterable(one.outputs for one in self._roles)
            await asyncio.wait([*self._keeping, *outputs], timeout=LAST_LINES_S)
            for number in actions:
                loop.remove_signal_handler(number)
        return FAILED if self._has_failed else 0

    def add(self, roles: Iterable[Role]) -> None:
        """Fills further roles as well, while `run` runs; none any more once it stops."""
        if not self._stopping.is_set():
            added = [self._supervised(role) for role in roles]
            self._roles += added
            self._keeping += [asyncio.create_task(one.keep_filled()) for one in added]

    def stop(self) -> None:
        """Has all processes end. A second call sends SIGTERM again to those that are ending."""
        if self._stopping.is_set():
            for one in self._ending:
                one.process.send_signal(signal.SIGTERM)
        self._stopping.set()

    def drain(self) -> None:
        """Has all processes end, as another server has taken over: those of roles with a `drain_s` drain before."""
        self._is_draining = True
        self._stopping.set()

    def fail(self, reason: str) -> None:
        """Has all processes end, and `run` return 1."""
        log.error("giving up: %s", reason)
        self._has_failed = True
        self._stopping.set()

    async def succeed(self, role: Role, unfit: Callable[[Mapping[str, Any]], str]) -> str:
        """Starts a process of `role` beside the current one of that name, whose place it takes once it is ready.

        Returns why it did not take that place, empty where it did. `unfit` returns that reason, or none, given the
        details that the new process told when it became ready. The process that is replaced ends by itself, within the
        role's `stop_timeout_s`. If it ends before the new one is ready, the new one fills the role from then on.
        """
        (supervised,) = (one for one in self._roles if one.role.name == role.name)
        return await supervised.succeed(role, unfit)

    def forgive(self, name: str) -> None:
        """Makes the latest end of a role's process no reason to give up: its cause will not last."""
        for one in self._roles:
            if one.role.name == name:
                one.forgive()

    def _supervised(self, role: Role) -> SupervisedRole:
        restarts = Restarts(role.restarts, self._draw)
        return SupervisedRole(
            role, restarts, self._launch, watchers=self._watchers, stopping=self._stopping, fail=self.fail
        )

    def _reload(self) -> None:
        for watcher in self._watchers:
            watcher.reloading()
        for one in self._roles:
            one.reload()

    async def _end(self) -> None:
        for stage in sorted({one.role.stage for one in self._roles}, reverse=True):
            self._ending = [process for one in self._roles if one.role.stage == stage for process in one.processes]
            await asyncio.gather(*(process.end(is_draining=self._is_draining) for process in self._ending))
