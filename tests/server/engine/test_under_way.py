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

        program = "mode xla, bucket 1x1x1"
        noted = self.under_way.noted(key_of(settings), settings.name, executable, program, 0.25)
        thread = threading.Thread(target=noted, args=(IMAGES,))
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


def test_a_load_and_batches_beside_it_are_all_suspected(file: int, world: World) -> None:
    world.run(A)
    with world.under_way.loading(key_of(C), "c"):
        assert {*suspects(file, "")} == {key_of(A), key_of(C)}
    assert suspects(file, "") == {key_of(A): Suspect(is_load=False, title="a", steps="mode xla, bucket 1x1x1")}


def test_batches_that_never_end_are_suspected_before_all_others(file: int, world: World) -> None:
    world.run(A)
    world.run(B)
    of_b = [batch for batch in world.under_way.batches() if batch.noted.title == "b"]
    assert [(batch.thread, batch.noted.cost_s) for batch in of_b] == [(world.threads["b"], 0.25)]
    with world.under_way.loading(key_of(C), "c"):
        world.under_way.mark_endless(of_b)
        assert {*suspects(file, "")} == {key_of(B)}
    world.end()
    assert world.under_way.batches() == []


def test_the_run_after_an_endless_one_is_another_and_not_endless(file: int) -> None:
    under_way = UnderWay(file)
    seen = []

    def executable(images: Images) -> Outputs:
        (batch,) = under_way.batches()
        seen.append((batch, {*suspects(file, "")}))
        under_way.mark_endless([batch])
        return ()

    run = under_way.noted(key_of(A), "a", executable)
    with under_way.loading(key_of(C), "c"):
        for _ in range(2):
            run(IMAGES)
    (first, before), (second, after) = seen
    assert first != second
    assert before == after == {key_of(A), key_of(C)}


@pytest.mark.parametrize("fails", [False, True])
def test_what_has_ended_is_not_under_way(file: int, fails: bool) -> None:
    def executable(images: Images) -> Outputs:
        if fails:
            raise ValueError
        return ()

    run: Callable[..., Any] = UnderWay(file).noted(key_of(A), "a", executable)
    try:
        run(IMAGES)
    except ValueError:
        assert fails
    assert {*suspects(file, "")} == set()


def test_of_loads_those_at_a_step_are_suspected_with_it(file: int, world: World) -> None:
    with world.under_way.loading(key_of(A), "a"), world.under_way.loading(key_of(B), "b") as load:
        with load.at("compiling mode xla, bucket 1x8x8"), load.at("compiling mode xla, bucket 2x8x8"):
            steps = "compiling mode xla, bucket 1x8x8; compiling mode xla, bucket 2x8x8"
            assert suspects(file, "") == {key_of(B): Suspect(is_load=True, title="b", steps=steps)}
        assert suspects(file, "") == {
            key_of(A): Suspect(is_load=True, title="a"),
            key_of(B): Suspect(is_load=True, title="b"),
        }
        with load.at("x" * 2 * STEPS_BYTES):
            assert suspects(file, "")[key_of(B)].steps == "x" * STEPS_BYTES


def test_a_step_ends_where_it_fails(file: int, world: World) -> None:
    with world.under_way.loading(key_of(A), "a") as load:
        with pytest.raises(ValueError, match="no"), load.at("building the model"):
            raise ValueError("no")
        assert suspects(file, "") == {key_of(A): Suspect(is_load=True, title="a")}


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
        with under_way.loading(key_of(A), "a"):
            pass
    with under_way.loading(key_of(B), "b"):
        assert {*suspects(file, "")} == {key_of(B)}


def test_loads_that_have_ended_leave_their_places_to_others(file: int) -> None:
    under_way = UnderWay(file)
    for _ in range(2 * SLOTS):
        with under_way.loading(key_of(C), "c"):
            pass
    with under_way.loading(key_of(A), "a"):
        with under_way.loading(key_of(B), "b"):
            assert {*suspects(file, "")} == {key_of(A), key_of(B)}
        assert {*suspects(file, "")} == {key_of(A)}


@pytest.mark.parametrize("size_bytes", [0, 100, 7 * SLOTS])
def test_records_of_another_version_tell_of_no_suspects(size_bytes: int) -> None:
    other = os.memfd_create("other")
    os.write(other, b"k" * size_bytes)
    assert suspects(other, "") == {}
    os.close(other)
