"""The supervisor on fakes, in virtual time."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from signal import SIGHUP, SIGINT, SIGKILL, SIGTERM, SIGUSR2

import pytest

from xlaserve.processes.supervision.messages import Kind
from xlaserve.processes.supervision.restarts import RestartPolicy
from xlaserve.processes.supervision.role import NO_USE, Role, State
from xlaserve.processes.supervision.supervisor import KILL_S, Process, Supervisor, Watcher

POLICY = RestartPolicy(window_s=60, at_once=1, first_wait_s=0.5, longest_wait_s=4, most=3, jitter=0.5)
ENGINE = Role(name="engine 0", target="", stage=0, stop_timeout_s=16, restarts=POLICY)
FRONT = Role(name="front 1", target="", stage=1, stop_timeout_s=4, restarts=POLICY)


class FakeProcess:
    def __init__(self, pid: int, role: Role, hear: Callable[[Kind, bytes], None]) -> None:
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

    def ask(self) -> None:
        self.asked += 1

    def tell(self, outcome: object) -> None:
        raise AssertionError("its watcher tells it")

    def end(self, status: int) -> None:
        if not self.ended.done():
            self.output_closed.set_result(None)
            self.ended.set_result(status)


class World(Watcher):
    """A supervisor whose processes are fakes, and what it was seen to do."""

    def __init__(self, *roles: Role, draw: float = 0.0) -> None:
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
        self.supervisor = Supervisor(roles, self._launch, [self], lambda: draw)
        self.running = asyncio.create_task(self.supervisor.run())

    def _launch(self, role: Role, hear: Callable[[Kind, bytes], None]) -> FakeProcess:
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
        """Returns a process that is ready, one that is to take its place, and what comes of that."""
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


pytestmark = pytest.mark.usefixtures("virtual_time")


async def test_all_roles_are_filled_and_known_by_what_they_say() -> None:
    world = World(ENGINE, FRONT)
    front = await world.last()
    assert world.supervisor.states == {"engine 0": State.STARTING, "front 1": State.STARTING}
    front.hear(Kind.READY, b'{"grpc": "127.0.0.1:8001"}')
    assert world.supervisor.states["front 1"] is State.READY
    assert world.supervisor.about == {"front 1": {"grpc": "127.0.0.1:8001"}}
    assert world.supervisor.ready == [front]
    assert await world.stop() == 0
    assert set(world.supervisor.states.values()) == {State.ENDED}


async def test_one_that_ends_is_replaced_at_once_and_then_ever_later(caplog: pytest.LogCaptureFixture) -> None:
    world = World(FRONT)
    for _ in range(3):
        (await world.last()).end(-SIGKILL)
        await asyncio.sleep(8)
    assert [round(at, 1) for at in world.started_at] == [0.0, 0.0, 8.5, 17.0]
    assert "front 1: process 100 ended with signal 9 (Killed) before it was ready; another is started" in caplog.text
    assert world.supervisor.states == {"front 1": State.STARTING}
    await world.stop()


async def test_one_that_has_served_is_replaced_at_once_each_time() -> None:
    world = World(FRONT)
    for _ in range(3):
        front = await world.last()
        front.hear(Kind.READY, b"{}")
        await asyncio.sleep(POLICY.longest_wait_s)
        front.end(-SIGKILL)
    await world.last()
    assert [round(at, 1) for at in world.started_at] == [0.0, 4.0, 8.0, 12.0]
    await world.stop()


@pytest.mark.parametrize("status", [0, 1, -signal.SIGSEGV])
async def test_too_many_ends_are_the_end_of_all(status: int, caplog: pytest.LogCaptureFixture) -> None:
    world = World(ENGINE, FRONT)
    await world.last()
    engine = world.started[0]
    while not world.running.done():
        (await world.last()).end(status)
        await asyncio.sleep(1)
    assert await world.running == 1
    assert engine.signals == [SIGTERM]
    assert len(world.started) == 1 + 1 + POLICY.most
    (error,) = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert error.startswith("giving up: front 1: ended more than 3 times within 60 s, now process 104 ended with ")


async def test_one_that_says_that_it_is_of_no_use_is_not_started_again(caplog: pytest.LogCaptureFixture) -> None:
    world = World(FRONT)
    (await world.last()).end(NO_USE)
    assert await world.running == 1
    assert len(world.started) == 1
    assert "giving up: front 1: process 100 ended with status 78" in caplog.text


async def test_one_that_can_not_be_started_is_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    world = World(FRONT)
    world.refuses = 2
    await asyncio.sleep(1)
    assert len(world.started_at) == 3
    assert "could not be started: no processes left" in caplog.text
    (await world.last()).hear(Kind.READY, b"{}")
    assert await world.stop() == 0


async def test_those_of_a_later_stage_end_first() -> None:
    world = World(ENGINE, FRONT)
    front, engine = await world.last(), world.started[0]
    front.stop_s = 2.0
    stopping = asyncio.create_task(world.stop())
    await asyncio.sleep(1)
    assert (front.signals, engine.signals) == ([SIGTERM], [])
    assert await stopping == 0
    assert engine.signals == [SIGTERM]
    assert [name for name, _, _ in world.ends] == ["front 1", "engine 0"]


async def test_one_that_does_not_end_in_time_is_killed(caplog: pytest.LogCaptureFixture) -> None:
    world = World(FRONT)
    front = await world.last()
    front.stop_s = None
    began = world.loop.time()
    assert await world.stop() == 0
    assert world.loop.time() - began == FRONT.stop_timeout_s
    assert front.signals == [SIGTERM, SIGKILL]
    assert "front 1: process 100 did not end in 4 s and is killed" in caplog.text


async def test_one_that_not_even_the_kernel_can_end_is_left() -> None:
    world = World(FRONT)
    front = await world.last()
    front.stop_s, front.is_immortal = None, True
    began = world.loop.time()
    assert await world.stop() == 0
    assert world.loop.time() - began <= FRONT.stop_timeout_s + KILL_S + 2
    assert not front.ended.cancelled()


async def test_nothing_is_started_any_more_once_the_end_has_begun() -> None:
    world = World(ENGINE, FRONT)
    front, engine = await world.last(), world.started[0]
    front.stop_s = 2.0
    stopping = asyncio.create_task(world.stop())
    await asyncio.sleep(1)
    engine.end(-SIGKILL)
    assert await stopping == 0
    assert len(world.started) == 2


async def test_the_end_does_not_wait_for_what_would_have_been_started() -> None:
    world = World(FRONT)
    for _ in range(3):
        (await world.last()).end(1)
    began = world.loop.time()
    await asyncio.sleep(0.25)
    assert world.supervisor.states == {"front 1": State.WAITING}
    await world.stop()
    assert world.loop.time() - began < 0.5


@pytest.mark.parametrize("number", [SIGTERM, SIGINT])
async def test_a_signal_ends_all_and_a_second_is_passed_on(number: signal.Signals) -> None:
    world = World(FRONT)
    front = await world.last()
    front.stop_s = 2.0
    os.kill(os.getpid(), number)
    await asyncio.sleep(1)
    os.kill(os.getpid(), number)
    assert await world.running == 0
    assert front.signals == [SIGTERM, SIGTERM]


async def test_news_reach_those_that_are_ready_now_and_others_once_they_are() -> None:
    world = World(ENGINE, FRONT)
    front, engine = await world.last(), world.started[0]
    engine.hear(Kind.READY, b"{}")
    os.kill(os.getpid(), SIGHUP)
    await world.last()
    assert (engine.signals, front.signals) == ([SIGHUP], [])
    front.hear(Kind.READY, b"{}")
    assert front.signals == [SIGHUP]
    front.hear(Kind.READY, b"{}")
    assert front.signals == [SIGHUP], "once it has read the configuration, that is no news"
    front.end(-SIGKILL)
    another = await world.last()
    another.hear(Kind.READY, b"{}")
    assert another.signals == [], "it has read the configuration since"
    await world.stop()


async def test_a_process_may_say_something_else_of_itself(caplog: pytest.LogCaptureFixture) -> None:
    world = World(FRONT)
    front = await world.last()
    with caplog.at_level(logging.INFO):
        for about in (b'{"serves": 1}', b'{"serves": 2}'):
            front.hear(Kind.READY, about)
    assert world.supervisor.about == {"front 1": {"serves": 2}}
    assert caplog.text.count("process 100 is ready") == 1
    await world.stop()


async def test_an_error_of_the_supervisor_itself_ends_all(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Watcher):
        def ended(self, role: Role, process: Process, status: int, was_ready: bool) -> None:
            raise RuntimeError("a defect")

    world = World(ENGINE, FRONT)
    world.supervisor._watchers = [Broken()]
    (await world.last()).end(1)
    assert await world.running == 1
    assert "front 1: can't be supervised" in caplog.text


async def test_an_error_over_what_a_process_says_ends_all(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Watcher):
        def became_ready(self, role: Role, process: Process) -> None:
            raise KeyError("serving")

    world = World(FRONT)
    world.supervisor._watchers = [Broken()]
    (await world.last()).hear(Kind.READY, b"{}")
    assert await world.running == 1
    assert "front 1: can't be supervised" in caplog.text


async def test_an_error_while_a_successor_takes_a_place_ends_all(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Watcher):
        def filled(self, role: Role, process: Process) -> None:
            raise OSError("no such folder")

    world = World(ENGINE)
    _, new, _ = await world.succession()
    world.supervisor._watchers = [Broken()]
    new.hear(Kind.READY, b"{}")
    async with asyncio.timeout(1):
        assert await world.running == 1
    assert "engine 0: can't be supervised" in caplog.text
    assert "no such folder" in caplog.text


async def test_a_successor_takes_the_place_of_one_that_serves_once_it_is_ready() -> None:
    world = World(ENGINE)
    old, new, succeeding = await world.succession()
    assert (world.filling, world.supervisor.ready) == ([old.pid], [old])
    new.hear(Kind.READY, b'{"serves": 2}')
    assert await succeeding == ""
    assert (world.filling, world.supervisor.ready) == ([old.pid, new.pid], [new])
    assert world.supervisor.about == {"engine 0": {"serves": 2}}
    old.hear(Kind.READY, b'{"serves": 1}')
    assert world.supervisor.about == {"engine 0": {"serves": 2}}, "the other says so now"
    old.end(0)
    await asyncio.sleep(1)
    assert world.supervisor.ready == [new]
    assert len(world.started) == 2
    assert await world.stop() == 0


async def test_one_whose_place_was_taken_and_that_does_not_end_is_ended() -> None:
    world = World(ENGINE)
    old, new, succeeding = await world.succession()
    new.hear(Kind.READY, b"{}")
    await succeeding
    old.stop_s = None
    await asyncio.sleep(2 * ENGINE.stop_timeout_s + 1)
    assert old.signals == [SIGTERM, SIGKILL]
    assert world.supervisor.ready == [new]
    await world.stop()


@pytest.mark.parametrize("is_killed", [False, True])
async def test_a_successor_that_fails_changes_nothing(is_killed: bool) -> None:
    world = World(ENGINE)
    old, new, succeeding = await world.succession()
    if is_killed:
        new.end(-SIGKILL)
    else:
        new.hear(Kind.READY, b'{"reason": "no such file"}')
    reason = await succeeding
    assert reason == ("process 101 ended with signal 9 (Killed) before it was ready" if is_killed else "no such file")
    await asyncio.sleep(1)
    assert new.ended.done()
    assert (world.filling, world.supervisor.ready, old.signals) == ([old.pid], [old], [])
    assert len(world.started) == 2
    await world.stop()


async def test_a_successor_takes_the_place_of_one_that_ends_before_it_is_ready() -> None:
    world = World(ENGINE)
    old, new, succeeding = await world.succession()
    old.end(-SIGKILL)
    await asyncio.sleep(1)
    assert world.filling == [old.pid, new.pid]
    assert world.supervisor.states == {"engine 0": State.STARTING}
    new.hear(Kind.READY, b"{}")
    assert await succeeding == ""
    assert world.supervisor.ready == [new]
    assert len(world.started) == 2
    new.end(-SIGKILL)
    await asyncio.sleep(8)
    assert len(world.started) == 3
    await world.stop()


async def test_one_that_ends_as_its_successor_becomes_ready_is_followed_by_one_that_is_known_to_be_ready() -> None:
    world = World(ENGINE)
    old, new, succeeding = await world.succession()
    os.kill(os.getpid(), SIGHUP)
    await world.last()
    new.hear(Kind.READY, b"{}")
    old.end(-SIGKILL)  # before the supervisor has done anything about the other
    assert await succeeding == ""
    assert (world.filling, world.ready) == ([old.pid, new.pid], [old.pid, new.pid])
    assert new.signals == [SIGHUP]
    await world.stop()


async def test_where_both_end_another_is_started() -> None:
    world = World(ENGINE)
    old, new, succeeding = await world.succession()
    old.end(-SIGKILL)
    await world.last()
    new.end(-SIGKILL)
    assert await succeeding
    await asyncio.sleep(8)
    assert len(world.started) == 3
    await world.stop()


async def test_the_end_comes_for_a_successor_too(caplog: pytest.LogCaptureFixture) -> None:
    world = World(ENGINE, FRONT)
    front, engine = await world.last(), world.started[0]
    engine.hear(Kind.READY, b"{}")
    front.hear(Kind.READY, b"{}")
    succeeding = asyncio.create_task(world.supervisor.succeed(ENGINE, lambda about: ""))
    new = await world.last()
    assert await world.stop() == 0
    assert await succeeding == "the server is stopping"
    assert engine.signals == new.signals == [SIGTERM]
    assert world.filling == [engine.pid, front.pid], "nothing takes the place of what ends in order"
    assert not caplog.text
    assert await world.supervisor.succeed(ENGINE, lambda about: "") != ""
    assert len(world.started) == 3


@pytest.mark.parametrize("reason", ["", "no such file"])
async def test_news_that_come_while_a_successor_starts_reach_what_serves_then(reason: str) -> None:
    world = World(ENGINE)
    old, new, succeeding = await world.succession()
    os.kill(os.getpid(), SIGHUP)
    await world.last()
    assert old.signals == new.signals == []
    new.hear(Kind.READY, b'{"reason": "%s"}' % reason.encode())
    await succeeding
    assert (new if not reason else old).signals == [SIGHUP]
    await world.stop()


async def test_news_that_one_could_not_take_reach_the_one_in_its_place() -> None:
    world = World(ENGINE)
    old, new, succeeding = await world.succession()
    new.hear(Kind.READY, b"{}")
    await succeeding
    old.hear(Kind.NEWS, b"")
    assert (old.signals, new.signals) == ([], [SIGHUP])
    await world.stop()


async def test_what_one_keeps_reaches_the_watchers_as_long_as_it_fills_its_role_and_what_it_wants_always() -> None:
    world = World(ENGINE)
    old, new, succeeding = await world.succession()
    old.hear(Kind.KEEP, b"kept")
    old.hear(Kind.SUCCEED, b"wanted")
    new.hear(Kind.READY, b"{}")
    new.hear(Kind.KEEP, b"kept by another")
    await succeeding
    old.hear(Kind.KEEP, b"later")
    old.hear(Kind.SUCCEED, b"later")
    assert ({*world.kept}, world.kept[-1], world.wishes) == (
        {b"kept", b"kept by another"},
        b"kept by another",
        [b"wanted", b"later"],
    ), "it waits for an outcome"
    await world.stop()


async def test_where_another_server_takes_over_those_that_can_leave_before_they_end() -> None:
    world = World(ENGINE, replace(FRONT, leaving_s=60), replace(FRONT, name="front 2", leaving_s=60))
    await world.last()
    engine, front, starting = world.started
    engine.hear(Kind.READY, b"{}")
    front.hear(Kind.READY, b"{}")
    front.stop_s = 63.0  # what is left of its time to end is what it has to drain
    world.supervisor.leave()
    assert await world.running == 0
    assert (engine.signals, front.signals, starting.signals) == ([SIGTERM], [SIGUSR2], [SIGTERM])
    assert len(world.started) == 3


async def test_one_that_leaves_is_told_to_end_where_its_server_is() -> None:
    world = World(replace(FRONT, leaving_s=60))
    front = await world.last()
    front.hear(Kind.READY, b"{}")
    front.stop_s = 3.0
    world.supervisor.leave()
    await world.last()
    world.supervisor.stop()
    assert await world.running == 0
    assert front.signals == [SIGUSR2, SIGTERM]


async def test_a_role_that_is_added_later_is_kept_filled_and_ends_with_the_others() -> None:
    world = World(ENGINE)
    engine = await world.last()
    world.supervisor.add([FRONT])
    first = await world.last()
    assert (first.role, [*world.supervisor.states]) == (FRONT, [ENGINE.name, FRONT.name])
    first.end(1)
    second = await world.last()
    assert second.role == FRONT
    assert second is not first
    assert await world.stop() == 0
    assert (engine.signals, second.signals) == ([SIGTERM], [SIGTERM])
    world.supervisor.add([FRONT])
    assert await world.last() is second, "nothing is started any more"
