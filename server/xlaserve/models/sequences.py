"""Sequences of classes, such as the letters of a text, and their greedy decoding."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from xlaserve.config import Blank
from xlaserve.engine.program import Outputs, Value
from xlaserve.models.task_base import Category, TensorSpec, WithClasses


class Transcript(NamedTuple):
    """The sequence in an image."""

    text: str
    """The labels one after the other, or the indices with spaces between."""
    score: float
    """The product of the highest scores of all steps: the probability of the path of the likeliest classes."""
    categories: tuple[Category, ...]
    """The classes of the sequence, each with the highest score of its steps."""


@dataclass(frozen=True)
class ClassSequence(WithClasses):
    """`scores` FP32 `[n, steps, classes]`: a number for each class in each step, the greater the likelier.

    One of the classes may be the blank of Connectionist Temporal Classification (Graves et al. 2006), which stands for
    no class. `labels` have an empty name for it.
    """

    steps: int = field(kw_only=True)
    """-1 where they depend on the image's size."""
    blank: Blank = field(default="last", kw_only=True)

    name = "sequence"

    @cached_property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """`scores`, alone."""
        return (TensorSpec("scores", "FP32", (-1, self.steps, self.classes)),)

    @property
    def blank_index(self) -> int | None:
        """The index of the blank; None where there is none."""
        return {"first": 0, "last": self.classes - 1, "none": None}[self.blank]

    @property
    def label_count(self) -> int:
        """The number of names: one for each class but the blank."""
        return self.classes - (self.blank_index is not None)

    @property
    def labelled_classes(self) -> str:
        """The classes that have names, in words."""
        return "class" if self.blank_index is None else f"class but the {self.blank}, the blank"

    def labelled(self, labels: tuple[str, ...]) -> Self:
        """Returns the same task with names for all classes but the blank."""
        blank = self.blank_index
        return replace(self, labels=labels if blank is None else (*labels[:blank], "", *labels[blank:]))

    def agreement(self, wanted: Outputs, got: Outputs) -> float:
        """Returns the share of images whose sequence is the same."""
        pairs = zip(wanted[self.at], got[self.at], strict=True)
        return float(np.mean([np.array_equal(self._classes(ours), self._classes(theirs)) for ours, theirs in pairs]))

    def transcripts(self, outputs: Outputs) -> list[Transcript]:
        """Returns the sequence in each image, decoded greedily: the likeliest class of each step, of which repetitions
        are one and blanks are dropped."""
        return [self._transcript(scores) for scores in outputs[self.at]]

    def _transcript(self, scores: NDArray[Value]) -> Transcript:
        best, highest = scores.argmax(axis=1), scores.max(axis=1)
        starts = self._starts(best)
        indices, of_runs = best[starts], np.maximum.reduceat(highest, starts)
        pairs = zip(indices.tolist(), of_runs.tolist(), strict=True)
        found = [Category(index, self.label(index), score) for index, score in pairs if index != self.blank_index]
        text = ("" if self.labels else " ").join(category.label for category in found)
        return Transcript(text, float(np.prod(highest, dtype=np.float64)), tuple(found))

    def _classes(self, scores: NDArray[Value]) -> NDArray[np.intp]:
        """Returns the indices of an image's sequence by its `scores` `[steps, classes]`."""
        best = scores.argmax(axis=1)
        indices: NDArray[np.intp] = best[self._starts(best)]
        return indices if self.blank_index is None else indices[indices != self.blank_index]

    def _starts(self, best: NDArray[np.intp]) -> NDArray[np.intp]:
        """Returns the steps at which the likeliest class is another one than before; all steps without a blank."""
        if self.blank_index is None:
            return np.arange(len(best))
        starts: NDArray[np.intp] = np.flatnonzero(np.diff(best, prepend=-1))
        return starts
