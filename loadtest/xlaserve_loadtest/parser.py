"""How command lines are parsed. Imports nothing of the client, since reports must work without grpc."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from difflib import get_close_matches
from itertools import takewhile
from pathlib import Path
from typing import Any, Final, NoReturn, TypeVar

from xlaserve_loadtest.printable import MAX_MESSAGE, printable

MAX_PORT: Final = 65_535

Value = TypeVar("Value")

_LARGEST: Final = {int: 2**63, float: float("inf")}
_BELOW: Final = {int: "below 2^63", float: "finite"}
_MAX_DIGITS: Final = 9


class Parser(argparse.ArgumentParser):
    """Reports a wrong command line in one line."""

    def parse_known_args(self, args: Iterable[str] | None = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parses, and rejects an unknown option first: argparse would take its value for the name of a command."""
        given = sys.argv[1:] if args is None else [*args]
        known = [name for action in self._actions for name in action.option_strings]
        commands = {name for action in self._actions if isinstance(action.choices, Mapping) for name in action.choices}
        for word in takewhile(lambda word: word not in commands and word != "--", given):
            option = word.partition("=")[0]
            if option.startswith("--") and not any(name.startswith(option) for name in known):
                near = get_close_matches(option, known, n=2)
                meant = f", did you mean {' or '.join(near)}?" if near else ""
                self.error(f"unrecognized arguments: {option}{meant}")
        return super().parse_known_args(given, namespace)

    def error(self, message: str) -> NoReturn:
        """Ends the process with status 2."""
        if len(message) > MAX_MESSAGE:  # what was expected may stand before what came, or behind it
            message = f"{message[: MAX_MESSAGE // 2]} … {message[-MAX_MESSAGE // 2 :]}"
        self.exit(2, printable(f"{self.prog}: error: {message}; see {self.prog} --help\n"))


def number_over(kind: type[int] | type[float], bound: int, unit: str = "") -> Callable[[str], float]:
    """Returns what parses a number of a `kind` over `bound`, in a `unit`, for argparse."""
    return _number(kind, f"{f'of {unit} ' if unit else ''}over {bound}", lambda value: value > bound)


def number_from(kind: type[int] | type[float], least: int, unit: str = "") -> Callable[[str], float]:
    """Returns what parses a number of a `kind` that is `least` or more, in a `unit`, for argparse."""
    return _number(kind, f"of {least} or more{f' {unit}' if unit else ''}", lambda value: value >= least)


def _number(kind: type[int] | type[float], which: str, is_right: Callable[[float], bool]) -> Callable[[str], float]:
    whole = "whole " if kind is int else ""

    def parse(text: str) -> float:
        with suppress(ValueError):
            value = kind(text)
            if is_right(value) and value < _LARGEST[kind]:
                return value
            if value >= _LARGEST[kind]:
                raise argparse.ArgumentTypeError(f"expected a {whole}number {which} and {_BELOW[kind]}, got {text!r}")
        raise argparse.ArgumentTypeError(f"expected a {whole}number {which}, got {text!r}")

    return parse


def checked(parse: Callable[[str], Value]) -> Callable[[str], Value]:
    """Returns `parse` for argparse: the message of a ValueError is shown as it is."""

    def parse_checked(text: str) -> Value:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse_checked


def names(text: str) -> tuple[str, ...]:
    """Parses `one,other`, for argparse."""
    parts = tuple(name.strip() for name in text.split(","))
    if not all(parts) or len(set(parts)) != len(parts):
        raise argparse.ArgumentTypeError(f"expected names with commas between, each once, got {text!r}")
    return parts


def host_and_port(text: str) -> tuple[str, int]:
    """Parses `9100` or `0.0.0.0:9100`. Raises ValueError."""
    host, _, port = text.rpartition(":")
    if not port.isdecimal() or len(port) > len(str(MAX_PORT)) or int(port) > MAX_PORT:
        raise ValueError(f"expected a port such as 9100 or 0.0.0.0:9100, got {text!r}")
    return host.strip("[]") or "127.0.0.1", int(port)


def counts_to(most: int) -> Callable[[str], tuple[int, ...]]:
    """Returns what parses `1,8,32`, for argparse: whole numbers from 1 to `most`, each once."""

    def parse(text: str) -> tuple[int, ...]:
        parts = names(text)
        if not all(part.isdecimal() and len(part) <= _MAX_DIGITS and 0 < int(part) <= most for part in parts):
            raise argparse.ArgumentTypeError(f"expected numbers from 1 to {most:,}, such as 1,8,32, got {text!r}")
        return tuple(dict.fromkeys(map(int, parts)))

    return parse


def count_to(most: int) -> Callable[[str], int]:
    """Returns what parses a whole number from 1 to `most`, for argparse."""

    def parse(text: str) -> int:
        if not text.isdecimal() or len(text) > _MAX_DIGITS or not 0 < int(text) <= most:
            raise argparse.ArgumentTypeError(f"expected a whole number from 1 to {most:,}, got {text!r}")
        return int(text)

    return parse


def folder(text: str) -> Path:
    """Parses the path of a folder that exists, for argparse."""
    path = Path(text)
    if not _answers(path.is_dir):
        raise argparse.ArgumentTypeError(f"expected a folder that exists, got {text!r}")
    return path


def folder_to_write(text: str) -> Path:
    """Parses the path of a folder that exists or can be made, for argparse."""
    path = Path(text)
    if _answers(lambda: path.exists() and not path.is_dir()):
        raise argparse.ArgumentTypeError(f"expected a folder, got {text!r}, which is a file")
    return path


def file(text: str) -> Path:
    """Parses the path of a file that exists, for argparse."""
    path = Path(text)
    if not _answers(path.is_file):
        raise argparse.ArgumentTypeError(f"expected a file that exists, got {text!r}")
    return path


def file_to_write(text: str) -> Path:
    """Parses the path of a file in a folder that exists, for argparse."""
    path = Path(text)
    is_possible = _answers(lambda: path.exists() or path.parent.is_dir())
    if not is_possible or _answers(path.is_dir):
        raise argparse.ArgumentTypeError(f"expected a file in a folder that exists, got {text!r}")
    return path


def _answers(question: Callable[[], bool]) -> bool:
    """Returns the answer to a question about a path; False where the system refuses the path, as one too long."""
    try:
        return question()
    except OSError:
        return False
