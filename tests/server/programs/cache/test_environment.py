from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

import xlaserve
from xlaserve.programs.cache.environment import _CODE, digest, environment, installed, is_replaced, key
from xlaserve.programs.tf.device import Device

DEVICE = Device("cpu", "some processor", 2, 1)


@pytest.mark.parametrize(
    ("variable", "value"),
    [("XLA_FLAGS", "--xla_cpu_enable_fast_math=true"), ("TF_ENABLE_ONEDNN_OPTS", "0"), ("TF_XLA_FLAGS", "--x")],
)
def test_another_device_or_flag_is_another_environment(
    variable: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = environment(DEVICE)
    assert facts["tensorflow"].count(".") == 2
    assert key(environment(DEVICE)) == key(facts)
    assert key(environment(replace(DEVICE, name="another processor"))) != key(facts)
    monkeypatch.setenv(variable, value)
    assert key(environment(DEVICE)) != key(facts)


@pytest.mark.parametrize("file", ["models/lowering/stem.py", "models/sources/data/keras_cv.yaml"])
def test_changed_code_is_another_environment_for_processes_that_run_it(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    request.addfinalizer(installed.cache_clear)
    installed.cache_clear()
    module = tmp_path / file
    module.parent.mkdir(parents=True)
    module.write_text("1")
    here = tmp_path / "programs" / "cache" / "here.py"
    monkeypatch.setattr("xlaserve.programs.cache.environment.__file__", str(here))
    before = key(environment(DEVICE))
    module.write_text("2")
    assert key(environment(DEVICE)) == before
    installed.cache_clear()  # as in another process
    assert key(environment(DEVICE)) != before


def test_code_that_is_just_being_installed_is_other_code(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_replaced()

    def digest_of_what_is_removed(folder: Path, files: Iterable[Path]) -> str:
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr("xlaserve.programs.cache.environment.digest", digest_of_what_is_removed)
    assert is_replaced()


def test_where_no_process_has_cores_of_its_own_all_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    assert environment(DEVICE)["cores"] == str(os.cpu_count())


def test_where_files_are_written_is_no_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("XLA_FLAGS", "TF_XLA_FLAGS"):
        monkeypatch.delenv(name, raising=False)
    facts = environment(DEVICE)
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=/tmp/dump --xla_dump_hlo_as_text")
    monkeypatch.setenv("TF_XLA_FLAGS", "--tf_xla_persistent_cache_directory=/tmp/x")
    assert environment(DEVICE) == facts


def test_a_digest_tells_contents_and_names_apart_whatever_their_order(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_text("1")
    two.write_text("2")
    before = digest(tmp_path, [one, two])
    assert digest(tmp_path, [two, one]) == before
    two.write_text("3")
    assert digest(tmp_path, [one, two]) != before
    two.write_text("2")
    one.rename(tmp_path / "three")
    assert digest(tmp_path, [tmp_path / "three", two]) != before


def test_files_of_one_name_that_change_their_folders_have_another_digest(tmp_path: Path) -> None:
    files = [tmp_path / folder / "weights" for folder in "ab"]
    for number, file in enumerate(files):
        file.parent.mkdir()
        file.write_text(str(number))
    before = digest(tmp_path, files)
    files[0].write_text("1")
    files[1].write_text("0")
    assert digest(tmp_path, files) != before


def test_all_packages_that_make_programs_are_part_of_the_key() -> None:
    package = Path(xlaserve.__file__).parent
    for name in _CODE:
        assert list((package / name).rglob("*.py")), name
    for module in ("programs/tf/tensorflow_program.py", "models/networks/assemble.py", "engine/warmup/compiler.py"):
        assert (package / module).is_file()
        assert module.partition("/")[0] in _CODE
