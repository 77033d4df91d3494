"""The meaning of outputs: tasks, the roles of outputs in them, and the reading of one of several outputs."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field

from xlaserve.config.base import Frozen, Pairs

DEFAULT_THRESHOLD: Final = 0.5

BoxFormat = Literal["xyxy", "yxyx", "xywh", "center_xywh", "rel_xyxy", "rel_yxyx", "rel_xywh", "rel_center_xywh"]
"""How a box is written, as KerasCV names it."""

TaskName = Literal[
    "classification",
    "detection",
    "segmentation",
    "embedding",
    "regression",
    "sequence",
    "keypoints",
    "image",
    "tensors",
]

OutputRole = Literal["scores", "boxes", "classes", "count", "class_map", "embedding", "values", "keypoints", "image"]
"""Roles of outputs in a task; the names that the protocol shows."""

Activation = Literal["none", "softmax", "sigmoid"]
"""The function that the program applies to scores."""

KeypointFormat = Literal["xy", "yx", "rel_xy", "rel_yx"]
"""How a keypoint is written: in pixels, or with `rel_` relative to the image's size."""

Blank = Literal["first", "last", "none"]
"""The class of a sequence's steps that stands for no class."""

OutputRange = Literal["0..1", "-1..1", "0..255"]
"""The values of black and white in images that a model gives."""


def _in_quotes(value: Any) -> Any:
    # Not made text here: YAML has read 010 as 8, and 1:30 as 90.
    if isinstance(value, (list, tuple)) and any(isinstance(each, (int, float)) for each in value):
        raise ValueError('expected names in quotes, as in labels: ["0", "1"]')
    return value


ClassNames = Annotated[tuple[str, ...], BeforeValidator(_in_quotes)]
"""Names of classes."""


class OutputSettings(Frozen):
    """The reading of one output; each field as for a model of one output."""

    task: Literal["classification", "segmentation", "embedding", "regression", "sequence", "keypoints"]
    """The meaning of this output."""
    labels: ClassNames | None = None
    """The names of the classes."""
    classes: int | None = Field(None, ge=1)
    """For class maps of whole numbers: how many classes there are, if no labels say it."""
    activation: Activation | None = None
    """The function that the program applies to the scores."""
    threshold: float = Field(DEFAULT_THRESHOLD, gt=0, lt=1)
    """For one number of each image or pixel: from here on it is of the second class."""
    values: Pairs[str, str] = Field((), examples=[{"age": "years"}])
    """For regression: the names of the numbers, in their order, and their units."""
    blank: Blank | None = None
    """For sequences: the class that stands for none."""
    keypoint_format: KeypointFormat | None = None
    """For keypoints: what the numbers of each are."""
