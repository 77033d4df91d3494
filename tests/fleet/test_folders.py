from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from xlaserve.errors import ConfigError
from xlaserve_fleet import folders
from xlaserve_fleet.settings import FleetSettings


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_the_folder_is_for_one_user_and_has_his_number(temporary: Path) -> None:
    folder = folders.private()
    assert folder == temporary / f"xlaserve-fleets-{os.getuid()}"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert folders.private() == folder


def test_a_folder_that_others_can_use_is_refused(temporary: Path) -> None:
    folders.private().chmod(0o755)
    with pytest.raises(ConfigError, match="with mode 700, got drwxr-xr-x of user"):
        folders.private()


def test_a_link_is_refused(temporary: Path) -> None:
    (temporary / f"xlaserve-fleets-{os.getuid()}").symlink_to(temporary)
    with pytest.raises(ConfigError, match="expected a folder of user"):
        folders.private()


def test_a_folder_of_another_user_is_refused(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, other = os.getuid(), os.getuid() + 1
    (temporary / f"xlaserve-fleets-{other}").mkdir(0o700)
    monkeypatch.setattr(os, "getuid", lambda: other)
    with pytest.raises(ConfigError, match=f"expected a folder of user {other} .* of user {owner}"):
        folders.private()


def test_the_address_of_a_local_fleet_is_for_its_user_alone(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = FleetSettings.model_validate({"ray": "local", "server": {}}).local_address
    assert file.parent == folders.private()
    folders.write(file, "127.0.0.1:1")
    folders.write(file, "127.0.0.1:2")
    assert file.stat().st_mode & 0o777 == 0o600
    assert folders.read(file) == "127.0.0.1:2"
    owner = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    with pytest.raises(ConfigError, match=f"got one of user {owner}"):
        folders.read(file)


def test_folders_are_kept_while_they_are_in_use_and_removed_afterwards(tmp_path: Path) -> None:
    (tmp_path / "not-ours").mkdir()
    first = folders.hold(tmp_path / "first")
    (tmp_path / "first" / "file").touch()
    second = folders.hold(tmp_path / "second")
    assert (tmp_path / "first" / "file").exists()
    os.close(first)
    third = folders.hold(tmp_path / "third")
    assert {one.name for one in tmp_path.iterdir() if one.is_dir()} == {"not-ours", "second", "third"}
    os.close(second)
    os.close(third)


def test_a_folder_is_kept_while_a_child_that_has_it_lives(tmp_path: Path) -> None:
    held = folders.hold(tmp_path / "first")
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=[held])
    os.close(held)
    os.close(folders.hold(tmp_path / "second"))
    assert (tmp_path / "first").exists()
    child.communicate(b"\n")
    os.close(folders.hold(tmp_path / "third"))
    assert not (tmp_path / "first").exists()
