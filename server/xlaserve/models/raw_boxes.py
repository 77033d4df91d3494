"""Outputs of detectors before suppression, told by their shapes, of models that are loaded and of files."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

Shape = Sequence[int | None] | None

BLAZEFACE: Final = {(896, 16), (896, 1)}
"""The outputs of MediaPipe's face detectors for short ranges: 896 anchors, with a box and six keypoints each."""
BINS: Final = 64
"""Numbers of a box in YOLOv8: 16 bins for each side."""
MIN_BOXES: Final = 400
"""Rows from which on they may be of anchors; fewer are of objects that are found already."""
COCO_CLASSES: Final = 80
SSD_MOBILENET: Final = 1917
"""Anchors of TensorFlow's Object Detection API for 300x300 pixels."""


class RawBoxes(NamedTuple):
    """The setting `box_decoding` that outputs suggest."""

    setting: str | Mapping[str, Any]
    comment: str = ""
    is_certain: bool = False
    """Whether no other model is known to have such outputs."""
    preprocess: str = ""
    """The setting of that name that its family has; empty where there is none."""
    output_names: Mapping[str, str] | None = None
    """The setting of that name, where shapes don't tell which output is which."""


def suggested(
    shapes: Mapping[str, Shape], size: tuple[int, int] | None = None, *, is_tflite: bool = False
) -> RawBoxes | None:
    """Returns how outputs of these shapes may be decoded; None where they don't look like boxes.

    `size` is the input's height and width, where they are known; `is_tflite` is whether the outputs are of a TFLite
    file.
    """
    rows = {name: sides for name, shape in shapes.items() if (sides := _rows(shape)) is not None}
    if len(rows) == len(shapes) == 2:
        return _of_two(rows, size)
    if len(rows) == 1:
        (sides,) = rows.values()
        return _of_one(sides, size, is_tflite=is_tflite)
    return None


def _rows(shape: Shape) -> tuple[int | None, int] | None:
    """Returns the sides of an output `[n, k, numbers]` or `[n, k, 1, numbers]`; None for other outputs."""
    match shape:
        case (_, None | int() as rows, int(numbers)) | (_, None | int() as rows, 1, int(numbers)):
            return rows, numbers
    return None


def _of_two(  # noqa: PLR0911 - one each
    rows: Mapping[str, tuple[int | None, int]], size: tuple[int, int] | None
) -> RawBoxes | None:
    (boxes, _), (others, _) = rows.values()
    if boxes != others or (boxes is not None and boxes < MIN_BOXES):
        return None
    if {*rows.values()} == BLAZEFACE:
        return RawBoxes("blazeface", "the outputs of MediaPipe's face detectors", is_certain=True, preprocess="tf")
    widths = {name: numbers for name, (_, numbers) in rows.items()}
    if BINS in widths.values():
        return RawBoxes("yolov8", "if these are its boxes before decoding")
    if not any(numbers in (4, 8) for numbers in widths.values()):
        return None
    names = None
    if [*widths.values()].count(4) != 1:
        longer, shorter = sorted(widths, key=lambda name: -widths[name])
        names = {"boxes": longer, "scores": shorter}
    if size is not None and boxes == 9 * _cells(size, (8, 16, 32, 64, 128)):
        return RawBoxes("retinanet", "if these are offsets from its anchors", output_names=names)
    if boxes == SSD_MOBILENET:
        return RawBoxes("ssd", "if these are offsets from anchors; with activation: sigmoid for logits")
    return RawBoxes(
        {"kind": "ssd", "strides": [8, 16, 32], "scales": [0.1, 0.2, 0.4, 0.8]},
        "or retinanet, if these are offsets from anchors: as in your training",
        output_names=names,
    )


def _of_one(sides: tuple[int | None, int], size: tuple[int, int] | None, *, is_tflite: bool) -> RawBoxes | None:
    boxes, numbers = max((side or 0 for side in sides), default=0), min(side or 0 for side in sides)
    if size is None or numbers < 5:
        return None
    cells, are_rows = _cells(size, (8, 16, 32)), sides[0] == boxes
    relative: dict[str, Any] = {"format": "rel_center_xywh"} if is_tflite else {}
    form = "; from 0 to 1, as Ultralytics writes TFLite; if in pixels, without format" if is_tflite else ""
    if boxes == cells and are_rows and numbers - 4 not in (1, COCO_CLASSES):
        other = "{kind: yolo, has_objectness: true}"
        return RawBoxes(
            "yolox",
            f"if these are offsets of YOLOX with {_classes(numbers - 5)}; if boxes, as of YOLOv6: {other}",
            preprocess="none",
        )
    if boxes == cells:
        setting = {"kind": "yolo", **relative} if relative else "yolo"
        return RawBoxes(setting, f"if these are boxes of YOLOv8 with {_classes(numbers - 4)}{form}")
    if boxes == 3 * cells and numbers > 5:
        setting = {"kind": "yolo", **relative, "has_objectness": True}
        return RawBoxes(setting, f"if these are boxes of YOLOv5 with {_classes(numbers - 5)}{form}")
    return None


def _classes(count: int) -> str:
    return "1 class" if count == 1 else f"{count} classes"


def _cells(size: tuple[int, int], strides: Sequence[int]) -> int:
    return sum(math.prod(math.ceil(side / stride) for side in size) for stride in strides)
