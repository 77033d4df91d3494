"""Keypoints, such as joints or the corners of eyes."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from xlaserve.config import Fit
from xlaserve.engine.program import Outputs, Value
from xlaserve.models.task_base import TensorSpec, WithClasses


@dataclass(frozen=True)
class Keypoints(WithClasses):
    """`keypoints` FP32 `[n, classes, 2]`, x and y of each in pixels of the input, or `[n, classes, 3]` with its score.

    Each keypoint is a class of its own.
    """

    has_scores: bool = field(default=False, kw_only=True)
    are_peaks: bool = field(default=False, kw_only=True)
    """Whether they are the highest places of heatmaps. Between two places that almost tie, rounding may pick either."""

    name = "keypoints"
    default_fit = Fit.LETTERBOX

    @cached_property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """`keypoints`, alone."""
        return (TensorSpec("keypoints", "FP32", (-1, self.classes, 3 if self.has_scores else 2)),)

    @cached_property
    def reordered(self) -> frozenset[str]:  # type: ignore[override] # it depends on the outputs
        """The keypoints where they are peaks."""
        return frozenset({"keypoints"} if self.are_peaks else ())

    @property
    def least_alike(self) -> float:  # type: ignore[override] # it depends on the outputs
        """Below 1 for peaks."""
        return 0.75 if self.are_peaks else 1.0

    def comparable(self, outputs: Outputs) -> Outputs:
        """Returns the keypoints; of peaks the scores alone."""
        values = outputs[self.at]
        return (values[..., 2:] if self.are_peaks else values,)

    def agreement(self, wanted: Outputs, got: Outputs) -> float | None:
        """Returns the share of peaks that are at the same place; None where they are numbers of the model."""
        if not self.are_peaks:
            return None
        ours, theirs = (outputs[self.at][..., :2] for outputs in (wanted, got))
        return float(np.mean(np.all(ours == theirs, axis=-1)))

    def points(self, outputs: Outputs) -> list[NDArray[Value]]:
        """Returns the keypoints `[classes, 2 or 3]` of each image."""
        return list(outputs[self.at])

    def above(self, points: NDArray[Value], min_score: float) -> NDArray[np.intp]:
        """Returns which of an image's `points` have at least `min_score`: all of them where they have no scores."""
        return np.flatnonzero(points[:, 2] >= min_score) if self.has_scores else np.arange(len(points))
