from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from xlaserve.models.held_folder import held_folder


def test_a_folder_that_another_server_took_for_left_over_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_folder = tempfile.mkdtemp
    with ExitStack() as of_another:

        def lock(folder: str) -> None:
            descriptor = os.open(folder, os.O_RDONLY)
            of_another.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX)

        takes: list[Callable[[str], None]] = [os.rmdir, lock]
        taken: list[str] = []

        def make_and_lose(**named: Any) -> str:
            folder = make_folder(dir=tmp_path, **named)
            if takes:
                takes.pop()(folder)
                taken.append(folder)
            return folder

        monkeypatch.setattr("tempfile.mkdtemp", make_and_lose)
        with held_folder("held-") as folder:
            assert folder.is_dir()
            assert len(taken) == 2
            assert str(folder) not in taken
