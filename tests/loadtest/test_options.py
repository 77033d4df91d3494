"""Every option of every command, with values that it can't have."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest

from xlaserve_loadtest import cli, options
from xlaserve_loadtest.option_checks import settings_of
from xlaserve_loadtest.printable import printable
from xlaserve_loadtest.reports import cli as report
from xlaserve_loadtest.reports import compare_cli
from xlaserve_loadtest.study import sweep

BAD: Final = (
    "",
    ",",
    "=",
    "nonsense",
    "-1",
    "nan",
    "1e999",
    "9" * 5000,
    "a,a",
    "1:",
    "\x1b[31mred",
    "/no/such/folder/file",
)
SAID: Final = (
    "expected",
    "choose from",
    "go together",
    "exclude each other",
    " is for ",
    " are for ",
    "name at least one",
)
FREE: Final = {"--baseline", "--tls-server-name", "--out", "--models", "--save-arrivals"}
"""Options that take any text."""

COMMANDS: Final[dict[str, tuple[Callable[[], argparse.ArgumentParser], list[str]]]] = {
    "": (options.parser, []),
    "report": (report.parser, ["run"]),
    "compare": (compare_cli.parser, ["a", "b"]),
    "sweep": (sweep.parser, []),
}


def valued() -> Iterator[tuple[str, str]]:
    """Yields each option that takes a value, with its command."""
    for command, (parser, _) in COMMANDS.items():
        for action in parser()._actions:
            if action.option_strings and action.nargs != 0:
                yield command, action.option_strings[0]


class Parsed(Exception):
    """The command line was taken."""


@pytest.fixture
def refusal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Callable[[str, str, str], str | None]:
    """Gives an option a value; returns what was said against it, None where it was taken."""

    def take(*_: object, **__: object) -> None:
        raise Parsed

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli, "Session", take)

    def give(command: str, option: str, value: str) -> str | None:
        parser, positional = COMMANDS[command]
        words = [*positional, f"{option}={value}"]
        try:
            if command:
                parser().parse_args(words)
            else:
                cli.main(words)
        except Parsed:
            return None
        except SystemExit as ended:
            assert ended.code == 2
            (line,) = capsys.readouterr().err.splitlines()
            return line
        return None

    return give


@pytest.mark.parametrize(
    ("command", "option"), [("", "--concurrency"), ("", "--max-in-flight"), ("sweep", "--concurrency")]
)
def test_more_requests_at_a_time_than_a_machine_holds_are_refused(
    refusal: Callable[[str, str, str], str | None], command: str, option: str
) -> None:
    assert "from 1 to 10,000" in str(refusal(command, option, "10001"))


@pytest.mark.parametrize(("command", "option"), list(valued()))
def test_a_bad_value_is_refused_with_what_was_expected_and_what_came(
    refusal: Callable[[str, str, str], str | None], command: str, option: str
) -> None:
    said = {value: refusal(command, option, value) for value in BAD}
    refused = {value: line for value, line in said.items() if line is not None}
    assert refused or option in FREE
    for value, line in refused.items():
        assert line.startswith(f"loadtest {command}".strip() + ": error: ")
        assert line.endswith(f"; see loadtest {command}".rstrip() + " --help")
        assert option in line
        assert "…" in line or any(word in line for word in SAID), line
        assert "\x1b" not in line
        assert len(line) < 700
        assert "got" not in line or printable(value)[:20] in line or repr(value)[:20] in line, line


@pytest.mark.parametrize(
    ("words", "may_end"),
    [
        ((), True),
        (("--full-duration",), False),
        (("--scenario", "multi-stream"), False),
        (("--scenario", "offline"), False),
    ],
)
def test_a_run_may_end_once_it_is_steady_but_a_scenario_never_does(words: tuple[str, ...], *, may_end: bool) -> None:
    own = options.parser()
    chosen = own.parse_args(["--target", "127.0.0.1:1", "--model", "digits", *words])
    assert settings_of(chosen, own).ends_when_steady is may_end
