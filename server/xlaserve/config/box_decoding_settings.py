"""The decoding of boxes that a detector gives before suppression, relative to anchors or otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, Literal, Self

from pydantic import Field, model_validator

from xlaserve.config.base import Frozen
from xlaserve.config.output_settings import BoxFormat

BoxKind = Literal["ssd", "retinanet", "blazeface", "yolov8", "yolo", "yolox"]


class BoxDecoding(Frozen):
    """The form of a detector's outputs before suppression. The kind alone stands for a mapping with its defaults."""

    kind: BoxKind
    """The family. `ssd` and `retinanet` give offsets from anchors, and a score of each class. `blazeface` (MediaPipe)
    gives places from the centres of cells, and one score. `yolov8` gives each side's distribution over bins, with the
    scores behind or as another output. `yolo` is one output of boxes that are decoded, `[n, 4 + classes, k]` or
    `[n, k, 4 + classes]`, as Ultralytics exports them without suppression. `yolox` is one output `[n, k, 5 + classes]`
    whose boxes are offsets from cells, as YOLOX exports them by default."""
    anchors: Path | None = None
    """For `ssd` and `retinanet`: a `.npy` file with the anchors `[k, 4]`, instead of those that the fields below
    describe."""
    anchor_format: BoxFormat = "rel_center_xywh"
    """The form of the anchors in the file."""
    strides: tuple[int, ...] = Field((), examples=[[8, 16, 32]])
    """Pixels of the input for each cell of the feature maps, in their order. By default `[16, 32, 64, 128, 256, 512]`
    for `ssd`, `[8, 16, 32, 64, 128]` for `retinanet`, `[8, 16, 32]` for `yolov8` and `yolox`. For `blazeface` one for
    each layer, by default a 16th of the input's height and three times an 8th."""
    anchors_per_layer: Literal[1, 2] = 2
    """For `blazeface`: how many anchors each layer has in a cell; 1 for MediaPipe's full range."""
    scales: tuple[float, ...] = Field((), examples=[[0.2, 0.5, 0.95, 1.0]])
    """The sizes of anchors. For `ssd` shares of the input's shorter side, one for each stride and one more; by default
    from 0.2 to 0.95, and 1. For `retinanet` multiples of the stride; by default 4, 5.04 and 6.35."""
    aspect_ratios: tuple[float, ...] = Field((), examples=[[1.0, 2.0, 0.5]])
    """Width over height of the anchors, in their order. By default `[1, 2, 0.5, 3, 0.3333]` for `ssd`, where one more
    square lies between two scales, and `[0.5, 1, 2]` for `retinanet`."""
    scales_first: bool = False
    """For `retinanet`: whether the anchors of a cell stand by scales, each with all aspect ratios, as in KerasCV;
    otherwise by aspect ratios, each with all scales."""
    clip_anchors: bool = False
    """For `ssd` and `retinanet`: whether anchors are cut to the input before offsets are applied, as in KerasCV."""
    reduce_first_layer: bool = True
    """For `ssd`: whether the first feature map has only three anchors in each cell, the first of a scale of 0.1."""
    offset: float = Field(0.5, ge=0, le=1)
    """The anchors' centres within their cells, as a share of the cell."""
    variances: tuple[float, float, float, float] = (0.1, 0.1, 0.2, 0.2)
    """Factors of the offsets of x, y, width and height. Scale factors of TensorFlow's Object Detection API are their
    reciprocals: `[10, 10, 5, 5]` is `[0.1, 0.1, 0.2, 0.2]`."""
    order: Literal["xywh", "yxhw"] | None = None
    """The order of the offsets: `yxhw` by default for `ssd`, as in TensorFlow's Object Detection API, else `xywh`."""
    background: Literal["first", "last", "none"] | None = None
    """The score of no object, which is no class of the answers: `first` by default for `ssd`, else `none`. If the first
    of the labels is `background`, it stays a class, of which no object is."""
    bins: int = Field(16, ge=2)
    """For `yolov8`: how many bins there are for each side."""
    format: BoxFormat = "center_xywh"
    """For `yolo`: what the boxes are; `rel_center_xywh` in TFLite files of Ultralytics."""
    has_objectness: bool = False
    """For `yolo`: whether the fifth number is the score of any object, by which those of classes are multiplied, as in
    YOLOv5. That of `yolox` always is."""

    @property
    def gives_objectness(self) -> bool:
        """Whether the fifth number of each box is the score of any object."""
        return self.has_objectness or self.kind == "yolox"

    @model_validator(mode="before")
    @classmethod
    def _take_kind(cls, value: Any) -> Any:
        return {"kind": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _check_fields(self) -> Self:
        fields = type(self).model_fields
        others = fields.keys() - _FIELDS[self.kind] - {"kind"}
        if wrong := [name for name in fields if name in others and getattr(self, name) != fields[name].default]:
            taken = ", ".join(sorted(_FIELDS[self.kind]))
            raise ValueError(f"expected fields of {self.kind} ({taken}), got {', '.join(wrong)}")
        if any(stride < 1 for stride in self.strides):
            raise ValueError("strides: expected at least 1")
        if any(number <= 0 for number in (*self.scales, *self.aspect_ratios, *self.variances)):
            raise ValueError("scales, aspect_ratios, variances: expected more than 0")
        if self.kind == "ssd" and self.scales and len(self.scales) != len(self.strides or SSD_STRIDES) + 1:
            raise ValueError(
                f"scales: expected one for each of {len(self.strides or SSD_STRIDES)} strides and one more,"
                f" got {len(self.scales)}"
            )
        return self


SSD_STRIDES: Final = (16, 32, 64, 128, 256, 512)

_ANCHORED: Final = frozenset({"strides", "offset", "order", "background"})
_GENERATED: Final = _ANCHORED | {"anchors", "anchor_format", "scales", "aspect_ratios", "variances", "clip_anchors"}
_FIELDS: Final[dict[BoxKind, frozenset[str]]] = {
    "ssd": _GENERATED | {"reduce_first_layer"},
    "retinanet": _GENERATED | {"scales_first"},
    "blazeface": _ANCHORED - {"background"} | {"anchors_per_layer"},
    "yolov8": frozenset({"strides", "offset", "bins"}),
    "yolo": frozenset({"format", "has_objectness"}),
    "yolox": frozenset({"strides"}),
}
"""The fields that each kind has."""
