"""How command lines are parsed, and completed by shells."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

import shtab


class Parser(argparse.ArgumentParser):
    """Reports a wrong command line in one line, in the name of the subcommand."""

    def parse_known_args(self, args: Iterable[str] | None = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parses, and rejects unknown arguments here: argparse would report them in the name of the whole program."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        """Ends the process with status 2."""
        self.exit(2, f"{self.prog}: error: {message}; see {self.prog} --help\n")


def add_completion(parser: argparse.ArgumentParser) -> None:
    """Adds `--print-completion` to a parser that has all its other arguments and subcommands."""
    shtab.add_argument_to(parser, "--print-completion", help="print what completes the command in a shell, and exit")
    parsers = [parser]
    for each in parsers:
        for action in each._actions:
            if isinstance(action, argparse._SubParsersAction):
                parsers += action.choices.values()
            elif action.type is Path:
                action.complete = shtab.FILE  # type: ignore[attr-defined]
