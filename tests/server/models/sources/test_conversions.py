from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from xlaserve.models.sources.conversions import FOLDER, MARK, Conversions

PACKAGES = ("numpy",)


def made_of(file: Path, then: Callable[[], object] = lambda: None) -> Callable[[Path], None]:
    """Returns a conversion that takes over what the file holds, and what `then` does before."""

    def convert(folder: Path) -> None:
        then()
        folder.mkdir()
        (folder / MARK).write_text(file.read_text())

    return convert


def converted(conversions: Conversions, file: Path, convert: Callable[[Path], None]) -> str:
    with conversions.saved_model(file, PACKAGES, convert) as folder:
        return (folder / MARK).read_text()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (file := tmp_path / "model.h5").write_text("old")
    return file


def test_what_was_made_of_a_file_is_used_for_it_alone(file: Path, tmp_path: Path) -> None:
    conversions = Conversions(tmp_path)
    assert converted(conversions, file, made_of(file)) == "old"
    assert converted(conversions, file, lambda folder: pytest.fail("it was kept")) == "old"
    file.write_text("new")
    assert converted(conversions, file, made_of(file)) == "new"


def test_nothing_is_kept_of_a_file_that_was_replaced_since_its_digest(file: Path, tmp_path: Path) -> None:
    conversions = Conversions(tmp_path)
    assert converted(conversions, file, made_of(file, lambda: file.write_text("new"))) == "new"
    assert not (tmp_path / FOLDER).exists()
    file.write_text("old")
    assert converted(conversions, file, made_of(file)) == "old"


def test_nothing_is_kept_of_a_file_that_has_gone(file: Path, tmp_path: Path) -> None:
    def convert(folder: Path) -> None:
        made_of(file)(folder)
        file.unlink()

    assert converted(Conversions(tmp_path), file, convert) == "old"
    assert not (tmp_path / FOLDER).exists()
