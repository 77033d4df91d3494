"""How far outputs for the same images may be apart: between arms, and between a request under load and alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from xlaserve_loadtest.targets.target import Array

RELATIVE: Final = 0.01
"""Largest relative difference of a number. TensorFloat-32 on a GPU stays below, a wrong answer does not."""
OF_LARGEST: Final = 0.001
"""Allowed on top of RELATIVE, as a share of the largest number of an output: near 0 rounding may differ."""
DIFFERING_NAMES: Final = 0.001
"""Share of integers that may differ: rounding decides between two equally likely classes."""


def slacks_of(answers: Iterable[Sequence[Array]]) -> list[float]:
    """Returns the absolute difference that is allowed whatever the number, for each output of the reference.

    Outputs have their own, or scores next to boxes in pixels could be any.
    """
    return [
        0.0 if are_names(outputs[0]) else OF_LARGEST * max(map(_largest, outputs))
        for outputs in zip(*answers, strict=True)
    ]


def _largest(output: Array) -> float:
    return float(np.abs(output[np.isfinite(output)]).max(initial=0.0))


def are_alike(ours: Array, theirs: Array, slack: float) -> bool:
    """Whether an output is that of the reference, `theirs`, within the tolerance."""
    if not are_comparable(ours, theirs):
        return False
    if are_names(theirs):
        return not theirs.size or bool((ours != theirs).mean() <= DIFFERING_NAMES)
    return bool(within(ours, theirs, slack).all())


def within(ours: Array, theirs: Array, slack: float) -> NDArray[np.bool_]:
    """Returns which numbers are those of the reference: floating point within the tolerance, integers exactly.

    The shapes need only broadcast.
    """
    if are_names(theirs):
        return np.asarray(ours == theirs)
    return np.asarray(distances(ours, theirs) <= slack + RELATIVE * np.abs(theirs))


def differing_shares(ours: Sequence[Array], theirs: Sequence[Array], slacks: Sequence[float]) -> NDArray[np.float64]:
    """Returns for each image the share of numbers that are not those of the reference, in the output that differs most.

    1 where outputs can't be compared. Outputs without a common number of images count as one image.
    """
    if not all(map(are_comparable, ours, theirs)):
        return np.ones(1)
    counts = {output.shape[:1] for output in theirs}
    images = theirs[0].shape[0] if len(counts) == 1 and theirs[0].ndim else 1
    shares = [
        (~within(own, other, slack)).reshape(images, -1).mean(axis=1)
        for own, other, slack in zip(ours, theirs, slacks, strict=True)
        if other.size
    ]
    return np.asarray(np.max(shares, axis=0, initial=0.0))


def distances(ours: Array, theirs: Array) -> Array:
    """Returns the absolute difference of each number; none of equal infinities."""
    with np.errstate(invalid="ignore"):
        return np.where(ours == theirs, 0.0, np.abs(ours - theirs))


def are_comparable(ours: Array, theirs: Array) -> bool:
    """Whether both have the same shape and only numbers; minus infinity, the logarithm of 0, in the same places."""
    return (
        ours.shape == theirs.shape
        and bool((ours < np.inf).all() and (theirs < np.inf).all())
        and np.array_equal(ours == -np.inf, theirs == -np.inf)
    )


def are_names(output: Array) -> bool:
    """Whether an output has integers, such as the class of each pixel, which are the same or not."""
    return output.dtype.kind == "i"
