"""Whether two programs find the same objects in an image."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Objects(NamedTuple):
    """What was found in one image, in any order."""

    boxes: NDArray[np.float32]
    """`[n, 4]`: left, top, right, bottom in pixels."""
    scores: NDArray[np.float32]
    classes: NDArray[np.int32]

    def within(self, side: int) -> Objects:
        """Returns them cut to a square image, without those of which nothing is left."""
        boxes = np.clip(self.boxes, 0, side)
        is_there = (boxes[:, 2:] > boxes[:, :2]).all(axis=1)
        return Objects(boxes[is_there], self.scores[is_there], self.classes[is_there])


def unlike(ours: Objects, theirs: Objects, *, pixels: float, score: float) -> list[str]:
    """Returns the objects of either that have no counterpart in the other: of the same class, its sides and its score
    no further away than `pixels` and `score`.
    """
    left = list(range(len(theirs.scores)))
    alone = []
    for box, probability, label in zip(*ours, strict=True):
        for place in left:
            if (
                label == theirs.classes[place]
                and abs(probability - theirs.scores[place]) <= score
                and np.abs(box - theirs.boxes[place]).max() <= pixels
            ):
                left.remove(place)
                break
        else:
            alone.append(f"ours alone: class {label}, {probability:.6f}, {box}")
    return alone + [
        f"theirs alone: class {theirs.classes[place]}, {theirs.scores[place]:.6f}, {theirs.boxes[place]}"
        for place in left
    ]
