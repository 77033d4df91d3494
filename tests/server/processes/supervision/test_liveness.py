"""Which processes are taken to hang, on fakes and in virtual time."""

from __future__ import annotations

import asyncio
import logging
from signal import SIGKILL, Signals
from typing import cast

import pytest

from xlaserve.processes.supervision import pulse
from xlaserve.processes.supervision.liveness import LOOK_S, SILENT_LOOKS, Liveness
from xlaserve.processes.supervision.parent import SILENCED
from xlaserve.processes.supervision.process import Process
from xlaserve.processes.supervision.role import Role

FRONT = Role(name="front 1", target="")
LIMIT_S = SILENT_LOOKS * LOOK_S

pytestmark = pytest.mark.usefixtures("virtual_time")


class FakeProcess:
    """Beats once a second until it hangs."""

    def __init__(self, pid: int) -> None:
        self.pid, self.beats = pid, 1
        self.signals: list[Signals] = []
        self._beating = asyncio.create_task(self._beat())

    @property
    def itself(self) -> Process:
        return cast(Process, self)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(pulse.BEAT_S)
            self.beats += 1

    def hang(self) -> None:
        self._beating.cancel()

    def go_on(self) -> None:
        self._beating = asyncio.create_task(self._beat())

    def send_signal(self, number: Signals) -> None:
        self.signals.append(number)


class World:
    def __init__(self, *pids: int) -> None:
        self.processes = [FakeProcess(pid) for pid in pids]
        self.liveness = Liveness()
        self.looking = asyncio.create_task(self.liveness.follow())
        for process in self.processes:
            self.liveness.became_ready(FRONT, process.itself)

    @property
    def signals(self) -> list[list[Signals]]:
        return [process.signals for process in self.processes]


async def test_one_that_hangs_is_killed_once_and_no_other(caplog: pytest.LogCaptureFixture) -> None:
    world = World(1, 2)
    await asyncio.sleep(10)
    world.processes[0].hang()
    await asyncio.sleep(LIMIT_S - 2 * LOOK_S)
    assert world.signals == [[], []]
    await asyncio.sleep(3 * LOOK_S)
    assert world.signals == [[SILENCED], []]
    await asyncio.sleep(10 * LIMIT_S)  # the kernel may not be able to end it
    assert world.signals == [[SILENCED, SIGKILL], []]
    (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert record.getMessage() == "front 1: process 1 hangs, silent for 30 s; it is killed"


async def test_one_that_goes_on_in_time_is_left_alone_however_often() -> None:
    world = World(1)
    for _ in range(5):
        world.processes[0].hang()
        await asyncio.sleep(LIMIT_S - 2 * LOOK_S)
        world.processes[0].go_on()
        await asyncio.sleep(2 * pulse.BEAT_S)
    assert world.signals == [[]]


async def test_no_process_is_killed_after_the_machine_was_suspended() -> None:
    """Time goes on for all of them, and nothing else."""
    world = World(1, 2)
    await asyncio.sleep(10)
    for process in world.processes:
        process.hang()
    world.looking.cancel()
    await asyncio.sleep(100 * LIMIT_S)
    looking = asyncio.create_task(world.liveness.follow())
    await asyncio.sleep(5 * LOOK_S)  # the supervisor goes on first
    for process in world.processes:
        process.go_on()
    await asyncio.sleep(2 * LIMIT_S)
    assert world.signals == [[], []]
    looking.cancel()


async def test_one_that_has_not_beaten_yet_or_has_ended_is_not_looked_at() -> None:
    world = World(1, 2)
    world.processes[0].beats = 0
    for process in world.processes:
        process.hang()
    world.liveness.ended(FRONT, world.processes[1].itself, -9, was_ready=True)
    await asyncio.sleep(2 * LIMIT_S)
    assert world.signals == [[], []]
