"""What another process reads of the models that one has under way."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from xlaserve.config import ModelSettings
from xlaserve.engine.program import Images, Outputs
from xlaserve.engine.under_way import SLOTS, UnderWay, create, key_of, suspects

A, B, C = (ModelSettings(name=name, source="fake") for name in "abc")
IMAGES = np.zeros((1, 1, 1, 3), np.uint8)


@pytest.fixture
def file() -> Iterator[int]:
    file = create()
    yield file
    os.close(file)


class World:
    """Models that run at the same time, each on a thread of its own, until the world ends."""

    def __init__(self, file: int) -> None:
        self.under_way = UnderWay(file)
        self.threads: dict[str, int] = {}
        self._end = threading.Event()
        self._running: list[threading.Thread] = []

    def run(self, settings: ModelSettings) -> None:
        begun = threading.Event()

        def executable(images: Images) -> Outputs:
            self.threads[settings.name] = threading.get_ident()
            begun.set()
            self._end.wait()
            return ()

        thread = threading.Thread(target=self.under_way.noted(settings, executable), args=(IMAGES,))
        self._running.append(thread)
        thread.start()
        assert begun.wait(20)

    def end(self) -> None:
        self._end.set()
        for thread in self._running:
            thread.join()


@pytest.fixture
def world(file: int) -> Iterator[World]:
    world = World(file)
    yield world
    world.end()


def test_nothing_is_suspected_where_nothing_is_under_way(file: int, world: World) -> None:
    world.run(A)
    world.end()
    assert suspects(file, "") == set()


def test_what_runs_beside_the_thread_that_crashed_is_innocent(file: int, world: World) -> None:
    world.run(A)
    world.run(B)
    words = f"Fatal Python error: Aborted\n\nCurrent thread 0x{world.threads['b']:016x} (most recent call first):"
    assert suspects(file, words) == {key_of(B)}


def test_all_that_run_are_suspected_where_the_thread_is_none_of_theirs(file: int, world: World) -> None:
    world.run(A)
    world.run(B)
    for words in ("", "Current thread 0x0000000000000001 (most recent call first):"):
        assert suspects(file, words) == {key_of(A), key_of(B)}


def test_a_load_is_suspected_before_batches(file: int, world: World) -> None:
    world.run(A)
    with world.under_way.loading(C):
        assert suspects(file, "") == {key_of(C)}
    assert suspects(file, "") == {key_of(A)}


@pytest.mark.parametrize("fails", [False, True])
def test_what_has_ended_is_not_under_way(file: int, fails: bool) -> None:
    def executable(images: Images) -> Outputs:
        if fails:
            raise ValueError
        return ()

    run: Callable[..., Any] = UnderWay(file).noted(A, executable)
    try:
        run(IMAGES)
    except ValueError:
        assert fails
    assert suspects(file, "") == set()


def test_versions_are_told_apart_by_their_settings() -> None:
    changed = A.model_copy(update={"version": "2"})
    assert len({key_of(A), key_of(B), key_of(changed)}) == 3
    assert key_of(A) == key_of(A.model_copy())


def test_more_loads_than_there_is_room_for_end_nothing(file: int) -> None:
    under_way = UnderWay(file)
    for _ in range(SLOTS + 2):
        with under_way.loading(A):
            pass
    with under_way.loading(B):
        assert suspects(file, "") == {key_of(B)}


def test_loads_that_have_ended_leave_their_places_to_others(file: int) -> None:
    under_way = UnderWay(file)
    for _ in range(2 * SLOTS):
        with under_way.loading(C):
            pass
    with under_way.loading(A):
        with under_way.loading(B):
            assert suspects(file, "") == {key_of(A), key_of(B)}
        assert suspects(file, "") == {key_of(A)}
