"""Tasks, the meaning of a model's outputs: a type for each, which describes the outputs and makes answers of them.

Every output's first dimension is the batch. The methods take a program's outputs as the pipeline gives them, in the
order of `outputs`, one row for each image.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from xlaserve.config import Color, Fit
from xlaserve.engine.program import Outputs, Value
from xlaserve.models.keypoints import Keypoints
from xlaserve.models.sequences import ClassSequence
from xlaserve.models.task_base import (
    DATATYPES,
    UINT8_CLASSES,
    BaseTask,
    Category,
    Datatype,
    TensorSpec,
    WithClasses,
)

__all__ = [
    "DATATYPES",
    "Category",
    "ClassSequence",
    "Classification",
    "Datatype",
    "Detection",
    "Embedding",
    "ImageToImage",
    "Keypoints",
    "Objects",
    "Reading",
    "Regression",
    "Segmentation",
    "Task",
    "TaskT",
    "TensorSpec",
    "Tensors",
    "WithClasses",
    "best",
    "classification_at",
    "reading_of",
    "readings_of",
]


class Objects(NamedTuple):
    """The objects in an image, the highest score first."""

    boxes: NDArray[Value]
    """`[k, 4]`: left, top, right, bottom, in pixels of the model's input, and within it."""
    classes: NDArray[Value]
    """Class indices, `[k]`."""
    scores: NDArray[Value]
    """The scores, `[k]`."""


@dataclass(frozen=True)
class Classification(WithClasses):
    """`scores` FP32 `[n, classes]`: a number for each class, the greater the likelier."""

    threshold: float | None = field(default=None, kw_only=True)
    """Of two classes: the least score of the second with which it is the likelier; None where the greater score is."""

    name = "classification"

    @cached_property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """`scores`, alone."""
        return (TensorSpec("scores", "FP32", (-1, self.classes)),)

    def agreement(self, wanted: Outputs, got: Outputs) -> float:
        """Returns the share of images whose likeliest class is the same."""
        return float(np.mean(self._likeliest(wanted) == self._likeliest(got)))

    def _likeliest(self, outputs: Outputs) -> NDArray[Any]:
        scores = outputs[self.at]
        return scores.argmax(axis=1) if self.threshold is None else scores[:, 1] >= self.threshold

    def best(self, scores: NDArray[Value], k: int) -> NDArray[np.intp]:
        """Returns the indices of the `k` likeliest classes by `scores` `[classes]`, the likeliest first."""
        if self.threshold is None:
            return best(scores, k)
        return np.array((1, 0) if scores[1] >= self.threshold else (0, 1), np.intp)[: max(k, 0)]

    def top(self, outputs: Outputs, k: int) -> list[list[Category]]:
        """Returns for each image its `k` likeliest classes, the likeliest first.

        `k` beyond the number of classes gives all of them. Equal scores go by index.
        """
        scores = outputs[self.at]
        tops = [self.best(row, k) for row in scores]
        return [
            [Category(i, self.label(i), s) for i, s in zip(top.tolist(), row[top].tolist(), strict=True)]
            for row, top in zip(scores, tops, strict=True)
        ]


@dataclass(frozen=True)
class Detection(WithClasses):
    """The objects of each image after non-maximum suppression, the highest score first.

    `boxes` FP32 `[n, max_detections, 4]`, left, top, right and bottom in pixels of the input and within it; `scores`
    FP32 and `classes` INT32 `[n, max_detections]`; `count` INT32 `[n]`, how many of them are objects. The rest is
    padding: boxes and scores of 0, class -1.
    """

    max_detections: int = field(kw_only=True)

    name = "detection"
    default_fit = Fit.LETTERBOX
    reordered = frozenset({"boxes"})
    least_alike = 0.75
    """Below 1: between two objects that almost tie, rounding may pick either."""

    @cached_property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """`boxes`, `scores`, `classes` and `count`."""
        return (
            TensorSpec("boxes", "FP32", (-1, self.max_detections, 4)),
            TensorSpec("scores", "FP32", (-1, self.max_detections)),
            TensorSpec("classes", "INT32", (-1, self.max_detections)),
            TensorSpec("count", "INT32", (-1,)),
        )

    def comparable(self, outputs: Outputs) -> Outputs:
        """Returns the scores alone: the order of the boxes changes with the smallest difference of a score."""
        return (outputs[1],)

    def objects(self, outputs: Outputs, min_score: float = 0.0) -> list[Objects]:
        """Returns for each image its objects with at least `min_score`."""
        found = []
        for boxes, scores, classes, count in zip(*outputs, strict=True):
            kept = np.flatnonzero(scores[:count] >= min_score)
            found.append(Objects(boxes[kept], classes[kept], scores[kept]))
        return found


@dataclass(frozen=True)
class Segmentation(WithClasses):
    """`class_map` `[n, height, width]` of the input's size: each pixel's likeliest class.

    UINT8, or INT32 where there are more classes than a byte holds.
    """

    name = "segmentation"
    default_fit = Fit.LETTERBOX

    @cached_property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """`class_map`, alone."""
        return (TensorSpec("class_map", "UINT8" if self.classes <= UINT8_CLASSES else "INT32", (-1, -1, -1)),)

    def agreement(self, wanted: Outputs, got: Outputs) -> float:
        """Returns the share of pixels whose class is the same."""
        return float(np.mean(wanted[self.at] == got[self.at]))

    def map_of(self, outputs: Outputs) -> NDArray[Any]:
        """Returns the class map `[height, width]` of the only image of `outputs`."""
        (class_map,) = outputs[self.at]
        return np.asarray(class_map)


@dataclass(frozen=True)
class Embedding(BaseTask):
    """`embedding` FP32 `[n, dimensions]`: a vector for each image, as the network gives it."""

    dimensions: int
    at: int = field(default=0, kw_only=True)
    """The place of the output among the model's outputs."""

    name = "embedding"

    @cached_property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """`embedding`, alone."""
        return (TensorSpec("embedding", "FP32", (-1, self.dimensions)),)


@dataclass(frozen=True)
class Regression(BaseTask):
    """`values` FP32 `[n, count]`: numbers for each image, such as an age."""

    count: int
    values: tuple[tuple[str, str], ...] = ()
    """The name and the unit of each; empty where they have none."""
    at: int = field(default=0, kw_only=True)
    """The place of the output among the model's outputs."""

    name = "regression"

    @cached_property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """`values`, alone."""
        return (TensorSpec("values", "FP32", (-1, self.count)),)

    @property
    def text(self) -> str:
        """The names and units in words: `age in years, height in cm`."""
        return ", ".join(f"{name} in {unit}" if unit else name for name, unit in self.values)


@dataclass(frozen=True)
class ImageToImage(BaseTask):
    """`image` UINT8 `[n, height, width, channels]`: an image made of each image, in levels from 0 to 255."""

    color: Color
    """The meaning of the channels."""
    size: tuple[int, int] = (-1, -1)
    """Height and width; -1 where they depend on the input's."""

    name = "image"
    default_fit = Fit.LETTERBOX
    rounding = 1.0

    @cached_property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """`image`, alone."""
        return (TensorSpec("image", "UINT8", (-1, *self.size, self.color.channels)),)

    def comparable(self, outputs: Outputs) -> Outputs:
        """Returns the levels as floats: how far apart they are matters, not how many differ."""
        return (outputs[0].astype(np.float32),)


Reading = Classification | Segmentation | Embedding | Regression | ClassSequence | Keypoints
"""The task of one output."""


@dataclass(frozen=True)
class Tensors(BaseTask):
    """The model's own outputs, `[n, ...]` of any rank and type, by the names that it gives them.

    Some of them may have readings; the others are read by the client alone.
    """

    outputs: tuple[TensorSpec, ...]
    readings: tuple[Reading, ...] = ()
    """The readings of outputs, each with its place among them."""

    name = "tensors"

    @cached_property
    def least_alike(self) -> float:  # type: ignore[override] # it depends on the outputs
        """1 with floats; below without: rounding may change any integer, such as the index of one of two classes that
        almost tie."""
        return 1.0 if any(output.is_float for output in self.outputs) else 0.75

    def comparable(self, outputs: Outputs) -> Outputs:
        """Returns the floats, of keypoints what they say is comparable; all outputs where none are floats."""
        own = {one.at: one.comparable(outputs)[0] for one in self.readings if isinstance(one, Keypoints)}
        floats = tuple(own.get(place, values) for place, values in enumerate(outputs) if values.dtype.kind == "f")
        return floats or outputs

    def agreement(self, wanted: Outputs, got: Outputs) -> float | None:
        """Returns the share of integers, truth values and likeliest classes that are the same, in the output where it
        is the smallest; None where there are none."""
        found = [each for reading in self.readings if (each := reading.agreement(wanted, got)) is not None]
        pairs = [pair for pair in zip(wanted, got, strict=True) if pair[0].dtype.kind != "f"]
        found += [float(np.mean(theirs == ours)) for theirs, ours in pairs]
        return min(found, default=None)


def best(scores: NDArray[Value], k: int) -> NDArray[np.intp]:
    """Returns where the `k` largest of `scores` `[classes]` are, the largest first; equal ones by index, NaN last."""
    negated = np.negative(scores)
    candidates = np.arange(len(scores))
    if 0 < k < len(scores) // 4:
        below = np.flatnonzero(negated <= np.partition(negated, k - 1)[k - 1])
        if len(below) >= k:  # fewer where one of them is NaN
            candidates = below
    return candidates[np.argsort(negated[candidates], kind="stable")[: max(k, 0)]]


Task = (
    Classification
    | Detection
    | Segmentation
    | Embedding
    | Regression
    | ClassSequence
    | Keypoints
    | ImageToImage
    | Tensors
)

TaskT = TypeVar(
    "TaskT",
    Classification,
    Detection,
    Segmentation,
    Embedding,
    Regression,
    ClassSequence,
    Keypoints,
    ImageToImage,
)


def reading_of(task: Task, kind: type[TaskT]) -> TaskT:
    """Returns `task` where it is of this kind, or the reading of this kind among its outputs.

    Raises LookupError where there is none, or more than one.
    """
    if isinstance(task, kind):
        return task
    found = [reading for reading in readings_of(task) if isinstance(reading, kind)]
    if len(found) != 1:
        raise LookupError(f"{len(found)} outputs for {kind.name}")
    only: Any = found[0]
    return cast(TaskT, only)


def readings_of(task: Task) -> tuple[Reading, ...]:
    """Returns the readings of single outputs of a task of several."""
    return task.readings if isinstance(task, Tensors) else ()


def gives_pixels(task: Task) -> bool:
    """Returns whether an answer has the image's own pixels, none of which may be left out."""
    return any(isinstance(one, ImageToImage | Segmentation) for one in (task, *readings_of(task)))


def classification_at(task: Task, place: int) -> Classification | None:
    """Returns the classification whose scores are the output at a place; None where that is read in another way."""
    found = (task, *readings_of(task))
    return next((one for one in found if isinstance(one, Classification) and one.at == place), None)
