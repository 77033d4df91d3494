"""Restarts and successors of one role, on fakes, in virtual time."""

from __future__ import annotations

import asyncio
import logging
import os
from signal import SIGHUP, SIGKILL, SIGTERM

import pytest
from tests.server.processes.supervision.world import ENGINE, FRONT, POLICY, World

from xlaserve.processes.supervision.messages import Kind
from xlaserve.processes.supervision.process import Process
from xlaserve.processes.supervision.role import NO_USE, Role, State
from xlaserve.processes.supervision.watcher import Watcher

pytestmark = pytest.mark.usefixtures("virtual_time")


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


async def test_a_process_may_say_something_else_of_itself(caplog: pytest.LogCaptureFixture) -> None:
    world = World(FRONT)
    front = await world.last()
    with caplog.at_level(logging.INFO):
        for about in (b'{"serves": 1}', b'{"serves": 2}'):
            front.hear(Kind.READY, about)
    assert world.supervisor.about == {"front 1": {"serves": 2}}
    assert caplog.text.count("process 100 is ready") == 1
    await world.stop()


async def test_an_error_over_what_a_process_says_ends_all(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Watcher):
        def became_ready(self, role: Role, process: Process) -> None:
            raise KeyError("serving")

    world = World(FRONT, watchers=[Broken()])
    (await world.last()).hear(Kind.READY, b"{}")
    assert await world.running == 1
    assert "front 1: can't be supervised" in caplog.text


async def test_an_error_while_a_successor_takes_a_place_ends_all(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Watcher):
        def filled(self, role: Role, process: Process) -> None:
            if process is not world.started[0]:
                raise OSError("no such folder")

    world = World(ENGINE, watchers=[Broken()])
    _, new, _ = await world.succession()
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


async def test_a_successor_is_known_ready_when_its_predecessor_ends_meanwhile() -> None:
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
    old.hear(Kind.RELOAD, b"")
    assert (old.signals, new.signals) == ([], [SIGHUP])
    await world.stop()


async def test_kept_data_counts_only_from_the_current_process_and_wishes_always() -> None:
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
