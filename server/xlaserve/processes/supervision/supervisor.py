"""Keeps roles filled: a process that ends is replaced, until that has become pointless."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from xlaserve.processes.supervision.messages import Kind
from xlaserve.processes.supervision.restarts import Restarts
from xlaserve.processes.supervision.role import NO_USE, Role, State

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

    @property
    def beats(self) -> int:
        """How often its event loop has shown that it goes on; 0 once it has ended."""

    def send_signal(self, number: signal.Signals) -> None:
        """Sends it `number`, unless it has ended."""

    def ask(self) -> None:
        """Asks for its metrics; not again before it has shown them."""

    def tell(self, outcome: object) -> None:
        """Tells it what became of its wish for a successor: plain data of JSON."""


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

    def filled(self, role: Role, process: Process) -> None:
        """The process is from now on the one that fills the role: as it was started, or in the place of another."""

    def became_ready(self, role: Role, process: Process) -> None:
        """The process does what it is there for, or says something else of itself than before."""

    def asked_for_successor(self, role: Role, process: Process, content: bytes) -> None:
        """The process wants another one in its place, which shall begin with `content`. It waits to be told what became
        of that, though others may have taken its place meanwhile."""

    def keeps(self, role: Role, process: Process, content: bytes) -> None:
        """The process that fills the role says what the next one is to begin with if it ends unasked."""

    def announced_end(self, role: Role, process: Process) -> None:
        """The process is about to end, as it says. One that ends without a word was ended by something in it."""

    def reloading(self) -> None:
        """Processes are about to be told to read the configuration again."""

    def showed(self, role: Role, process: Process, metrics: bytes) -> None:
        """The process shows its metrics. Raises ValueError where they can't be understood."""

    def ended(self, role: Role, process: Process, status: int, was_ready: bool) -> None:
        """The process has ended."""


@dataclass(slots=True, eq=False)
class _Run:
    """A process of a role. `process` is set as soon as it is started."""

    role: Role
    ready: asyncio.Future[None]
    """Done once it has said that it is ready."""
    about: Mapping[str, Any] = field(default_factory=dict)
    kept: bytes = b""
    """What it has said last that the next one is to begin with."""
    _process: Process | None = None

    def start(self, process: Process) -> None:
        self._process = process

    @property
    def process(self) -> Process:
        """Not before it is started."""
        assert self._process is not None
        return self._process

    @property
    def is_ready(self) -> bool:
        return self.ready.done()


@dataclass(slots=True)
class _Post:
    """A role, and what fills it."""

    role: Role
    restarts: Restarts
    state: State = State.STARTING
    run: _Run | None = None
    """What fills it; None while nothing does."""
    successor: _Run | None = None
    """What is to take its place once it is ready."""
    is_forgiven: bool = False
    """Whether the last end is no reason to give up."""
    has_news: bool = False
    """Whether SIGHUP came that nothing has been told of: while nothing was ready, or another is about to take over."""
    left: dict[_Run, asyncio.Task[None]] = field(default_factory=dict)
    """Those whose place others have taken, until they have ended."""
    vacant: asyncio.Future[tuple[int, str]] | None = None
    """Done, with the status of the last one and how it ended, once nothing fills the role."""

    @property
    def runs(self) -> list[_Run]:
        """All that there are."""
        return [run for run in (self.run, self.successor, *self.left) if run is not None]


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
        self._draw = draw
        self._posts = [self._post(role) for role in roles]
        self._keeping: list[asyncio.Task[None]] = []
        self._launch = launch
        self._watchers = watchers
        self._stopping = asyncio.Event()
        self._ending: list[_Run] = []
        """Those that were told to end last."""
        self._outputs: set[asyncio.Future[None]] = set()
        self._has_failed = self._is_leaving = False

    @property
    def states(self) -> dict[str, State]:
        """The state of each role, by name."""
        return {post.role.name: post.state for post in self._posts}

    @property
    def about(self) -> dict[str, Mapping[str, Any]]:
        """What the process of each role that is ready said last of itself, by name."""
        ready = [post for post in self._posts if post.state is State.READY and post.run is not None]
        return {post.role.name: post.run.about for post in ready if post.run is not None}

    @property
    def ready(self) -> list[Process]:
        """The processes that are ready."""
        return [post.run.process for post in self._posts if post.state is State.READY and post.run is not None]

    async def run(self) -> int:
        """Runs until SIGTERM, SIGINT or `stop`, and returns the exit status: 0, or 1 where it gave up.

        SIGHUP is passed on. At the end all processes are told to end, stage by stage.
        """
        loop = asyncio.get_running_loop()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # where it is inherited as ignored, no status could be waited for
        actions = {signal.SIGTERM: self.stop, signal.SIGINT: self.stop, signal.SIGHUP: self._pass_news}
        for number, action in actions.items():
            loop.add_signal_handler(number, action)
        self._keeping += [asyncio.create_task(self._keep(post)) for post in self._posts]
        try:
            await self._stopping.wait()
        finally:
            self._stopping.set()
            for watcher in self._watchers:
                watcher.stopping()
            await self._end()
            for task in self._keeping:
                task.cancel()
            await asyncio.wait([*self._keeping, *self._outputs], timeout=LAST_LINES_S)
            for number in actions:
                loop.remove_signal_handler(number)
        return FAILED if self._has_failed else 0

    def add(self, roles: Iterable[Role]) -> None:
        """Fills `roles` as well, while it runs; none any more once it stops."""
        if not self._stopping.is_set():
            posts = [self._post(role) for role in roles]
            self._posts += posts
            self._keeping += [asyncio.create_task(self._keep(post)) for post in posts]

    def _post(self, role: Role) -> _Post:
        return _Post(role, Restarts(role.restarts, self._draw))

    def stop(self) -> None:
        """Has all processes end; a second time, tells it again to those that are ending."""
        if self._stopping.is_set():
            for run in self._ending:
                run.process.send_signal(signal.SIGTERM)
        self._stopping.set()

    def leave(self) -> None:
        """Has all processes end, those that can after they have left: another server does what they did."""
        self._is_leaving = True
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
            self._tell_news(post)

    def _tell_news(self, post: _Post) -> None:
        """Has what fills the role, or is about to, read the configuration again once it is ready."""
        post.has_news = True
        self._send_news(post)

    def _send_news(self, post: _Post) -> None:
        run = post.run
        if post.has_news and run is not None and run.is_ready and post.successor is None:
            post.has_news = False
            run.process.send_signal(signal.SIGHUP)

    async def succeed(self, role: Role, unfit: Callable[[Mapping[str, Any]], str]) -> str:
        """Starts another process of a role beside the one that fills it; it takes its place once it is ready.

        Returns why it did not, empty where it did: `unfit` says so of what it said of itself, or it ended before. The
        one whose place it takes ends by itself, within the time that the role gives it. If that one ends before, the
        other fills the role from then on.
        """
        (post,) = (post for post in self._posts if post.role.name == role.name)
        if post.successor is not None or post.run is None or self._stopping.is_set():
            return "another process is about to take its place"
        try:
            run = post.successor = self._start(post, role)
        except OSError as error:
            return f"a process could not be started: {error}"
        stopping = asyncio.create_task(self._stopping.wait())
        awaited: list[asyncio.Future[Any]] = [run.ready, run.process.ended, stopping]
        await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if self._stopping.is_set():
            return "the server is stopping"
        if run.process.ended.done():
            return f"process {run.process.pid} ended with {as_words(run.process.ended.result())} before it was ready"
        if reason := unfit(run.about):
            if post.successor is run:
                post.successor = None
                post.left[run] = asyncio.create_task(_end(run))
                self._send_news(post)
            else:  # it is the only one
                run.process.send_signal(signal.SIGTERM)
            return reason
        if post.successor is run:
            self._replace(post)
        return ""

    def forgive(self, name: str) -> None:
        """The last end of a role's process is no reason to give up: what caused it will not be done for ever."""
        for post in self._posts:
            if post.role.name == name:
                post.is_forgiven = True

    def _replace(self, post: _Post) -> None:
        """Has the successor fill the role."""
        before, run = post.run, post.successor
        assert run is not None
        post.run, post.successor = run, None
        if before is not None and not before.process.ended.done():
            post.left[before] = asyncio.create_task(_see_off(before))
        post.state = State.READY if run.is_ready else State.STARTING
        try:
            for watcher in self._watchers:
                watcher.filled(post.role, run.process)
            self._keep_for_next(post)
            if run.is_ready:
                self._became_ready(post, run)
        except Exception as error:
            self._give_up(post, error)

    def _became_ready(self, post: _Post, run: _Run) -> None:
        post.restarts.became_ready(asyncio.get_running_loop().time())
        for watcher in self._watchers:
            watcher.became_ready(post.role, run.process)
        self._send_news(post)

    def _keep_for_next(self, post: _Post) -> None:
        if (run := post.run) is not None and run.kept:
            for watcher in self._watchers:
                watcher.keeps(post.role, run.process, run.kept)

    async def _keep(self, post: _Post) -> None:
        """Fills the role until the end."""
        try:
            while not self._stopping.is_set():
                reason, is_of_use = await self._fill(post)
                if self._stopping.is_set():
                    break
                wait_s = post.restarts.wait_s(asyncio.get_running_loop().time())
                if wait_s is None and post.is_forgiven:
                    wait_s = post.restarts.policy.longest_wait_s
                post.is_forgiven = False
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
        except Exception as error:
            self._give_up(post, error)
        finally:
            post.state = State.ENDED

    def _give_up(self, post: _Post, error: Exception) -> None:
        """Has all processes end for an error of this one."""
        log.error("%s: can't be supervised any more", post.role.name, exc_info=error)
        self.fail(f"{post.role.name}: can't be supervised")

    async def _fill(self, post: _Post) -> tuple[str, bool]:
        """Starts a process and waits until nothing fills the role. Returns how the last one ended, in words, and
        whether another is of use."""
        post.state = State.STARTING
        post.vacant = asyncio.get_running_loop().create_future()
        try:
            post.run = run = self._start(post, post.role)
        except OSError as error:
            return f"could not be started: {error}", True
        for watcher in self._watchers:
            watcher.filled(post.role, run.process)
        status, reason = await post.vacant
        return reason, status != NO_USE

    def _start(self, post: _Post, role: Role) -> _Run:
        """Raises OSError."""
        run = _Run(role, asyncio.get_running_loop().create_future())
        run.start(self._launch(role, lambda kind, content: self._hear(post, run, kind, content)))
        process = run.process
        log.info("%s: process %d", role.name, process.pid)
        for watcher in self._watchers:
            watcher.began(role, process)
        self._outputs.add(process.output_closed)
        process.output_closed.add_done_callback(self._outputs.discard)
        process.ended.add_done_callback(lambda _: self._ended(post, run))
        return run

    def _ended(self, post: _Post, run: _Run) -> None:
        status, was_ready = run.process.ended.result(), run.is_ready
        before = "" if was_ready else " before it was ready"
        reason = f"process {run.process.pid} ended with {as_words(status)}{before}"
        vacant = post.vacant
        assert vacant is not None
        try:
            for watcher in self._watchers:
                watcher.ended(post.role, run.process, status, was_ready)
        except Exception as error:
            if not vacant.done():
                vacant.set_exception(error)
            return
        if post.left.pop(run, None) is not None:
            return
        if post.successor is run:
            post.successor = None
            self._send_news(post)
            return
        if post.successor is None or self._stopping.is_set():  # at the end no role is filled again
            post.run = None
            if not vacant.done():
                vacant.set_result((status, reason))
            return
        log.warning("%s: %s; the process that is starting takes its place", post.role.name, reason)
        post.restarts.wait_s(asyncio.get_running_loop().time())
        self._replace(post)

    def _hear(self, post: _Post, run: _Run, kind: Kind, content: bytes) -> None:
        """Raises ValueError."""
        try:
            self._take(post, run, kind, content)
        except ValueError:
            raise
        except Exception as error:
            self._give_up(post, error)

    def _take(self, post: _Post, run: _Run, kind: Kind, content: bytes) -> None:
        process, is_filling = run.process, run is post.run
        match kind:
            case Kind.READY if run is not post.successor and not is_filling:
                pass  # another has taken its place
            case Kind.READY:
                run.about = json.loads(content)
                if not run.is_ready:
                    run.ready.set_result(None)
                    log.info("%s: process %d is ready", post.role.name, process.pid)
                if is_filling:
                    post.state = State.READY
                    self._became_ready(post, run)
            case Kind.METRICS:
                for watcher in self._watchers:
                    watcher.showed(post.role, process, content)
            case Kind.KEEP:
                run.kept = content
                self._keep_for_next(post)
            case Kind.SUCCEED:
                for watcher in self._watchers:
                    watcher.asked_for_successor(post.role, process, content)
            case Kind.ENDS:
                for watcher in self._watchers:
                    watcher.announced_end(post.role, process)
            case Kind.NEWS:
                self._tell_news(post)

    async def _end(self) -> None:
        for stage in sorted({post.role.stage for post in self._posts}, reverse=True):
            self._ending = [run for post in self._posts if post.role.stage == stage for run in post.runs]
            await asyncio.gather(*(_end(run, is_leaving=self._is_leaving) for run in self._ending))


async def _see_off(run: _Run) -> None:
    """Waits for the end of a process whose place another has taken, and ends it where that takes too long."""
    await asyncio.wait([run.process.ended], timeout=run.role.stop_timeout_s)
    await _end(run)


async def _end(run: _Run, *, is_leaving: bool = False) -> None:
    """Has a process end, and kills it where that takes too long."""
    process, timeout_s, number = run.process, run.role.stop_timeout_s, signal.SIGTERM
    if process.ended.done():
        return
    if is_leaving and run.is_ready and run.role.leaving_s is not None:
        timeout_s, number = timeout_s + run.role.leaving_s, signal.SIGUSR2
    process.send_signal(number)
    await asyncio.wait([process.ended], timeout=timeout_s)
    if process.ended.done():
        return
    log.warning("%s: process %d did not end in %g s and is killed", run.role.name, process.pid, timeout_s)
    process.send_signal(signal.SIGKILL)
    await asyncio.wait([process.ended], timeout=KILL_S)


def as_words(status: int) -> str:
    """Returns the status of a process that has ended, negative for the signal that ended it, in words."""
    if status >= 0:
        return f"status {status}"
    return f"signal {-status} ({signal.strsignal(-status) or 'unknown'})"
