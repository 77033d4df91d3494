"""A process of a role, from its start to its end."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Mapping
from typing import Any, Final

from xlaserve.processes.supervision.messages import Kind
from xlaserve.processes.supervision.process import Launch
from xlaserve.processes.supervision.role import Role

log = logging.getLogger(__name__)

KILL_S: Final = 10.0
"""How long a process that was killed may take to end. Then it is left to the kernel."""


class RoleProcess:
    """A process that `launch` starts for a role, with the details that it has told.

    `on_message` is called with each of its messages. Raises OSError where the process can't be started.
    """

    def __init__(self, role: Role, launch: Launch, on_message: Callable[[RoleProcess, Kind, bytes], None]) -> None:
        self.role = role
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done once the process has said that it is ready."""
        self.about: Mapping[str, Any] = {}
        """The details that the process gave when it last said that it is ready."""
        self.kept = b""
        """The content of the last KEEP: the next process of the role is to begin with it."""
        self.process = launch(role, lambda kind, content: on_message(self, kind, content))

    @property
    def is_ready(self) -> bool:
        """Whether the process has said that it is ready."""
        return self.ready.done()

    async def end(self, *, is_draining: bool = False) -> None:
        """Has the process end, and kills it where that takes too long.

        With `is_draining`, a process that is ready and can drain is told to do that first, by SIGUSR2.
        """
        process, timeout_s, number = self.process, self.role.stop_timeout_s, signal.SIGTERM
        if process.ended.done():
            return
        if is_draining and self.is_ready and self.role.drain_s is not None:
            timeout_s, number = timeout_s + self.role.drain_s, signal.SIGUSR2
        process.send_signal(number)
        await asyncio.wait([process.ended], timeout=timeout_s)
        if process.ended.done():
            return
        log.warning("%s: process %d did not end in %g s and is killed", self.role.name, process.pid, timeout_s)
        process.send_signal(signal.SIGKILL)
        await asyncio.wait([process.ended], timeout=KILL_S)

    async def end_replaced(self) -> None:
        """Waits for the end of a process whose place another has taken, and ends it where that takes too long."""
        await asyncio.wait([self.process.ended], timeout=self.role.stop_timeout_s)
        await self.end()
