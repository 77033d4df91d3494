"""The part of a model's settings that is about its outputs: what they mean, and how they are read."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from xlaserve.config.base import Frozen, Pairs
from xlaserve.config.box_decoding_settings import BoxDecoding
from xlaserve.config.output_settings import (
    DEFAULT_THRESHOLD,
    Activation,
    Blank,
    BoxFormat,
    ClassNames,
    KeypointFormat,
    OutputRange,
    OutputRole,
    OutputSettings,
)


class AnswerSettings(Frozen):
    """The meaning of a model's outputs."""

    labels: ClassNames | Path | None = Field(None, examples=[["cat", "dog"]])
    """The names of the classes: a list, or a text file with one a line."""
    activation: Activation | None = None
    """For files and SavedModels: the function that the program applies to scores, `softmax` or `sigmoid` to logits.
    With `none` they are what the model gives; so they are by default, with a warning if they are no probabilities."""
    threshold: float = Field(DEFAULT_THRESHOLD, gt=0, lt=1)
    """For files and SavedModels whose output is one number of each image, or of each pixel: from here on it is of the
    second of two classes."""
    values: Pairs[str, str] = Field((), examples=[{"age": "years"}])
    """For regression: the names of the numbers, in their order, and their units, which metadata show. A unit may be
    empty."""
    blank: Blank | None = None
    """For `task: sequence`: the class that stands for no class (CTC), `last` by default or `first`; `labels` leave it
    out. Steps of one class in a row are one, and blanks are dropped. With `none` there is no blank, and each step
    counts."""
    keypoint_format: KeypointFormat | None = None
    """For `task: keypoints`: what the first two numbers of each keypoint are; `xy`, in pixels of the input, by default.
    `rel_` is relative to the input's size. Heatmaps need none."""
    output_range: OutputRange | None = None
    """For `task: image`: the values of black and white in the model's output, `0..1` by default, `-1..1` or `0..255`.
    Whole numbers are from 0 to 255 always. Answers are levels from 0 to 255, rounded and clipped."""
    outputs: Pairs[str, OutputSettings] = Field(
        (), examples=[{"age": {"task": "regression"}, "sex": {"task": "classification", "labels": ["female", "male"]}}]
    )
    """For files and SavedModels with several outputs: how to read each, by the model's own name of it. Clients get all
    outputs, those that are not read as they are; a method such as Classify answers from the only one of its task."""
    max_detections: int = Field(100, ge=1, le=1000)
    """For detection: the most objects of an image."""
    score_threshold: float = Field(0.2, ge=0, lt=1)
    """For detection: only objects with a score above this are answered."""
    iou_threshold: float = Field(0.5, gt=0, le=1)
    """For detection: of two boxes whose intersection over union is above this, the one with the lower score goes."""
    bounding_box_format: BoxFormat = "xyxy"
    """For detectors from files and SavedModels: what their boxes are. `rel_` is relative to the image's size, the
    others are in pixels."""
    box_decoding: BoxDecoding | None = Field(None, examples=["yolo", {"kind": "ssd", "order": "xywh"}])
    """For detectors from files and SavedModels that give all boxes before suppression, relative to anchors or as
    distributions: how the program decodes them, in place of `bounding_box_format`."""
    output_names: Pairs[OutputRole, str] = Field((), examples=[{"scores": "logits"}])
    """For files and SavedModels with several outputs: the model's own name for `scores`, `class_map`, `embedding`,
    `values`, `keypoints`, `image`, or a detector's `boxes`, `scores`, `classes` and `count`."""
