"""Ways to run that take turns, on a machine whose speed changes meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Final, TypeVar

ROUNDS: Final = 3
TRIAL_S: Final = 0.3

Candidate = TypeVar("Candidate")
Result = TypeVar("Result")


def fastest(candidates: Sequence[Candidate], images_per_s: Callable[[Candidate], float]) -> Candidate:
    """Returns the candidate with the highest median of `images_per_s`, which is measured in rounds over all."""
    rounds = [[images_per_s(candidate) for candidate in candidates] for _ in range(ROUNDS)]
    medians = [median(rates) for rates in zip(*rounds, strict=True)]
    return candidates[medians.index(max(medians))]


def interleaved(arms: Mapping[str, Callable[[], Result]], blocks: int) -> dict[str, list[Result]]:
    """Runs every arm once in each block, forwards and backwards in turn, and returns the results of each."""
    results: dict[str, list[Result]] = {name: [] for name in arms}
    for block in range(blocks):
        for name in list(arms)[:: 1 if block % 2 == 0 else -1]:
            results[name].append(arms[name]())
    return results
