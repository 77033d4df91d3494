"""How command lines are parsed. Imports nothing of the client, since reports must work without grpc."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import NoReturn, TypeVar

Value = TypeVar("Value")


class Parser(argparse.ArgumentParser):
    """Reports a wrong command line in one line."""

    def error(self, message: str) -> NoReturn:
        """Ends the process with status 2."""
        self.exit(2, f"{self.prog}: error: {message}; see {self.prog} --help\n")


def number_over(kind: Callable[[str], float], bound: float) -> Callable[[str], float]:
    """Returns what parses a finite number of a `kind` over `bound`, for argparse."""

    def parse(text: str) -> float:
        value = kind(text)
        if not bound < value < float("inf"):
            raise argparse.ArgumentTypeError(f"expected a number over {bound:g}, got {text}")
        return value

    parse.__name__ = "number"  # argparse names it where `kind` raises ValueError
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


def counts(text: str) -> tuple[int, ...]:
    """Parses `1,8,32`, for argparse: whole numbers above 0, each once."""
    parts = names(text)
    if not all(part.isdecimal() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(f"expected numbers such as 1,8,32, got {text!r}")
    return tuple(dict.fromkeys(map(int, parts)))
