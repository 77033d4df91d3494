"""Lists whose items are in another order where their scores are equal: rounding decides which of these comes first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from xlaserve_loadtest.targets.target import Array
from xlaserve_loadtest.targets.tolerance import are_alike, are_names, differing_shares, within

MAX_MOVED: Final = 512
"""Items of an image that are put in order at most: each is compared with each."""


def are_all_alike(ours: Sequence[Array], theirs: Sequence[Array], slacks: Sequence[float], share: float = 0.0) -> bool:
    """Whether outputs are those of the reference, `theirs`, with items of equal score in any order.

    Of each image's numbers `share` may be beyond the tolerance.
    """
    if len(ours) != len(theirs):
        return False
    ordered = in_order(ours, theirs, slacks)
    return all(map(are_alike, ordered, theirs, slacks)) or bool(
        share and (differing_shares(ordered, theirs, slacks) <= share).all()
    )


def in_order(ours: Sequence[Array], theirs: Sequence[Array], slacks: Sequence[float]) -> Sequence[Array]:
    """Returns `ours` with items of equal score in the order of the reference, `theirs`, as far as both have the same.

    Items are what several outputs list best first, such as the boxes, scores and classes of a detector.
    """
    ranking = next((place for place, output in enumerate(theirs) if _is_ranking(output, slacks[place])), None)
    if ranking is None or [own.shape for own in ours] != [other.shape for other in theirs]:
        return ours
    scores = theirs[ranking]
    lists = [place for place, output in enumerate(theirs) if output.shape[:2] == scores.shape]
    if len(lists) == 1:
        return ours
    ordered = [output.copy() if place in lists else output for place, output in enumerate(ours)]
    for image in range(len(scores)):
        triples = [(ours[place][image], theirs[place][image], slacks[place]) for place in lists]
        moved = np.flatnonzero(~np.logical_and.reduce([_are_same(*triple) for triple in triples]))
        if not 1 < moved.size <= MAX_MOVED:
            continue
        tied = scores[image][moved]
        pairs = np.argwhere(within(tied[None, :], tied[:, None], slacks[ranking]))
        # Scores leave few pairs of answers that differ, of which then less is compared than of all.
        for own, other, slack in sorted(triples, key=lambda triple: triple[0].size):
            pairs = pairs[_are_same(own[moved[pairs[:, 1]]], other[moved[pairs[:, 0]]], slack)]
        order = moved[_assigned(pairs, moved.size)]
        for place in lists:
            ordered[place][image][moved] = ours[place][image][order]
    return ordered


def _is_ranking(output: Array, slack: float) -> bool:
    """Whether numbers never rise from one item of an image to the next, and fall somewhere: constants rank nothing."""
    if output.ndim != 2 or output.shape[1] < 2 or are_names(output):
        return False
    never_rise = (output[:, 1:] <= output[:, :-1]).all()
    return bool(never_rise and not within(output[:, -1], output[:, 0], slack).all())


def _are_same(ours: Array, theirs: Array, slack: float) -> NDArray[np.bool_]:
    """Returns which items are the same, all numbers of each."""
    same = within(ours, theirs, slack)
    return np.asarray(same.all(axis=(*range(1, same.ndim),)))


def _assigned(pairs: NDArray[np.intp], count: int) -> list[int]:
    """Returns one of our items for each of the reference's: the same where one is left, and then the others in turn.

    `pairs` `[n, 2]` are the reference's items and those of ours that are the same, in order.
    """
    left = dict.fromkeys(range(count))
    assigned: dict[int, int] = {}
    for item, own in pairs.tolist():
        if item not in assigned and own in left:
            assigned[item] = own
            del left[own]
    others = iter(left)
    return [assigned[item] if item in assigned else next(others) for item in range(count)]
