from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from xlaserve import cli as server_cli
from xlaserve_client import cli as client_cli
from xlaserve_loadtest import cli as loadtest_cli

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(?:sh|console|dockerfile)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^(?:\$ |RUN |CMD )?((?:xlaserve|xlaserve-client|loadtest) .*)$", re.MULTILINE)
COMMANDS = sorted(
    {command for page in PAGES for block in BLOCK.findall(page.read_text()) for command in COMMAND.findall(block)}
)
FETCHED = r'(?:src="|<link rel="(?:stylesheet|preconnect|icon)" href="|@import |url\()'
FROM_ELSEWHERE = re.compile(FETCHED + r"""['"]?(?:https?:)?//""")


def test_the_pages_show_commands() -> None:
    assert len(COMMANDS) > 20


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_on_the_pages_can_be_parsed(command: str) -> None:
    """A group in brackets is optional, so both forms must do; of choices with bars between the first is taken."""
    plain = re.sub(r"(?<= )([\w-]+)\|[\w|]+", r"\1", command)
    for written in {re.sub(r" \[.*?\]", "", plain), plain.replace("[", "").replace("]", "")}:
        program, *words = shlex.split(written, comments=True)
        command_line = {"xlaserve": server_cli, "xlaserve-client": client_cli, "loadtest": loadtest_cli}[program]
        command_line.parser().parse_args(words)


def test_the_site_builds_and_fetches_nothing_from_elsewhere(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "mkdocs", "build", "--quiet", "--strict"]

    subprocess.run([*command, "--site-dir", str(tmp_path)], cwd=ROOT, check=True, capture_output=True)

    pages = [*tmp_path.rglob("*.html"), *tmp_path.rglob("*.css")]
    assert len(pages) > 20
    assert [str(page) for page in pages if FROM_ELSEWHERE.search(page.read_text())] == []
