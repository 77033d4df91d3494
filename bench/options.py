"""What options of several benchmarks are parsed with."""

from __future__ import annotations


def numbers(text: str) -> tuple[int, ...]:
    """Returns the numbers of a list such as 1,32,128, in its order."""
    return tuple(map(int, text.split(",")))
