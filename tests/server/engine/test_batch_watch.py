"""Which batches are warned of, and which are taken to never end."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from xlaserve.engine.batch_watch import COST_FACTOR, LONG_LOOKS, LOOK_S, BatchWatch
from xlaserve.engine.inputs import Images
from xlaserve.engine.program import Outputs
from xlaserve.engine.under_way import KEY_BYTES, UnderWay

IMAGES = np.zeros((1, 1, 1, 3), np.uint8)
PROGRAM = "mode eager, bucket 1x1x1"
PATIENCE_S = 20.0


class World:
    """A watch for two lanes, and batches on threads of their own until they are ended."""

    def __init__(self) -> None:
        self.under_way = UnderWay()
        self.ends = 0
        self.watch = BatchWatch(self.under_way, 2, self._end)
        self._running: list[tuple[threading.Event, threading.Thread]] = []

    def _end(self) -> None:
        self.ends += 1

    def run(self, title: str, cost_s: float = 0.0) -> None:
        begun, end = threading.Event(), threading.Event()

        def executable(images: Images) -> Outputs:
            begun.set()
            end.wait(PATIENCE_S)
            return ()

        noted = self.under_way.noted(b"k" * KEY_BYTES, title, executable, PROGRAM, cost_s)
        thread = threading.Thread(target=noted, args=(IMAGES,))
        self._running.append((end, thread))
        thread.start()
        assert begun.wait(PATIENCE_S)

    def end_first(self) -> None:
        end, thread = self._running.pop(0)
        end.set()
        thread.join()

    def look(self, looks: int) -> None:
        for _ in range(looks):
            self.watch.look()

    def close(self) -> None:
        while self._running:
            self.end_first()


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.close()


def warned(caplog: pytest.LogCaptureFixture) -> list[object]:
    """Returns the arguments of all warnings."""
    return [record.args for record in caplog.records if record.levelno == logging.WARNING]


def test_a_long_batch_is_warned_of_each_minute_and_ends_nothing(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.run("a:2")
    world.look(LONG_LOOKS - 1)
    assert not caplog.records
    world.look(2 * LONG_LOOKS + 1)
    limit_s = LONG_LOOKS * LOOK_S
    assert warned(caplog) == [("a:2", PROGRAM, factor * limit_s) for factor in (1, 2, 3)]
    assert not world.ends, "there is another lane"


def test_batches_that_never_end_on_all_lanes_end_the_process_once(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.run("a")
    world.look(LONG_LOOKS)
    world.run("b")
    world.look(LONG_LOOKS - 1)
    assert world.ends == 0
    world.look(LONG_LOOKS)
    assert world.ends == 1
    (record,) = [record for record in caplog.records if record.levelno == logging.CRITICAL]
    assert f"model a ({PROGRAM}), model b ({PROGRAM})" in record.getMessage()


def test_batches_that_take_long_by_their_measured_costs_end_nothing(world: World) -> None:
    cost_s = LONG_LOOKS * LOOK_S / 2
    world.run("a", cost_s)
    world.run("b")
    looks = int(COST_FACTOR * cost_s / LOOK_S)
    world.look(looks)
    assert world.ends == 0
    world.look(1)
    assert world.ends == 1


def test_a_batch_after_another_on_the_same_lane_begins_anew(world: World, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        world.run("a")
        world.run("b")
        world.look(LONG_LOOKS - 1)
        world.end_first()
        world.end_first()
    assert not caplog.records
    assert world.ends == 0


def test_one_batch_on_the_event_loop_ends_the_process(world: World, caplog: pytest.LogCaptureFixture) -> None:
    def executable(images: Images) -> Outputs:
        world.look(LONG_LOOKS - 1)
        assert world.ends == 0
        world.look(1)
        return ()

    world.under_way.noted(b"k" * KEY_BYTES, "a", executable, PROGRAM, 1e-5)(IMAGES)
    assert world.ends == 1
    assert warned(caplog) == [("a", PROGRAM, LONG_LOOKS * LOOK_S)]
