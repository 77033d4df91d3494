"""One role of a supervisor, such as a front: its process is started, started again after its end, and replaced."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from xlaserve.processes.supervision.messages import Kind
from xlaserve.processes.supervision.process import Launch, as_words
from xlaserve.processes.supervision.restart_policy import Restarts
from xlaserve.processes.supervision.role import NO_USE, Role, State
from xlaserve.processes.supervision.role_process import RoleProcess
from xlaserve.processes.supervision.watcher import Watcher

log = logging.getLogger(__name__)


class SupervisedRole:
    """Keeps `role` filled with processes that `launch` starts, until `stopping` is set. On the event loop.

    `restarts` says when a process that has ended is started again. `fail` is called with the reason once there is no
    use in that any more: it has the processes of all roles end.
    """

    def __init__(
        self,
        role: Role,
        restarts: Restarts,
        launch: Launch,
        *,
        watchers: Sequence[Watcher],
        stopping: asyncio.Event,
        fail: Callable[[str], object],
    ) -> None:
        self.role = role
        self.state = State.STARTING
        self.outputs: set[asyncio.Future[None]] = set()
        """The `output_closed` of each process that may still write on stderr."""
        self._restarts = restarts
        self._launch = launch
        self._watchers = watchers
        self._stopping = stopping
        self._fail = fail
        self._current: RoleProcess | None = None
        """The process that fills the role; None while there is none."""
        self._successor: RoleProcess | None = None
        """The process that takes the place of the current one once it is ready."""
        self._replaced: dict[RoleProcess, asyncio.Task[None]] = {}
        """Processes whose place others have taken, until they have ended."""
        self._is_forgiven = False
        """Whether the latest end is no reason to give up."""
        self._reload_is_pending = False
        """Whether a reload was asked for that no process was told of: while none was ready, or a successor starts."""
        self._vacant: asyncio.Future[tuple[int, str]] | None = None
        """Done once no process fills the role, with the exit status of the last one and how it ended, in words."""

    @property
    def ready(self) -> RoleProcess | None:
        """The process that fills the role, if it is ready."""
        return self._current if self.state is State.READY else None

    @property
    def processes(self) -> list[RoleProcess]:
        """All processes of the role: the current one, its successor, and those that were replaced."""
        return [one for one in (self._current, self._successor, *self._replaced) if one is not None]

    async def keep_filled(self) -> None:
        """Fills the role until the supervisor stops."""
        try:
            while not self._stopping.is_set():
                reason, is_of_use = await self._fill()
                if self._stopping.is_set():
                    break
                wait_s = self._restarts.wait_s(asyncio.get_running_loop().time())
                if wait_s is None and self._is_forgiven:
                    wait_s = self._restarts.policy.longest_wait_s
                self._is_forgiven = False
                if not is_of_use:
                    self._fail(f"{self.role.name}: {reason}; another one would end in the same way")
                elif wait_s is None:
                    policy = self._restarts.policy
                    often = f"more than {policy.most} times within {policy.window_s:g} s"
                    self._fail(f"{self.role.name}: ended {often}, now {reason}")
                else:
                    log.warning("%s: %s; another is started in %.2g s", self.role.name, reason, wait_s)
                    self.state = State.WAITING
                    with suppress(TimeoutError):
                        async with asyncio.timeout(wait_s):
                            await self._stopping.wait()
        except Exception as error:
            self._give_up(error)
        finally:
            self.state = State.ENDED

    async def succeed(self, role: Role, unfit: Callable[[Mapping[str, Any]], str]) -> str:
        """Starts a process of `role` to take the current one's place; see `Supervisor.succeed`."""
        if self._successor is not None or self._current is None or self._stopping.is_set():
            return "another process is about to take its place"
        try:
            started = self._successor = self._start(role)
        except OSError as error:
            return f"a process could not be started: {error}"
        process = started.process
        stopping = asyncio.create_task(self._stopping.wait())
        awaited: list[asyncio.Future[Any]] = [started.ready, process.ended, stopping]
        await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if self._stopping.is_set():
            return "the server is stopping"
        if process.ended.done():
            return f"process {process.pid} ended with {as_words(process.ended.result())} before it was ready"
        if reason := unfit(started.about):
            if self._successor is started:
                self._successor = None
                self._replaced[started] = asyncio.create_task(started.end())
                self._send_reload()
            else:  # no other process fills the role
                process.send_signal(signal.SIGTERM)
            return reason
        if self._successor is started:
            self._replace()
        return ""

    def forgive(self) -> None:
        """Makes the latest end of the role's process no reason to give up."""
        self._is_forgiven = True

    def reload(self) -> None:
        """Has the process that fills the role read the configuration again, by SIGHUP, as soon as it is ready and
        none is about to take its place."""
        self._reload_is_pending = True
        self._send_reload()

    def _send_reload(self) -> None:
        current = self._current
        if self._reload_is_pending and current is not None and current.is_ready and self._successor is None:
            self._reload_is_pending = False
            current.process.send_signal(signal.SIGHUP)

    def _replace(self) -> None:
        """Has the successor fill the role."""
        before, current = self._current, self._successor
        assert current is not None
        self._current, self._successor = current, None
        if before is not None and not before.process.ended.done():
            self._replaced[before] = asyncio.create_task(before.end_replaced())
        self.state = State.READY if current.is_ready else State.STARTING
        try:
            for watcher in self._watchers:
                watcher.filled(self.role, current.process)
            self._tell_kept()
            if current.is_ready:
                self._became_ready(current)
        except Exception as error:
            self._give_up(error)

    def _became_ready(self, current: RoleProcess) -> None:
        self._restarts.became_ready(asyncio.get_running_loop().time())
        for watcher in self._watchers:
            watcher.became_ready(self.role, current.process)
        self._send_reload()

    def _tell_kept(self) -> None:
        if (current := self._current) is not None and current.kept:
            for watcher in self._watchers:
                watcher.keeps(self.role, current.process, current.kept)

    def _give_up(self, error: Exception) -> None:
        """Has the processes of all roles end for an error of this one's supervision."""
        log.error("%s: can't be supervised any more", self.role.name, exc_info=error)
        self._fail(f"{self.role.name}: can't be supervised")

    async def _fill(self) -> tuple[str, bool]:
        """Starts a process and waits until no process fills the role.

        Returns how the last one ended, in words, and whether there is any use in starting another.
        """
        self.state = State.STARTING
        self._vacant = asyncio.get_running_loop().create_future()
        try:
            self._current = current = self._start(self.role)
        except OSError as error:
            return f"could not be started: {error}", True
        for watcher in self._watchers:
            watcher.filled(self.role, current.process)
        status, reason = await self._vacant
        return reason, status != NO_USE

    def _start(self, role: Role) -> RoleProcess:
        """Starts a process. Raises OSError."""
        started = RoleProcess(role, self._launch, self._on_message)
        process = started.process
        log.info("%s: process %d", role.name, process.pid)
        for watcher in self._watchers:
            watcher.began(role, process)
        self.outputs.add(process.output_closed)
        process.output_closed.add_done_callback(self.outputs.discard)
        process.ended.add_done_callback(lambda _: self._on_end(started))
        return started

    def _on_end(self, ended: RoleProcess) -> None:
        status, was_ready = ended.process.ended.result(), ended.is_ready
        before = "" if was_ready else " before it was ready"
        reason = f"process {ended.process.pid} ended with {as_words(status)}{before}"
        vacant = self._vacant
        assert vacant is not None
        try:
            for watcher in self._watchers:
                watcher.ended(self.role, ended.process, status, was_ready)
        except Exception as error:
            if not vacant.done():
                vacant.set_exception(error)
            return
        if self._replaced.pop(ended, None) is not None:
            return
        if self._successor is ended:
            self._successor = None
            self._send_reload()
            return
        if self._successor is None or self._stopping.is_set():  # a supervisor that stops fills no role again
            self._current = None
            if not vacant.done():
                vacant.set_result((status, reason))
            return
        log.warning("%s: %s; the process that is starting takes its place", self.role.name, reason)
        self._restarts.wait_s(asyncio.get_running_loop().time())
        self._replace()

    def _on_message(self, sender: RoleProcess, kind: Kind, content: bytes) -> None:
        """Handles a message. Raises ValueError for content that can't be understood."""
        try:
            self._handle(sender, kind, content)
        except ValueError:
            raise
        except Exception as error:
            self._give_up(error)

    def _handle(self, sender: RoleProcess, kind: Kind, content: bytes) -> None:
        process, is_current = sender.process, sender is self._current
        match kind:
            case Kind.READY if sender is not self._successor and not is_current:
                pass  # another has taken its place
            case Kind.READY:
                sender.about = json.loads(content)
                if not sender.is_ready:
                    sender.ready.set_result(None)
                    log.info("%s: process %d is ready", self.role.name, process.pid)
                if is_current:
                    self.state = State.READY
                    self._became_ready(sender)
            case Kind.METRICS:
                for watcher in self._watchers:
                    watcher.sent_metrics(self.role, process, content)
            case Kind.KEEP:
                sender.kept = content
                self._tell_kept()
            case Kind.SUCCEED:
                for watcher in self._watchers:
                    watcher.asked_for_successor(self.role, process, content)
            case Kind.ENDS:
                for watcher in self._watchers:
                    watcher.announced_end(self.role, process)
            case Kind.RELOAD:
                self.reload()
