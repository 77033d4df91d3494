"""Differences between a program's outputs and the reference's: of floats, of classes, row by row."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from xlaserve.engine.program import Outputs

MAX_RELATIVE: Final = 0.1
MAX_RELATIVE_INT8: Final = 0.3
"""MAX_RELATIVE of int8, whose ranges are fitted to a user's images; the images of a sample are noise and patches."""
MIN_AGREEMENT: Final = 0.95


class Named(Protocol):
    """An output with a name."""

    @property
    def name(self) -> str:
        """The name."""


class Comparing(Protocol):
    """How a task's outputs are compared."""

    @property
    def outputs(self) -> Sequence[Named]:
        """The outputs."""

    @property
    def least_alike(self) -> float:
        """The share of images whose answers are alike wherever the same is computed, up to rounding."""

    @property
    def rounding(self) -> float:
        """The difference of two comparable numbers that rounding alone may make."""

    def comparable(self, outputs: Outputs) -> Outputs:
        """Returns the outputs that can be compared number by number."""

    def agreement(self, wanted: Outputs, got: Outputs) -> float | None:
        """Returns the share of answers that are the same, as far as the task has classes; else None."""


@dataclass(frozen=True, slots=True)
class Difference:
    """How far outputs are from the reference's."""

    largest: float
    """Largest difference of any float output, as a share of that output's largest number in the reference."""
    agreement: float | None
    """The share of answers that are the same: a classifier's top class, a segmenter's pixels."""
    images: int

    def is_large(self, most: float = MAX_RELATIVE) -> bool:
        """Returns whether it deserves a warning, where rounding may make the largest difference `most`."""
        agrees = self.agreement is None or self.agreement >= MIN_AGREEMENT
        return not agrees or not self.largest <= most

    @property
    def badness(self) -> tuple[float, float]:
        """A sort key, greater for a larger difference."""
        return self.largest, -(1.0 if self.agreement is None else self.agreement)

    def __str__(self) -> str:
        agreement = "" if self.agreement is None else f", agreement {self.agreement:.3f}"
        return f"largest difference {self.largest:.2g}{agreement} of {self.images} images"


def compare(wanted: Outputs, got: Outputs, task: Comparing) -> Difference:
    """Compares outputs with the right ones, row by row; rows of another shape are infinitely far."""
    if any(theirs.shape != ours.shape for theirs, ours in zip(wanted, got, strict=True)):
        return Difference(math.inf, None, len(wanted[0]))
    largest = 0.0
    for theirs, ours in zip(task.comparable(wanted), task.comparable(got), strict=True):
        if np.issubdtype(theirs.dtype, np.floating):
            largest = max(largest, relative(theirs, ours, task.rounding))
    return Difference(largest, task.agreement(wanted, got), len(wanted[0]))


def relative(wanted: NDArray[Any], got: NDArray[Any], rounding: float = 0.0) -> float:
    """Returns the largest difference of `got` from `wanted`, or from its one row, over the largest number of `wanted`.

    Differences count from `rounding` on. NaN, or an infinity, in one of them alone counts as infinitely far.
    """
    return float(np.max(_relative(wanted, got, rounding), initial=0.0))


def by_row(wanted: Outputs, got: Outputs, rounding: float = 0.0) -> NDArray[np.float64]:
    """Returns for each row how far it is from the right one; of several outputs, the largest difference.

    For floats this is `relative`, for integers the share of elements that differ, for rows of another shape infinity.
    """
    rows = np.zeros(len(wanted[0]))
    for theirs, ours in zip(wanted, got, strict=True):
        if theirs.shape != ours.shape:
            apart = np.full(len(rows), np.inf)
        elif np.issubdtype(theirs.dtype, np.floating):
            apart = _relative(theirs, ours, rounding).reshape(len(rows), -1).max(axis=1, initial=0.0)
        else:
            apart = np.mean((theirs != ours).reshape(len(rows), -1), axis=1)
        rows = np.maximum(rows, apart)
    return rows


def overall(wanted: Outputs, got: Outputs) -> float:
    """Returns how far outputs are from the right ones as a whole; of several, the largest.

    For floats, the root mean square of the differences over the standard deviation of the right numbers, or over half
    their root mean square where that is more: about 1 for answers that are all 0 or doubled, 1.4 for those of other
    images. Rounding makes little of it, even where single numbers are far off. For integers, the share that differ.
    """
    return max(map(_overall, wanted, got), default=0.0)


def _overall(wanted: NDArray[Any], got: NDArray[Any]) -> float:
    if wanted.shape != got.shape:
        return math.inf
    if not np.issubdtype(wanted.dtype, np.floating):
        return float(np.mean(wanted != got)) if wanted.size else 0.0
    known = np.isfinite(wanted) & np.isfinite(got)
    right, ours = wanted[known].astype(np.float64), got[known].astype(np.float64)
    if not right.size:
        return 0.0
    spread = max(float(np.std(right)), float(np.sqrt(np.mean(right**2))) / 2)
    return float(np.sqrt(np.mean((ours - right) ** 2))) / spread if spread else 0.0


def _relative(wanted: NDArray[Any], got: NDArray[Any], rounding: float) -> NDArray[np.float64]:
    largest = float(np.max(np.abs(wanted), initial=0.0, where=np.isfinite(wanted))) or 1.0
    same = (wanted == got) | (np.isnan(wanted) & np.isnan(got))
    with np.errstate(invalid="ignore", over="ignore"):
        beyond = np.maximum(np.abs(got.astype(np.float64) - wanted) - rounding, 0.0)
        apart = np.where(same, 0.0, beyond / largest)
    return np.where(np.isnan(apart), np.inf, apart)
