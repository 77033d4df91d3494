"""A supervisor and its roles together, on fakes, in virtual time."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from dataclasses import replace
from signal import SIGHUP, SIGINT, SIGKILL, SIGTERM, SIGUSR2

import pytest
from tests.server.processes.supervision.world import ENGINE, FRONT, POLICY, World

from xlaserve.processes.supervision.messages import Kind
from xlaserve.processes.supervision.process import Process
from xlaserve.processes.supervision.role import Role, State
from xlaserve.processes.supervision.role_process import KILL_S
from xlaserve.processes.supervision.watcher import Watcher

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


async def test_an_error_of_the_supervisor_itself_ends_all(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Watcher):
        def ended(self, role: Role, process: Process, status: int, was_ready: bool) -> None:
            raise RuntimeError("a defect")

    world = World(ENGINE, FRONT, watchers=[Broken()])
    (await world.last()).end(1)
    assert await world.running == 1
    assert "front 1: can't be supervised" in caplog.text


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


async def test_on_a_takeover_processes_that_can_drain_do_so_before_they_end() -> None:
    world = World(ENGINE, replace(FRONT, drain_s=60), replace(FRONT, name="front 2", drain_s=60))
    await world.last()
    engine, front, starting = world.started
    engine.hear(Kind.READY, b"{}")
    front.hear(Kind.READY, b"{}")
    front.stop_s = 63.0  # what is left of its time to end is what it has to drain
    world.supervisor.drain()
    assert await world.running == 0
    assert (engine.signals, front.signals, starting.signals) == ([SIGTERM], [SIGUSR2], [SIGTERM])
    assert len(world.started) == 3


async def test_one_that_drains_is_told_to_end_where_its_server_is() -> None:
    world = World(replace(FRONT, drain_s=60))
    front = await world.last()
    front.hear(Kind.READY, b"{}")
    front.stop_s = 3.0
    world.supervisor.drain()
    await world.last()
    world.supervisor.stop()
    assert await world.running == 0
    assert front.signals == [SIGUSR2, SIGTERM]


async def test_a_role_added_later_is_kept_filled_and_ends_with_the_others() -> None:
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
