"""Which of several ways to run is the fastest, on a machine whose speed changes meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Final, TypeVar

ROUNDS: Final = 3
TRIAL_S: Final = 0.3

Candidate = TypeVar("Candidate")


def fastest(candidates: Sequence[Candidate], images_per_s: Callable[[Candidate], float]) -> Candidate:
    """Returns the candidate with the highest median of `images_per_s`, which is measured in rounds over all."""
    rounds = [[images_per_s(candidate) for candidate in candidates] for _ in range(ROUNDS)]
    medians = [median(rates) for rates in zip(*rounds, strict=True)]
    return candidates[medians.index(max(medians))]
