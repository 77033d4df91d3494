from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from xlaserve.engine.cache.executables import Executables


@pytest.fixture
def executables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Executables]:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    executables = Executables()
    yield executables
    executables.close()


def folder_of(tmp_path: Path) -> Path:
    (folder,) = tmp_path.iterdir()
    return folder


def test_each_function_takes_its_own_executables(executables: Executables, tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    (folder / "one.pb").write_bytes(b"\x01a_xlaserve_one__.1\x02code")
    (folder / "two.pb").write_bytes(b"\x01a_xlaserve_two__.1\x02code")
    assert executables.take("xlaserve_two") == {"two.pb": b"\x01a_xlaserve_two__.1\x02code"}
    assert executables.take("xlaserve_two") == {}
    assert executables.take("xlaserve_one").keys() == {"one.pb"}


def test_nothing_is_put_outside_of_the_folder(executables: Executables, tmp_path: Path) -> None:
    executables.put({"../../escaped.pb": memoryview(b"code")})
    assert [file.name for file in folder_of(tmp_path).iterdir()] == ["escaped.pb"]


def test_tensorflow_is_told_of_the_folder_beside_the_flags_that_are_there(
    executables: Executables, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TF_XLA_FLAGS", "--tf_xla_auto_jit=2")
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "2")
    executables.set_environment()
    folder = folder_of(tmp_path)
    assert os.environ["TF_XLA_FLAGS"] == f"--tf_xla_auto_jit=2 --tf_xla_persistent_cache_directory={folder}"


def test_only_this_user_can_put_code_there_and_it_is_gone_at_the_end(executables: Executables, tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    assert folder.stat().st_mode & 0o777 == 0o700
    (folder / "left.pb").write_bytes(b"code")
    executables.close()
    assert not folder.exists()
