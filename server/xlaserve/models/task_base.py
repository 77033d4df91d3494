"""Parts that all tasks share: descriptions of outputs, defaults, and classes with their names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Final, Literal, NamedTuple, Self

import numpy as np

from xlaserve.config import Fit, TaskName
from xlaserve.engine.program import Outputs

Datatype = Literal["FP32", "FP64", "INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16", "UINT32", "UINT64", "BOOL"]
"""A type of outputs, as the Open Inference Protocol spells it."""
DATATYPES: Final[Mapping[np.dtype[Any], Datatype]] = {
    np.dtype(np.float32): "FP32",
    np.dtype(np.float64): "FP64",
    np.dtype(np.int8): "INT8",
    np.dtype(np.int16): "INT16",
    np.dtype(np.int32): "INT32",
    np.dtype(np.int64): "INT64",
    np.dtype(np.uint8): "UINT8",
    np.dtype(np.uint16): "UINT16",
    np.dtype(np.uint32): "UINT32",
    np.dtype(np.uint64): "UINT64",
    np.dtype(np.bool_): "BOOL",
}
"""The protocol's data types, by NumPy's."""
UINT8_CLASSES = 256
"""The most classes that a class map of bytes can tell apart."""


class TensorSpec(NamedTuple):
    """An output as metadata shows it."""

    name: str
    datatype: Datatype
    shape: tuple[int, ...]
    """-1 is the batch, or a side that depends on the input's."""

    @property
    def is_float(self) -> bool:
        """Whether its numbers are floats, which programs compute up to rounding."""
        return self.datatype.startswith("FP")


@dataclass(frozen=True, slots=True)
class Category:
    """One class and what the model gives for it."""

    index: int
    label: str
    score: float


class BaseTask:
    """Defaults that most tasks share."""

    name: ClassVar[TaskName]
    default_fit: ClassVar[Fit] = Fit.RESIZE
    """The fit of encoded images to the model's size, where the settings name none."""
    reordered: ClassVar[frozenset[str]] = frozenset()
    """Outputs that can't be compared number by number, as the smallest difference of a score changes their order."""
    least_alike: ClassVar[float] = 1.0
    rounding: ClassVar[float] = 0.0
    """The difference of two numbers that rounding alone may make, however close they were before."""

    def comparable(self, outputs: Outputs) -> Outputs:
        """Returns the outputs that can be compared number by number."""
        return outputs

    def agreement(self, wanted: Outputs, got: Outputs) -> float | None:
        """Returns the share of answers that are the same; None where none can be expected to be."""
        return None


@dataclass(frozen=True)
class WithClasses(BaseTask):
    """A task with classes, and perhaps as many names for them."""

    classes: int
    labels: tuple[str, ...] | None = None
    at: int = field(default=0, kw_only=True)
    """The place of the output among the model's outputs; 0 for a task of its own."""

    def label(self, index: int) -> str:
        """Returns the name of a class, or its index as text where it has no label."""
        # A user's model may give class indices beyond the configured number of classes.
        if self.labels is None or not 0 <= index < self.classes:
            return str(index)
        return self.labels[index]

    @property
    def label_count(self) -> int:
        """The number of names that `labelled` takes."""
        return self.classes

    @property
    def labelled_classes(self) -> str:
        """The classes that have names, in words."""
        return "class"

    def labelled(self, labels: tuple[str, ...]) -> Self:
        """Returns the same task with names for its classes."""
        return replace(self, labels=labels)
