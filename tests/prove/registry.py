"""What a part of `python -m tests.prove` is, and the rows that it gives."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, TypeVar

import numpy as np

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Row:
    """A claim, and what was measured of it."""

    claim: str
    scenario: str
    limit: float
    is_least: bool
    """Whether `limit` is the least that is claimed; the most otherwise."""
    measured: float
    error: float
    """Standard error of `measured`; 0 where it is exact."""

    def passes(self, errors: float) -> bool:
        """Whether what was measured keeps to the claim, within so many standard errors."""
        excess = self.limit - self.measured if self.is_least else self.measured - self.limit
        return excess <= errors * self.error + 1e-12


def share(
    claim: str, scenario: str, hits: int, trials: int, *, at_least: float | None = None, at_most: float | None = None
) -> Row:
    """Returns a row about the share of `trials` that were `hits`, with its binomial error."""
    limit, is_least = (at_least, True) if at_least is not None else (at_most, False)
    assert limit is not None, "expected at_least or at_most"
    if not trials:
        return Row(claim, scenario, limit, is_least, math.nan, math.nan)
    measured = hits / trials
    # The error of the claimed share: the measured one has none where nothing or everything hit.
    return Row(claim, scenario, limit, is_least, measured, math.sqrt(limit * (1 - limit) / trials))


@dataclass(frozen=True, slots=True)
class Trials:
    """The random numbers of a part, and how much it may simulate."""

    random: np.random.Generator
    is_short: bool

    def number(self, of_long_form: int) -> int:
        """Returns how many runs to simulate."""
        return max(of_long_form // 40, 20) if self.is_short else of_long_form

    def some(self, *cases: T) -> tuple[T, ...]:
        """Returns all cases; in the short form the first and the last."""
        return cases if not self.is_short else tuple(dict.fromkeys((cases[0], cases[-1])))


@dataclass(frozen=True, slots=True)
class Part:
    """A part, by its name."""

    name: str
    run: Callable[[Trials], Iterator[Row]]

    @property
    def summary(self) -> str:
        """What it measures, in a line."""
        return (self.run.__doc__ or "").strip().splitlines()[0]

    def rows(self, *, seed: int, is_short: bool = False) -> list[Row]:
        """Simulates, and returns what was measured."""
        random = np.random.default_rng([seed, zlib.crc32(self.name.encode())])
        return list(self.run(Trials(random, is_short)))


PARTS: Final[dict[str, Part]] = {}


def part(run: Callable[[Trials], Iterator[Row]]) -> Callable[[Trials], Iterator[Row]]:
    """Registers a function as a part of its name."""
    name = run.__name__.replace("_", "-")
    PARTS[name] = Part(name, run)
    return run
