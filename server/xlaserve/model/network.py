"""What a source gives: a program and what has to be known to serve it."""

from __future__ import annotations

from dataclasses import dataclass

from xlaserve.engine.program import Program

Size = tuple[int | None, int | None]
"""Height and width of a model's input; None is a side that may be chosen."""


@dataclass(frozen=True)
class Network:
    """A model as its source gives it."""

    program: Program
    size: Size
    classes: int
    weights: str
    """As in `Model.weights`."""
    labels: tuple[str, ...] | None = None
    """The source's own names of the classes."""
