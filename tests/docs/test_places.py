"""The tables that say where things are name files that exist, modules are short, and so are the names of tests."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import compress, pairwise
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = (ROOT, ROOT / "server" / "xlaserve", ROOT / "loadtest" / "xlaserve_loadtest")
CODE = re.compile(r"`([^`\n]+)`")
PATH = re.compile(r"[\w*.-][\w*./-]*/|(?:[\w*.-]+/)*[\w*-]+\.(?:py|md|toml|yaml|proto)")
NAME = re.compile(r"@?[\w.]+")
MAX_LINES = 200
MAX_MODULE_LINES = 350
MAX_NAME_LENGTH = 70
TEST_NAME = re.compile(r"^\s*(?:async )?def (test_\w+)", re.MULTILINE)
NAME_IN_PATH = re.compile(r"`([\w.]+)` in (`[^`]+`)")


class Row(NamedTuple):
    page: str
    cells: list[str]

    def __str__(self) -> str:
        return f"{self.page}: {self.cells[0]}"


def rows(page: str, heading: str) -> Iterator[Row]:
    section = (ROOT / page).read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    lines = [*section.splitlines(), ""]
    is_row = [line.startswith("| ") and not below.startswith("|-") for line, below in pairwise(lines)]
    return (Row(page, line.strip("| ").split(" | ")) for line in compress(lines, is_row))


TO_CHANGE = list(rows("CONTRIBUTING.md", "Where to change what"))
MODULES = list(rows("ARCHITECTURE.md", "Rooms"))


def find(text: str) -> tuple[list[Path], list[str], list[str]]:
    """Returns the files of the paths in `text`, paths of which there are none, and all else that is set as code.

    A path may leave out the folder of the one before it, or that folder itself.
    """
    found: list[Path] = []
    missing, names = [], []
    before: list[Path] = []
    for code in CODE.findall(text):
        if not PATH.fullmatch(code):
            names.append(code)
            continue
        here = [path for folder in (*before, *FOLDERS) for path in folder.glob(code.rstrip("/"))]
        if not here:
            missing.append(code)
            continue
        found += here
        before = [path for path in (here[0], here[0].parent) if path.is_dir()]
    return found, missing, names


def text_of(path: Path) -> str:
    return "\n".join(file.read_text() for file in (path.rglob("*.py") if path.is_dir() else [path]))


def test_the_tables_have_rows() -> None:
    assert len(TO_CHANGE) > 20
    assert len(MODULES) > 20


def test_a_path_or_a_name_that_is_gone_is_noticed() -> None:
    assert find("`rpc/nothing.py`, `wire/grpc/vision_service.py`")[1] == ["rpc/nothing.py"]
    with pytest.raises(AssertionError, match="Nothing"):
        test_each_change_names_files_that_exist_and_what_stands_in_them(
            Row("", ["", "`Nothing` in `wire/grpc/vision_service.py`"])
        )


@pytest.mark.parametrize("row", TO_CHANGE, ids=str)
def test_each_change_names_files_that_exist_and_what_stands_in_them(row: Row) -> None:
    found, missing, names = find(row.cells[1])
    text = "\n".join(map(text_of, found)) + "\n".join(path.stem for path in found)
    words = [name.rpartition(".")[2] for name in names if NAME.fullmatch(name)]
    assert (missing, [word for word in words if not re.search(rf"\b{word.strip('@')}\b", text)]) == ([], [])
    assert found
    for name, path in NAME_IN_PATH.findall(row.cells[1]):
        text = "\n".join(map(text_of, find(path)[0]))
        assert re.search(rf"\b{name.rpartition('.')[2]}\b", text), f"{name} in {path}"


def test_architecture_is_short_and_names_only_files_that_exist() -> None:
    page = (ROOT / "ARCHITECTURE.md").read_text()
    paragraphs = re.sub(r"```.*?```", "", page, flags=re.DOTALL).split("\n\n")
    assert [missing for text in paragraphs for missing in find(" ".join(text.split()))[1]] == []
    assert len(page.splitlines()) <= MAX_LINES


@pytest.mark.parametrize("row", MODULES, ids=str)
def test_each_package_exists_with_the_modules_that_it_is_said_to_have(row: Row) -> None:
    found, missing, _ = find(row.cells[0])
    folders = [path for path in found if path.is_dir()]
    modules = [name for name in CODE.findall(row.cells[1]) if name.isidentifier()]
    gone = [name for name in modules if folders and not any((folder / f"{name}.py").exists() for folder in folders)]
    assert (missing, gone) == ([], [])
    assert found


def test_no_module_is_longer_than_one_subject() -> None:
    modules = [path for name in ("server", "client", "loadtest", "fleet") for path in (ROOT / name).rglob("*.py")]
    assert len(modules) > 500
    lines = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in modules}
    assert {path: count for path, count in lines.items() if count > MAX_MODULE_LINES} == {}


def test_no_test_has_a_long_name() -> None:
    names = [
        (path.name, name) for path in (ROOT / "tests").rglob("*.py") for name in TEST_NAME.findall(path.read_text())
    ]
    assert len(names) > 2000
    assert [each for each in names if len(each[1]) > MAX_NAME_LENGTH] == []
