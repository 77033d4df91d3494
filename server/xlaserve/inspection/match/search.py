"""The search for settings that give the expected answers: the likely ones first, and no further once one does.

A few images tell most combinations apart. First every scale, colour and activation is tried with the most usual place
of the pixels, since these set answers far apart. Then each of them is tried with every place, those first that are near
or usual, or that tutorials have as a whole. What gives the expected answers for the few images is tried on all, and so
are the nearest few at the end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Final, Protocol

import numpy as np

from xlaserve.inspection.match.answers import EXACT, Rows
from xlaserve.inspection.match.choices import Changes, Choice, Part, combinations, is_possible, recipe_rank
from xlaserve.models.examples import Compared

FEW_IMAGES: Final = 4
NEAREST: Final = 5
"""Combinations that are compared on all images at the end."""


class Compares(Protocol):
    """Compares answers with the expected ones; `answers.Answers` does."""

    def compare(self, changes: Changes, rows: Rows) -> Compared:
        """Compares the answers with some settings to some images with the expected ones."""


_OTHER_ANSWER: Final = 3.0
"""Orders of magnitude that another likeliest class counts."""


@dataclass(frozen=True)
class Found:
    """A combination of settings, compared on all images."""

    changes: Changes
    compared: Compared
    is_exact: bool
    """Whether the answers are the expected ones, up to rounding."""


@dataclass(frozen=True)
class Result:
    """The end of a search."""

    nearest: Sequence[Found]
    """The nearest first; one that is exact ends the search, and is alone."""
    tried: int
    total: int
    """Combinations that were tried, and that there are."""
    undecided: dict[str, tuple[object, ...]] = field(default_factory=dict)
    """Settings for which other values are exact as well, and all that are."""


_ALIKE: Final = 0.15
"""Orders of magnitude up to which distances are alike: then the largest difference says which is nearer."""


def distance(compared: Compared) -> float:
    """Returns how far answers are from the expected ones, for comparison: by the order of magnitude, so that settings
    which are exact for most images are nearer than those which are a little off for all."""
    agreement = compared.difference.agreement
    orders = np.log10(np.clip(compared.apart, EXACT / 10, 10))
    return float(orders.mean()) + _OTHER_ANSWER * (0.0 if agreement is None else 1.0 - agreement)


def search(
    choices: tuple[Choice, ...],
    answers: Compares,
    images: int,
    *,
    few: Rows | None = None,
    exact: float = EXACT,
    timeout_s: float = float("inf"),
    on_tried: Callable[[int, int], object] = lambda tried, total: None,
    clock: Callable[[], float] = time.monotonic,
) -> Result:
    """Returns the nearest settings to what is expected; blocks.

    `few` are the images that tell most about the place of pixels, the first ones by default. Answers are exact up to a
    largest difference of `exact`. After `timeout_s` nothing more is tried. `on_tried` is called after each combination
    with how many there were, and are.
    """
    ends_at = clock() + timeout_s
    few = (tuple(range(images)) if few is None else few)[:FEW_IMAGES]
    return _Search(choices, answers, tuple(range(images)), few, exact, on_tried, lambda: clock() >= ends_at).run()


class _Search:
    def __init__(  # noqa: PLR0917 - for `search` alone
        self,
        choices: tuple[Choice, ...],
        answers: Compares,
        images: Rows,
        few: Rows,
        exact: float,
        on_tried: Callable[[int, int], object],
        is_late: Callable[[], bool],
    ) -> None:
        self._choices, self._answers, self._all, self._few = choices, answers, images, few
        self._exact_up_to, self._on_tried, self._is_late = exact, on_tried, is_late
        self._places = list(combinations(tuple(one for one in choices if one.part is Part.PLACE)))
        self._levels = list(combinations(tuple(one for one in choices if one.part is not Part.PLACE)))
        self._distances: list[tuple[float, Changes]] = []

    @property
    def _total(self) -> int:
        return len(self._places) * len(self._levels)

    def run(self) -> Result:
        usual, *other_places = self._places
        other_places.sort(key=recipe_rank)
        for levels in self._levels:
            if found := self._try({**levels, **usual}):
                return self._exact(found)
            if self._is_late():
                break
        rest = product(self._ranked(), enumerate(other_places, 2))
        for (_, levels), (_, places) in sorted(rest, key=lambda pair: pair[0][0] * pair[1][0]):
            if self._is_late():
                break
            if found := self._try({**levels, **places}):
                return self._exact(found)
        nearest = [changes for _, changes in sorted(self._distances, key=lambda pair: pair[0])[:NEAREST]]
        found_all = [self._found(changes) for changes in nearest]
        found_all.sort(key=lambda found: distance(found.compared))
        least = distance(found_all[0].compared)
        alike = [found for found in found_all if distance(found.compared) <= least + _ALIKE]
        alike.sort(key=lambda found: found.compared.difference.largest)
        return Result([*alike, *found_all[len(alike) :]], len(self._distances), self._total)

    def _ranked(self) -> list[tuple[int, Changes]]:
        """Returns the ranks of scales, colours and activations, by what is nearer or by what is more usual: with
        another place of the pixels than the notebook's, the nearest may be nearest by chance."""
        tried = zip((distance for distance, _ in self._distances), enumerate(self._levels, 1), strict=False)
        by_distance = enumerate(sorted(tried, key=lambda pair: pair[0]), 1)
        return [(min(nearness, usual), levels) for nearness, (_, (usual, levels)) in by_distance]

    def _try(self, changes: Changes) -> Found | None:
        """Returns a combination that is exact, for the few images and then for all."""
        compared = self._answers.compare(changes, self._few)
        self._distances.append((distance(compared), changes))
        self._on_tried(len(self._distances), self._total)
        if not self._is_exact(compared):
            return None
        found = self._found(changes)
        return found if found.is_exact else None

    def _found(self, changes: Changes) -> Found:
        compared = self._answers.compare(changes, self._all)
        return Found(changes, compared, self._is_exact(compared))

    def _is_exact(self, compared: Compared) -> bool:
        difference = compared.difference
        return difference.largest <= self._exact_up_to and difference.agreement in (None, 1.0)

    def _exact(self, found: Found) -> Result:
        also = ((choice.field, self._exact_values(found, choice)) for choice in self._choices)
        undecided = {name: values for name, values in also if len(values) > 1}
        return Result([found], len(self._distances), self._total, undecided)

    def _exact_values(self, found: Found, choice: Choice) -> tuple[object, ...]:
        """Returns the values of a setting with which the combination that was found is exact as well."""
        others = [{**found.changes, choice.field: value} for value in choice.values]
        return tuple(one[choice.field] for one in others if is_possible(one) and self._is_exact_for_all(one))

    def _is_exact_for_all(self, changes: Changes) -> bool:
        """Returns whether answers to few images, and then to all, are the expected ones."""
        return all(self._is_exact(self._answers.compare(changes, rows)) for rows in (self._few, self._all))
