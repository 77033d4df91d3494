"""Which versions are set aside after which ends of processes."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import numpy as np
import pytest

from xlaserve.config import ModelSettings
from xlaserve.engine.inputs import Images
from xlaserve.engine.program import Outputs
from xlaserve.engine.under_way import STEPS_BYTES, UnderWay, create, key_of
from xlaserve.processes.crashes import MOST, MOST_KNOWN, Crashes
from xlaserve.processes.supervision.parent import SILENCED
from xlaserve.processes.supervision.role import NO_USE

A, B = (key_of(ModelSettings(name=name, source="fake")) for name in "ab")
STEP = "compiling mode xla, bucket 2x8x8"


@pytest.fixture
def files() -> Iterator[tuple[int, int]]:
    files = create(), os.memfd_create("last words")
    yield files
    for file in files:
        os.close(file)


def test_what_crashes_while_it_is_loaded_alone_is_set_aside_at_once(files: tuple[int, int]) -> None:
    crashes = Crashes()
    with UnderWay(files[0]).loading(A, "a") as load, load.at(STEP):
        assert STEP in crashes.note(-signal.SIGSEGV, *files)
    assert crashes.set_aside.keys() == {A}
    assert STEP in crashes.set_aside[A]
    assert "signal 11" in crashes.set_aside[A]
    assert Crashes(crashes.text).set_aside == crashes.set_aside


def test_what_runs_at_each_crash_is_set_aside_and_no_load_beside_it(files: tuple[int, int]) -> None:
    crashes, under_way = Crashes(), UnderWay(files[0])

    def crash(images: Images) -> Outputs:
        with under_way.loading(A, "a") as load, load.at(STEP):
            said = crashes.note(0, *files)
        assert f"model a was loaded ({STEP})" in said
        assert "model b ran (mode eager, bucket 1x1x1)" in said
        return ()

    run = under_way.noted(B, "b", crash, "mode eager, bucket 1x1x1", 0.0)
    for count in range(1, MOST + 1):
        run(np.zeros((1, 1, 1, 3), np.uint8))
        assert (crashes.set_aside.keys() == {B}) == (count == MOST)
    assert "mode eager, bucket 1x1x1" in crashes.set_aside[B]
    with under_way.loading(A, "a"):
        crashes.note(-signal.SIGSEGV, *files)
    assert crashes.set_aside.keys() == {A, B}, "alone it is the only one that can have crashed"


def test_a_load_that_silences_its_process_is_not_set_aside_for_one_time(files: tuple[int, int]) -> None:
    crashes = Crashes()
    with UnderWay(files[0]).loading(A, "a"):
        for count in range(1, MOST + 1):
            assert crashes.note(-SILENCED, *files)
            assert (crashes.set_aside.keys() == {A}) == (count == MOST)


def test_of_several_loads_none_is_set_aside_for_one_crash(files: tuple[int, int]) -> None:
    crashes, under_way = Crashes(), UnderWay(files[0])
    with under_way.loading(A, "a"), under_way.loading(B, "b"):
        for _ in range(MOST - 1):
            assert crashes.note(-signal.SIGABRT, *files)
        assert crashes.set_aside == {}
        crashes.note(-signal.SIGABRT, *files)
    assert crashes.set_aside.keys() == {A, B}


def test_what_crashes_while_it_runs_is_set_aside_after_several_crashes(files: tuple[int, int]) -> None:
    crashes = Crashes()

    def crash(images: Images) -> Outputs:
        crashes.note(-signal.SIGSEGV, *files)
        return ()

    run = UnderWay(files[0]).noted(A, "a", crash)
    for count in range(1, MOST + 1):
        run(np.zeros((1, 1, 1, 3), np.uint8))
        assert (crashes.set_aside.keys() == {A}) == (count == MOST)


def test_what_is_known_of_crashes_is_bounded_and_the_latest(files: tuple[int, int]) -> None:
    crashes, under_way = Crashes(), UnderWay(files[0])
    keys = [key_of(ModelSettings(name=str(number), source="fake")) for number in range(MOST_KNOWN + 2)]
    for key in (*keys, keys[-MOST_KNOWN]):
        with under_way.loading(key, "a") as load, load.at("x" * STEPS_BYTES):
            crashes.note(-signal.SIGSEGV, *files)
    assert crashes.set_aside.keys() == {*keys[-MOST_KNOWN:]}
    assert [*crashes.set_aside][-1] == keys[-MOST_KNOWN], "it crashed last"
    assert len(crashes.text) < 128 * 1024


@pytest.mark.parametrize(
    ("status", "has_said_so"),
    [
        (0, True),
        (NO_USE, True),
        (-signal.SIGKILL, False),
        (-signal.SIGTERM, False),
        (128 + signal.SIGTERM, True),
        (128 + signal.SIGINT, True),
    ],
)
def test_other_ends_than_crashes_set_nothing_aside(status: int, has_said_so: bool, files: tuple[int, int]) -> None:
    crashes = Crashes()
    with UnderWay(files[0]).loading(A, "a"):
        assert not crashes.note(status, *files, has_said_so=has_said_so)
    assert crashes.set_aside == {}


@pytest.mark.parametrize("status", [0, 1, NO_USE, 128 + signal.SIGTERM, 128 + signal.SIGINT])
def test_an_end_without_a_word_is_a_crash_whatever_its_status(status: int, files: tuple[int, int]) -> None:
    crashes = Crashes()
    with UnderWay(files[0]).loading(A, "a") as load, load.at(STEP):
        assert STEP in crashes.note(status, *files)
    assert f"status {status}" in crashes.set_aside[A]


def test_a_crash_with_nothing_under_way_has_no_known_cause(files: tuple[int, int]) -> None:
    assert not Crashes().note(-signal.SIGSEGV, *files)
