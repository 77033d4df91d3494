"""Records of the models that a process has under way, as another process reads them."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from xlaserve.config import ModelSettings
from xlaserve.engine.inputs import Images
from xlaserve.engine.program import Outputs
from xlaserve.engine.under_way import SLOTS, STEPS_BYTES, Suspect, UnderWay, create, key_of, suspects

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

        thread = threading.Thread(target=self.under_way.noted(key_of(settings), executable), args=(IMAGES,))
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
    assert {*suspects(file, "")} == set()


def test_what_runs_beside_the_thread_that_crashed_is_innocent(file: int, world: World) -> None:
    world.run(A)
    world.run(B)
    words = f"Fatal Python error: Aborted\n\nCurrent thread 0x{world.threads['b']:016x} (most recent call first):"
    assert {*suspects(file, words)} == {key_of(B)}


def test_all_that_run_are_suspected_where_the_thread_is_none_of_theirs(file: int, world: World) -> None:
    world.run(A)
    world.run(B)
    for words in ("", "Current thread 0x0000000000000001 (most recent call first):"):
        assert {*suspects(file, words)} == {key_of(A), key_of(B)}


def test_a_load_is_suspected_before_batches(file: int, world: World) -> None:
    world.run(A)
    with world.under_way.loading(key_of(C)):
        assert {*suspects(file, "")} == {key_of(C)}
    assert {*suspects(file, "")} == {key_of(A)}


@pytest.mark.parametrize("fails", [False, True])
def test_what_has_ended_is_not_under_way(file: int, fails: bool) -> None:
    def executable(images: Images) -> Outputs:
        if fails:
            raise ValueError
        return ()

    run: Callable[..., Any] = UnderWay(file).noted(key_of(A), executable)
    try:
        run(IMAGES)
    except ValueError:
        assert fails
    assert {*suspects(file, "")} == set()


def test_of_loads_those_at_a_step_are_suspected_with_it(file: int, world: World) -> None:
    with world.under_way.loading(key_of(A)), world.under_way.loading(key_of(B)) as load:
        with load.at("compiling mode xla, bucket 1x8x8"), load.at("compiling mode xla, bucket 2x8x8"):
            steps = "compiling mode xla, bucket 1x8x8; compiling mode xla, bucket 2x8x8"
            assert suspects(file, "") == {key_of(B): Suspect(is_load=True, steps=steps)}
        assert suspects(file, "") == {key_of(A): Suspect(is_load=True), key_of(B): Suspect(is_load=True)}
        with load.at("x" * 2 * STEPS_BYTES):
            assert suspects(file, "")[key_of(B)].steps == "x" * STEPS_BYTES


def test_a_step_ends_where_it_fails(file: int, world: World) -> None:
    with world.under_way.loading(key_of(A)) as load:
        with pytest.raises(ValueError, match="no"), load.at("building the model"):
            raise ValueError("no")
        assert suspects(file, "") == {key_of(A): Suspect(is_load=True)}


def test_a_version_whose_file_was_replaced_is_another_one(tmp_path: Path) -> None:
    file = tmp_path / "model.keras"
    file.write_text("1")
    settings = ModelSettings(name="a", source=str(file))
    before = key_of(settings)
    assert key_of(settings) == before
    file.write_text("22")
    assert key_of(settings) != before


def test_versions_are_told_apart_by_their_settings() -> None:
    changed = A.model_copy(update={"version": "2"})
    assert len({key_of(A), key_of(B), key_of(changed)}) == 3
    assert key_of(A) == key_of(A.model_copy())


def test_more_loads_than_there_is_room_for_end_nothing(file: int) -> None:
    under_way = UnderWay(file)
    for _ in range(SLOTS + 2):
        with under_way.loading(key_of(A)):
            pass
    with under_way.loading(key_of(B)):
        assert {*suspects(file, "")} == {key_of(B)}


def test_loads_that_have_ended_leave_their_places_to_others(file: int) -> None:
    under_way = UnderWay(file)
    for _ in range(2 * SLOTS):
        with under_way.loading(key_of(C)):
            pass
    with under_way.loading(key_of(A)):
        with under_way.loading(key_of(B)):
            assert {*suspects(file, "")} == {key_of(A), key_of(B)}
        assert {*suspects(file, "")} == {key_of(A)}
