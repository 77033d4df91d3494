"""The commands of pages, run as they are typed, one after the other as a reader does."""

from __future__ import annotations

import re
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.docs.blocks import ROOT, blocks
from tests.docs.reader import PORT_TAKEN, PORTS, Reader

README = (ROOT / "README.md").read_text()
ACTIVATE = Path(sys.prefix, "bin", "activate")

needs_setup = pytest.mark.skipif(not ACTIVATE.exists(), reason="needs the virtual environment that make setup makes")


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    for port in PORTS:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                pytest.skip(PORT_TAKEN)
    reader = Reader(tmp_path)
    yield reader
    reader.leave()


def test_the_readme_fits_on_a_few_screens() -> None:
    assert README.count("\n") <= 120


def test_all_blocks_of_the_readme_are_run_here_or_by_the_ci() -> None:
    ci = {line.strip() for line in (ROOT / ".ci" / "run").read_text().splitlines()}
    typed = {line.partition("#")[0].strip() for _, block in blocks("README.md") for line in block.splitlines()}
    of_make = {line for line in typed if line.startswith("make ")}

    assert {language for language, _ in blocks("README.md")} <= {"sh", "python"}
    assert "make demo" in of_make
    assert of_make <= ci


@pytest.mark.timeout(240)
@needs_setup
@pytest.mark.parametrize(
    ("page", "section", "least"),
    [
        ("README.md", "", 6),
        pytest.param("docs/jax-and-pytorch.md", "", 6, marks=pytest.mark.slow),
        pytest.param("docs/security.md", "Try it", 2, marks=pytest.mark.slow),
        pytest.param("docs/operations.md", "", 10, marks=pytest.mark.slow),
    ],
)
def test_each_command_works_as_it_is_typed(page: str, section: str, least: int, reader: Reader) -> None:
    shown = blocks(page, section)
    assert len(shown) >= least
    if page != "README.md":
        reader.activate()
    for language, block in shown:
        reader.follow(language, block)
    reader.press_ctrl_c()


def test_links_of_the_readme_lead_to_files() -> None:
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)]+)\)", README)]

    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []
