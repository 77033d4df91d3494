"""Engines as a supervisor starts them: their initial models, their files and their crashes."""

from __future__ import annotations

import os
import pickle
import tempfile
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import cast
from unittest.mock import Mock

import pytest

from xlaserve.config import Settings
from xlaserve.engine.under_way import KEY_BYTES, UnderWay
from xlaserve.processes.engine_process import UNDER_WAY
from xlaserve.processes.engine_replacement import InitialModels
from xlaserve.processes.engines import FOLDERS, Engines, folder_of_engines
from xlaserve.processes.supervision.process import Process


def test_an_engine_begins_with_what_the_one_that_has_changed_last_has(tmp_path: Path) -> None:
    engines = Engines(Settings(), Settings, tmp_path, lambda: True)
    new, old, newer = (pickle.dumps(InitialModels({}, {}, changed_ns=at_ns)) for at_ns in (2, 1, 3))
    kept = []
    for content in (new, old, new, newer):
        engines.keep(content)
        kept.append(engines.initial_models)
    assert kept == [new, new, new, newer]


def test_the_folder_of_a_supervisor_that_was_killed_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as other, ExitStack() as stack:  # of a short name
        monkeypatch.setattr(tempfile, "tempdir", temporary)
        left = Path(temporary) / f"{FOLDERS}left"
        left.mkdir()
        (left / "engine-0").touch()
        held = folder_of_engines(other)
        assert {held, folder_of_engines(stack)} == {*Path(temporary).iterdir()}


@pytest.mark.parametrize("has_said_so", [False, True])
def test_an_engine_has_crashed_unless_it_has_said_that_it_ends(has_said_so: bool) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        engines = Engines(Settings(), Settings, Path(temporary), lambda: True)
        opened = engines.roles[0].connect()
        process = cast(Process, SimpleNamespace(pid=1))
        engines.began(process)
        engines.filled(engines.roles[0], process)
        with UnderWay(opened[UNDER_WAY]).loading(b"k" * KEY_BYTES, "a"):
            if has_said_so:
                engines.announced_end(process)
            assert engines.ended(process, 0) is not has_said_so
        for file in opened.values():
            os.close(file)


def test_engines_that_fail_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory() as temporary:  # of a short name
        folder = Path(temporary)
        engines = Engines(Settings(), Settings, folder, lambda: True)

        def start(pid: int) -> Process:
            for file in engines.roles[0].connect().values():
                os.close(file)
            process = cast(Process, SimpleNamespace(pid=pid))
            engines.began(process)
            return process

        def left() -> tuple[int, list[str]]:
            return len([*Path("/proc/self/fd").iterdir()]), sorted(path.name for path in folder.iterdir())

        serving = start(1)
        engines.filled(engines.roles[0], serving)
        before = left()
        engines.ended(start(2), 1)
        assert left() == before
        for file in engines.roles[0].connect().values():  # and the process can't be started
            os.close(file)
        engines.ended(start(3), 0)
        assert left() == before
        with monkeypatch.context() as patch, pytest.raises(OSError, match="no more files"):
            patch.setattr(os, "memfd_create", Mock(side_effect=OSError("no more files")))
            engines.roles[0].connect()
        engines.ended(start(4), 0)
        assert left()[0] == before[0]
        engines.ended(serving, -9)
        assert (folder / "engine").is_symlink()
