"""Keeps roles filled: a process that ends is replaced, until that has become pointless."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from xlaserve.processes.messages import Kind
from xlaserve.processes.restarts import Restarts
from xlaserve.processes.role import NO_USE, Role, State

log = logging.getLogger(__name__)

FAILED: Final = 1
KILL_S: Final = 10.0
"""How long a process that was killed may take to end. Then it is left to the kernel."""
LAST_LINES_S: Final = 2.0
"""How long the end waits for what processes wrote last."""


class Process(Protocol):
    """A running process, as `process.ChildProcess` is one."""

    @property
    def pid(self) -> int:
        """Its process number."""

    @property
    def ended(self) -> asyncio.Future[int]:
        """Its status, negative for the signal that ended it; after its last message was heard."""

    @property
    def output_closed(self) -> asyncio.Future[None]:
        """Done once nothing more of its stderr will come."""

    def send_signal(self, number: signal.Signals) -> None:
        """Sends it `number`, unless it has ended."""

    def ask(self) -> None:
        """Asks for its metrics."""


Hear = Callable[[Kind, bytes], None]
"""Takes a message. Raises ValueError where it can't be understood."""
Launch = Callable[[Role, Hear], Process]
"""Starts a process. Raises OSError."""


class Watcher:
    """Follows the processes, on the event loop. This one does nothing."""

    def stopping(self) -> None:
        """All processes are about to be told to end."""

    def began(self, role: Role, process: Process) -> None:
        """The process was started."""

    def became_ready(self, role: Role, process: Process) -> None:
        """The process does what it is there for, or says something else of itself than before."""

    def reloading(self) -> None:
        """Processes are about to be told to read the configuration again."""

    def showed(self, role: Role, process: Process, metrics: bytes) -> None:
        """The process shows its metrics. Raises ValueError where they can't be understood."""

    def ended(self, role: Role, process: Process, status: int, was_ready: bool) -> None:
        """The process has ended."""


@dataclass(slots=True)
class _Post:
    """A role, and what fills it."""

    role: Role
    restarts: Restarts
    state: State = State.STARTING
    process: Process | None = None
    about: Mapping[str, Any] = field(default_factory=dict)
    has_news: bool = False
    """Whether SIGHUP came while it started: it may have read the configuration before."""


class Supervisor:
    """Fills `roles` with processes that `launch` starts. `watchers` are told what happens.

    `draw` gives random numbers from 0 to 1.
    """

    def __init__(
        self,
        roles: Sequence[Role],
        launch: Launch,
        watchers: Sequence[Watcher] = (),
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._posts = [_Post(role, Restarts(role.restarts, draw)) for role in roles]
        self._launch = launch
        self._watchers = watchers
        self._stopping = asyncio.Event()
        self._ending: list[_Post] = []
        """Those that were told to end last."""
        self._outputs: set[asyncio.Future[None]] = set()
        self._has_failed = False

    @property
    def states(self) -> dict[str, State]:
        """The state of each role, by name."""
        return {post.role.name: post.state for post in self._posts}

    @property
    def about(self) -> dict[str, Mapping[str, Any]]:
        """What the process of each role that is ready said last of itself, by name."""
        return {post.role.name: post.about for post in self._posts if post.state is State.READY}

    @property
    def ready(self) -> list[Process]:
        """The processes that are ready."""
        return [post.process for post in self._posts if post.state is State.READY and post.process is not None]

    async def run(self) -> int:
        """Runs until SIGTERM, SIGINT or `stop`, and returns the exit status: 0, or 1 where it gave up.

        SIGHUP is passed on. At the end all processes are told to end, stage by stage.
        """
        loop = asyncio.get_running_loop()
        actions = {signal.SIGTERM: self.stop, signal.SIGINT: self.stop, signal.SIGHUP: self._pass_news}
        for number, action in actions.items():
            loop.add_signal_handler(number, action)
        keeping = [asyncio.create_task(self._keep(post)) for post in self._posts]
        try:
            await self._stopping.wait()
        finally:
            self._stopping.set()
            for watcher in self._watchers:
                watcher.stopping()
            await self._end()
            for task in keeping:
                task.cancel()
            await asyncio.wait([*keeping, *self._outputs], timeout=LAST_LINES_S)
            for number in actions:
                loop.remove_signal_handler(number)
        return FAILED if self._has_failed else 0

    def stop(self) -> None:
        """Has all processes end; a second time, tells it again to those that are ending."""
        if self._stopping.is_set():
            for post in self._ending:
                _signal(post, signal.SIGTERM)
        self._stopping.set()

    def fail(self, reason: str) -> None:
        """Has all processes end, with status 1."""
        log.error("giving up: %s", reason)
        self._has_failed = True
        self._stopping.set()

    def _pass_news(self) -> None:
        for watcher in self._watchers:
            watcher.reloading()
        for post in self._posts:
            if post.state is State.READY:
                _signal(post, signal.SIGHUP)
            post.has_news = post.state is State.STARTING

    async def _keep(self, post: _Post) -> None:
        """Fills the role until the end."""
        try:
            while not self._stopping.is_set():
                reason, is_of_use = await self._fill(post)
                if self._stopping.is_set():
                    break
                wait_s = post.restarts.wait_s(asyncio.get_running_loop().time())
                if not is_of_use:
                    self.fail(f"{post.role.name}: {reason}; another one would end in the same way")
                elif wait_s is None:
                    policy = post.restarts.policy
                    often = f"more than {policy.most} times within {policy.window_s:g} s"
                    self.fail(f"{post.role.name}: ended {often}, now {reason}")
                else:
                    log.warning("%s: %s; another is started in %.2g s", post.role.name, reason, wait_s)
                    post.state = State.WAITING
                    with suppress(TimeoutError):
                        async with asyncio.timeout(wait_s):
                            await self._stopping.wait()
        except Exception:
            log.exception("%s: can't be supervised any more", post.role.name)
            self.fail(f"{post.role.name}: can't be supervised")
        finally:
            post.state = State.ENDED

    async def _fill(self, post: _Post) -> tuple[str, bool]:
        """Starts a process and waits for its end. Returns how it ended, in words, and whether another is of use."""
        post.has_news = False
        post.state = State.STARTING
        try:
            post.process = process = self._launch(post.role, lambda kind, content: self._hear(post, kind, content))
        except OSError as error:
            return f"could not be started: {error}", True
        log.info("%s: process %d", post.role.name, process.pid)
        for watcher in self._watchers:
            watcher.began(post.role, process)
        self._outputs.add(process.output_closed)
        process.output_closed.add_done_callback(self._outputs.discard)
        await asyncio.wait([process.ended])
        status = process.ended.result()
        was_ready, post.process = post.state is State.READY, None
        for watcher in self._watchers:
            watcher.ended(post.role, process, status, was_ready)
        before = "" if was_ready else " before it was ready"
        return f"process {process.pid} ended with {_as_words(status)}{before}", status != NO_USE

    def _hear(self, post: _Post, kind: Kind, content: bytes) -> None:
        process = post.process
        assert process is not None
        match kind:
            case Kind.READY:
                post.about = json.loads(content)
                if post.state is not State.READY:
                    post.state = State.READY
                    log.info("%s: process %d is ready", post.role.name, process.pid)
                for watcher in self._watchers:
                    watcher.became_ready(post.role, process)
                if post.has_news:
                    post.has_news = False
                    process.send_signal(signal.SIGHUP)
            case Kind.METRICS:
                for watcher in self._watchers:
                    watcher.showed(post.role, process, content)

    async def _end(self) -> None:
        for stage in sorted({post.role.stage for post in self._posts}, reverse=True):
            self._ending = [post for post in self._posts if post.role.stage == stage]
            await asyncio.gather(*map(_end, self._ending))


async def _end(post: _Post) -> None:
    """Has a process end, and kills it where that takes too long."""
    process, timeout_s = post.process, post.role.stop_timeout_s
    if process is None:
        return
    process.send_signal(signal.SIGTERM)
    await asyncio.wait([process.ended], timeout=timeout_s)
    if process.ended.done():
        return
    log.warning("%s: process %d did not end in %g s and is killed", post.role.name, process.pid, timeout_s)
    process.send_signal(signal.SIGKILL)
    await asyncio.wait([process.ended], timeout=KILL_S)


def _signal(post: _Post, number: signal.Signals) -> None:
    if post.process is not None:
        post.process.send_signal(number)


def _as_words(status: int) -> str:
    if status >= 0:
        return f"status {status}"
    return f"signal {-status} ({signal.strsignal(-status) or 'unknown'})"
