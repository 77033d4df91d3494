"""The parser of command lines, and their completion in shells."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import shtab


class Parser(argparse.ArgumentParser):
    """A parser that reports a wrong command line in one line, in the name of the subcommand.

    Its help may leave out options that few people need, which `--help-all` shows.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        self._unlisted: list[argparse.Action] = []
        self._full_epilog: str | None = None
        super().__init__(*args, **options)

    def unlist(self, actions: Iterable[argparse.Action]) -> None:
        """Leaves some arguments out of the help; they are completed and documented all the same."""
        self._unlisted += actions

    def add_help_all(self, epilog: str | None = None) -> None:
        """Adds `--help-all`, which shows every argument, with another text behind them."""
        self._full_epilog = epilog
        text = f"show the other {len(self._unlisted)} options as well, and exit"
        self.add_argument("--help-all", action=_HelpAll, nargs=0, dest=argparse.SUPPRESS, help=text)

    def format_help(self) -> str:
        """Returns the help, without the arguments that are not listed."""
        texts = [action.help for action in self._unlisted]
        for action in self._unlisted:
            action.help = argparse.SUPPRESS
        try:
            return super().format_help()
        finally:
            for action, text in zip(self._unlisted, texts, strict=True):
                action.help = text

    def format_full_help(self) -> str:
        """Returns the help with all arguments."""
        unlisted, epilog = self._unlisted, self.epilog
        self._unlisted, self.epilog = [], self._full_epilog
        try:
            return super().format_help()
        finally:
            self._unlisted, self.epilog = unlisted, epilog

    def parse_known_args(self, args: Iterable[str] | None = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parses, and rejects unknown arguments here: argparse would report them in the name of the whole program."""
        given = sys.argv[1:] if args is None else [*args]
        self._check_order(given)
        found, unknown = super().parse_known_args(given, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown

    def _check_order(self, given: Sequence[str]) -> None:
        """Rejects an option of a subcommand before its name: argparse would take the option's value for the name."""
        option = given[0].partition("=")[0] if given else ""
        if option in {name for command in _subcommands(self) for name in _options(command)} - _options(self):
            self.error(f"argument {option}: options follow the command: {self.prog} COMMAND {option} ...")

    def error(self, message: str) -> NoReturn:
        """Ends the process with status 2."""
        self.exit(2, f"{self.prog}: error: {message}; see {self.prog} --help\n")


class _HelpAll(argparse.Action):
    """Prints the help with all arguments, and ends the process."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        assert isinstance(parser, Parser)
        sys.stdout.write(parser.format_full_help())
        parser.exit()


def add_completion(parser: argparse.ArgumentParser) -> None:
    """Adds `--print-completion` to a parser that has all its other arguments and subcommands."""
    shtab.add_argument_to(parser, "--print-completion", help="print what completes the command in a shell, and exit")
    parsers = [parser]
    for each in parsers:
        parsers += _subcommands(each)
        for action in each._actions:
            if action.type is Path:
                action.complete = shtab.FILE  # type: ignore[attr-defined]


def _options(parser: argparse.ArgumentParser) -> set[str]:
    return {name for action in parser._actions for name in action.option_strings}


def _subcommands(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    actions = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return [command for action in actions for command in action.choices.values()]
