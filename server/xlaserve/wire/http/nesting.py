"""The shape of an array in JSON, found while its commas pass by."""

from __future__ import annotations

from itertools import pairwise
from typing import Final, NoReturn

import numpy as np
from numpy.typing import NDArray

from xlaserve.errors import InvalidArgument

MAX_DIMENSIONS: Final = 32


class Nesting:
    """Finds the shape of an array while its commas pass by."""

    def __init__(self, depth: int) -> None:
        if depth > MAX_DIMENSIONS:
            raise InvalidArgument("body", f"arrays of at most {MAX_DIMENSIONS} dimensions", f"{depth}")
        self._depth = depth
        self._commas = 0
        self._sizes = [1] + [0] * (depth - 1)
        """How many numbers a list has at each level, from the inside; 0 while none has ended."""

    def add(self, levels: NDArray[np.int64], depths: NDArray[np.int64]) -> None:
        """Takes the depths of some numbers and commas. Raises InvalidArgument where lists differ in length."""
        first, self._commas = self._commas, self._commas + len(depths)
        counts = np.arange(first + 1, self._commas + 1)
        is_right = bool((levels == self._depth).all())
        for level in range(1, self._depth):
            ends_list = depths <= self._depth - level
            depths, counts = depths[ends_list], counts[ends_list]
            size = self._sizes[level] = self._sizes[level] or (int(counts[0]) if len(counts) else 0)
            if not size:
                break
            is_right &= np.array_equal(counts, np.arange(first - first % size + size, self._commas + 1, size))
        if not is_right:
            _refuse_ragged()

    def shape(self) -> tuple[int, ...]:
        """Returns the lengths of the lists, the outermost first. Raises InvalidArgument where the last is shorter."""
        total = self._commas + 1
        sizes = [*(size or total for size in self._sizes), total]
        if any(outer % inner for inner, outer in pairwise(sizes)):
            _refuse_ragged()
        return tuple(outer // inner for inner, outer in pairwise(sizes))[::-1]


def _refuse_ragged() -> NoReturn:
    raise InvalidArgument("body", "lists of numbers that have one length at each level", "others")
