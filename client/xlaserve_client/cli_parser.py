"""How command lines are parsed: those of the client and the server."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any, NoReturn


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
