"""Whose a ready file is, and who removes it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from xlaserve.errors import ConfigError
from xlaserve.processes.ready_file import ReadyFile

ADDRESSES = {"grpc": "127.0.0.1:1"}
PATIENCE_S = 30.0
OF_ANOTHER = """
import sys
from pathlib import Path
from xlaserve.processes.ready_file import ReadyFile

ReadyFile(Path(sys.argv[1])).write({"grpc": "127.0.0.1:2"})
print("written", flush=True)
sys.stdin.read()
"""


def test_a_file_is_written_whole_and_removed_by_its_owner(tmp_path: Path) -> None:
    path = tmp_path / "ready"
    file = ReadyFile(path)
    file.check()
    assert not [*tmp_path.iterdir()]
    file.write(ADDRESSES)
    assert json.loads(path.read_text()) == {**ADDRESSES, "pid": os.getpid()}
    assert [*tmp_path.iterdir()] == [path]
    file.remove()
    assert not path.exists()


def test_the_file_of_a_server_that_runs_stays_and_of_a_killed_one_goes(tmp_path: Path) -> None:
    path = tmp_path / "ready"
    command = [sys.executable, "-c", OF_ANOTHER, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        try:
            assert other.stdout.readline() == b"written\n"
            second = ReadyFile(path)
            second.check()
            second.remove_left()
            second.remove()
            assert json.loads(path.read_text())["pid"] == other.pid
        finally:
            other.kill()
            other.wait(PATIENCE_S)
    ReadyFile(path).remove_left()
    assert not path.exists()


@pytest.mark.parametrize("kind", ["pipe", "link"])
def test_what_is_no_file_of_its_own_is_refused_and_stays(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "ready"
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/proc/self/fd/0")
    with pytest.raises(ConfigError, match="ready_file: expected a file of its own"):
        ReadyFile(path).check()
    assert [*tmp_path.iterdir()] == [path]


def test_a_file_that_another_server_has_replaced_is_not_removed(tmp_path: Path) -> None:
    path = tmp_path / "ready"
    before, after = ReadyFile(path), ReadyFile(path)
    before.write(ADDRESSES)
    after.write({"grpc": "127.0.0.1:2"})
    before.remove()
    assert json.loads(path.read_text())["grpc"] == "127.0.0.1:2"
    after.remove()
    assert not path.exists()


@pytest.mark.parametrize("place", ["missing/ready", "folder", "n" * 255])
def test_a_place_where_no_file_can_be_is_refused_before_it_is_needed(tmp_path: Path, place: str) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigError, match=r"ready_file: expected a file"):
        ReadyFile(tmp_path / place).check()
    assert [*tmp_path.iterdir()] == [tmp_path / "folder"]


def test_a_server_without_one_does_nothing() -> None:
    file = ReadyFile(None)
    file.check()
    file.remove_left()
    file.write(ADDRESSES)
    file.remove()
