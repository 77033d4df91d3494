from __future__ import annotations

import os
from pathlib import Path

from xlaserve.config import ModelSettings, model_files


def test_files_are_found_through_links_and_not_in_circles(tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "model", tmp_path / "elsewhere"
    for path in (folder / "variables.index", elsewhere / "data"):
        path.parent.mkdir()
        path.write_text("1")
    (folder / "variables").symlink_to(elsewhere)
    (elsewhere / "back").symlink_to(folder)
    (folder / "self").symlink_to(".")
    (folder / "nowhere").symlink_to("missing")
    assert [*model_files.files_at(folder)] == [folder / "variables" / "data", folder / "variables.index"]
    assert [*model_files.files_at(folder / "variables.index")] == [folder / "variables.index"]
    assert [*model_files.files_at(tmp_path / "missing")] == []


def test_a_file_that_is_replaced_by_one_of_its_size_and_time_is_another_state(tmp_path: Path) -> None:
    source, labels = tmp_path / "model.keras", tmp_path / "labels.txt"
    for file in (source, labels):
        file.write_text("1")
    settings = ModelSettings(name="a", source=str(source), labels=labels)
    before = model_files.state(settings)
    assert model_files.state(settings) == before
    for file in (source, labels):
        seen = file.stat()
        (other := tmp_path / "other").write_text("2")
        os.utime(other, ns=(seen.st_atime_ns, seen.st_mtime_ns))
        other.replace(file)
        assert model_files.state(settings) != before
        before = model_files.state(settings)
