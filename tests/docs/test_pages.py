from __future__ import annotations

import re
import shlex
import ssl
import subprocess
import sys
from pathlib import Path

import pytest

from xlaserve import cli as server_cli
from xlaserve import config
from xlaserve_client import cli as client_cli
from xlaserve_fleet import cli as fleet_cli
from xlaserve_loadtest import cli as loadtest_cli
from xlaserve_loadtest.option_checks import settings_of

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(?:sh|console|dockerfile|yaml)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PROGRAMS = {
    "xlaserve": server_cli,
    "xlaserve-client": client_cli,
    "xlaserve-fleet": fleet_cli,
    "loadtest": loadtest_cli,
}
COMMAND = re.compile(rf"^(?:\$ |RUN |CMD |- run: )?((?:{'|'.join(PROGRAMS)}) (?:.*\\\n)*.*)$", re.MULTILINE)
COMMANDS = sorted(
    {command for page in PAGES for block in BLOCK.findall(page.read_text()) for command in COMMAND.findall(block)}
)
FETCHED = r'(?:src="|<link rel="(?:stylesheet|preconnect|icon)" href="|@import |url\()'
FROM_ELSEWHERE = re.compile(FETCHED + r"""['"]?(?:https?:)?//""")


def test_the_pages_show_commands() -> None:
    assert len(COMMANDS) > 20


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_on_the_pages_is_right(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A group in brackets is optional, so both forms must do; of choices with bars between the first is taken."""
    monkeypatch.chdir(tmp_path)
    Path("ca.pem").touch()
    Path("trace.jsonl").write_text("0\n1\n")
    Path("key").write_text("5" * 64)
    monkeypatch.setattr(ssl.SSLContext, "load_verify_locations", lambda *_: None)
    plain = re.sub(r" 2?> \S+", "", command.replace("\\\n", ""))
    plain = re.sub(r"(?<= )([\w-]+)\|[\w|]+", r"\1", plain)
    for written in {re.sub(r" \[.*?\]", "", plain), plain.replace("[", "").replace("]", "")}:
        program, *words = shlex.split(written, comments=True)
        try:
            options = PROGRAMS[program].parser().parse_args(words)
        except SystemExit as end:
            assert end.code == 0, (command, end.code)
            continue
        if program == "loadtest" and not options.command:
            settings_of(options, loadtest_cli.parser())


def test_the_example_configuration_is_right_with_its_comments_and_as_it_is(tmp_path: Path) -> None:
    text = (ROOT / "deploy" / "xlaserve.yaml").read_text()
    head, _, fields = text.partition("\nhost:")
    assert all(line.startswith("# ") for line in head.splitlines())
    everything = re.sub(r"^( *)# ", r"\1", f"host:{fields}", flags=re.MULTILINE)
    for name, written in (("some.yaml", text), ("all.yaml", everything)):
        file = tmp_path / name
        file.write_text(written)
        *_, model = config.load(file, environ={}).models
    assert model.name == "mine"
    offered = everything.partition("\n    fit: ")[2].partition("\n")[0]
    assert set(re.findall(r"[a-z_]+", offered)) >= set(config.Fit)


def test_the_site_builds_and_fetches_nothing_from_elsewhere(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "mkdocs", "build", "--quiet", "--strict"]

    subprocess.run([*command, "--site-dir", str(tmp_path)], cwd=ROOT, check=True, capture_output=True)

    pages = [*tmp_path.rglob("*.html"), *tmp_path.rglob("*.css")]
    assert len(pages) > 20
    assert [str(page) for page in pages if FROM_ELSEWHERE.search(page.read_text())] == []
