"""What a model's outputs mean."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class TensorSpec(NamedTuple):
    """An output as metadata shows it."""

    name: str
    datatype: str
    """As the Open Inference Protocol spells it."""
    shape: tuple[int, ...]
    """-1 is the batch."""


@dataclass(frozen=True, slots=True)
class Category:
    """One class and what the model gives for it."""

    index: int
    label: str
    score: float


@dataclass(frozen=True)
class Classification:
    """One output, `scores` `[n, classes]`: a number for each class, the greater the likelier."""

    classes: int
    labels: tuple[str, ...] | None = None

    name = "classification"

    def __post_init__(self) -> None:
        if self.labels is not None and len(self.labels) != self.classes:
            raise ValueError(f"labels: expected {self.classes}, one for each class, got {len(self.labels)}")

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """The outputs, in the order in which the program gives them."""
        return (TensorSpec("scores", "FP32", (-1, self.classes)),)

    def label(self, index: int) -> str:
        """Returns the name of a class, or its index as text where there are no labels."""
        return str(index) if self.labels is None else self.labels[index]

    def top(self, scores: NDArray[np.float32], k: int) -> list[list[Category]]:
        """Returns for each row of `scores` `[n, classes]` its `k` likeliest classes, the likeliest first.

        `k` beyond the number of classes gives all of them. Equal scores go by index.
        """
        order = np.argsort(-scores, axis=1, kind="stable")[:, : max(k, 0)]
        return [
            [Category(int(index), self.label(int(index)), float(row[index])) for index in best]
            for row, best in zip(scores, order, strict=True)
        ]
