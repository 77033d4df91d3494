"""Warnings of misspelt names of parameters, such as `topk`: they are ignored, and the answer warns of them."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from functools import lru_cache
from typing import Final

from xlaserve.telemetry import request_context

CLOSENESS: Final = 0.8
"""Least likeness of two names, as `difflib` has it."""
MAX_NAMES: Final = 16
"""Unknown names of a request that are looked at."""
MAX_LENGTH: Final = 24
"""Characters of a name, and a few more than the longest of ours."""
OTHERS: Final = frozenset({"model", "models"})
"""Names that clients of others send, though they are like one of ours."""


@lru_cache(maxsize=1024)
def meant(name: str, known: frozenset[str]) -> str:
    """Returns the one of the `known` names that an unknown one is close to; empty if there is none."""
    if name in OTHERS or len(name) > MAX_LENGTH:
        return ""
    return next(iter(get_close_matches(name.lower(), sorted(known), 1, CLOSENESS)), "")


def slip_in(names: Iterable[str], known: frozenset[str]) -> str:
    """Returns a warning of the first of the unknown `names` that is close to a known one; empty if none is."""
    for _, name in zip(range(MAX_NAMES), names, strict=False):
        if ours := meant(name, known):
            return f"{name!a} is no parameter and was ignored; {ours} is one"
    return ""


def warn(slip: str) -> None:
    """Adds a warning of `slip_in`, if it is not empty, to the answer of the current call."""
    if slip and (current := request_context.current()) is not None:
        current.warn(slip)
