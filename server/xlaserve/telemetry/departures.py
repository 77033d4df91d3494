"""The series of versions that have left: kept for a while, that their last counts are seen, and then forgotten."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Final

KEPT_S: Final = 15 * 60.0
"""How long series are kept: far longer than servers of metrics take from one look to the next."""
MAX_KEPT: Final = 32
"""Versions, of all models, whose series are kept so; of more, those that left first are forgotten."""

Key = tuple[str, str]
"""The name of a model and the number of a version."""


class Departures:
    """Calls `forget` for each version that has left and does not come back. `clock` counts seconds."""

    def __init__(self, forget: Callable[[str, str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._forget = forget
        self._clock = clock
        self._there: set[Key] = set()
        self._left: dict[Key, float] = {}
        """When each left, the first to leave first."""

    def see(self, there: Iterable[Key]) -> None:
        """Notes which versions there are."""
        now, before, self._there = self._clock(), self._there, {*there}
        self._left.update(dict.fromkeys(sorted(before - self._there), now))
        for key in self._there & self._left.keys():
            del self._left[key]
        while self._left:
            first = next(iter(self._left))
            if len(self._left) <= MAX_KEPT and now - self._left[first] < KEPT_S:
                break
            del self._left[first]
            self._forget(*first)
