"""The number of fronts of a server, and the spare process for them."""

from __future__ import annotations

import asyncio
import signal
from itertools import pairwise

import pytest
from tests.server.processes.server_world import FAST, FRONT_ADDRESSES, READY, GrowingWorld, World

from xlaserve.processes.capacity import TYPICAL, US_PER_S
from xlaserve.processes.engines import ENGINE
from xlaserve.processes.fronts import FRONT, SPARE_LOOK_S, SPARES, keep_spare
from xlaserve.processes.supervision import child_handle
from xlaserve.processes.supervision.child_handle import Launcher


def test_as_many_fronts_are_added_as_bring_what_an_engine_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    world = GrowingWorld(monkeypatch)
    world.say(FRONT.format(1), FRONT_ADDRESSES)
    assert not world.added
    world.say(ENGINE, FAST)
    assert [role.name for role in world.added] == ["front 2", "front 3", "front 4"]
    assert world.server._usage.serving == 4
    assert not world.server._was_ready, "clients that wait for it find all fronts"
    for role in (*world.added,):
        world.say(role.name, FRONT_ADDRESSES)
    assert world.server._was_ready
    world.say(ENGINE, {**READY, "images_per_s": 1.0})
    assert (len(world.added), world.server._usage.serving) == (3, 4), "none is taken away"
    world.say(ENGINE, {**READY, "images_per_s": 1e9})
    assert (len(world.added), world.server._usage.serving) == (4, 5), "a model that was loaded later is faster"
    world.server._service_manager.close()


def test_fronts_know_the_whole_of_what_is_divided_among_them(monkeypatch: pytest.MonkeyPatch) -> None:
    world = GrowingWorld(monkeypatch)
    world.say(ENGINE, FAST)
    settings = world.orders_of(4)
    assert settings == world.settings.model_copy(update={"metrics_port": None})
    world.server._service_manager.close()


@pytest.mark.parametrize(("engines", "expected"), [(1, 2), (2, 4), (4, 5)])
def test_each_engine_is_brought_as_much(monkeypatch: pytest.MonkeyPatch, engines: int, expected: int) -> None:
    world = GrowingWorld(monkeypatch, engines)
    world.say(f"{ENGINE} 0", {**READY, "images_per_s": 1.9 * US_PER_S / TYPICAL.front_us})
    assert world.server._usage.serving == expected
    world.server._service_manager.close()


def test_a_slow_model_or_a_stopping_server_gets_no_further_front(monkeypatch: pytest.MonkeyPatch) -> None:
    world = GrowingWorld(monkeypatch)
    world.start({**READY, "images_per_s": 300.0})
    assert not world.added
    assert world.server.is_ready()
    world.server.stopping()
    world.say(ENGINE, FAST)
    assert not world.added
    world.server._service_manager.close()


@pytest.mark.usefixtures("virtual_time")
async def test_a_spare_is_prepared_once_a_front_is_ready_and_tried_again() -> None:
    world, loop = World(), asyncio.get_running_loop()
    tried_at: list[float] = []
    is_there = False

    def prepare() -> bool:
        tried_at.append(loop.time())
        return is_there

    keeping = asyncio.create_task(keep_spare(lambda: world.server._has_front, prepare))
    await asyncio.sleep(10)
    assert not tried_at
    world.say(FRONT.format(1), FRONT_ADDRESSES)  # and no engine
    await asyncio.sleep(1000)
    waits_s = [after - before - SPARE_LOOK_S for before, after in pairwise(tried_at)]
    assert tried_at[0] <= 10 + SPARE_LOOK_S
    assert waits_s[:3] == [0.25, 0.5, 1.0]
    assert waits_s[-1] == max(waits_s) == SPARES.longest_wait_s
    is_there = True
    await asyncio.sleep(100)
    assert tried_at[-1] - tried_at[-2] == SPARE_LOOK_S
    keeping.cancel()


@pytest.mark.usefixtures("virtual_time")
@pytest.mark.parametrize("lives_s", [0.0, 0.6])
async def test_a_spare_that_ends_by_itself_is_restarted_ever_more_seldom(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, lives_s: float
) -> None:
    loop = asyncio.get_running_loop()

    class Waiting:
        """A process that the kernel kills, as where memory is short."""

        def __init__(self, *_: object) -> None:
            started_at.append(loop.time())

        @property
        def status(self) -> int | None:
            return None if loop.time() < started_at[-1] + lives_s else -signal.SIGKILL

        def end(self) -> None:
            pass

    world, started_at = World(), list[float]()
    monkeypatch.setattr(child_handle, "Spare", Waiting)
    launcher, front = Launcher(), world.server._fronts.roles[0]
    world.say(FRONT.format(1), FRONT_ADDRESSES)
    keeping = asyncio.create_task(keep_spare(lambda: world.server._has_front, lambda: launcher.prepare(front)))
    await asyncio.sleep(3600)
    assert len(started_at) < 80
    assert started_at[-1] - started_at[-2] >= SPARES.longest_wait_s
    assert "front 1: the spare process ended with status -9" in caplog.text
    keeping.cancel()
