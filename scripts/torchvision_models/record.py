"""Models of torchvision that are tried, and a record of each: a file with a line of JSON for each model."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

from xlaserve.engine.causes import cause

BATCH: Final = 2
TOLERANCE: Final = 1e-4
"""Largest difference from PyTorch, as a share of the largest magnitude of an output,"""
ROUNDINGS: Final = 3
"""or as a multiple of the difference that PyTorch's own rounding to float32 makes."""
EXPORT: Final = "model.pt2"
PIXELS: Final = "pixels.npy"
WANTED: Final = "wanted.npz"
FACTS: Final = "facts.json"
COMPARED: Final = "compared.json"

CLASSIFIERS: Final = (
    *("alexnet", "squeezenet1_0", "squeezenet1_1", "mobilenet_v2", "mobilenet_v3_large", "mobilenet_v3_small"),
    *("shufflenet_v2_x0_5", "shufflenet_v2_x1_0", "shufflenet_v2_x1_5", "shufflenet_v2_x2_0"),
    *("mnasnet0_5", "mnasnet0_75", "mnasnet1_0", "mnasnet1_3", "googlenet", "inception_v3"),
    *("resnet18", "resnet34", "resnet50", "resnet101", "resnet152"),
    *("resnext50_32x4d", "resnext101_32x8d", "resnext101_64x4d", "wide_resnet50_2", "wide_resnet101_2"),
    *("regnet_x_400mf", "regnet_x_800mf", "regnet_x_1_6gf", "regnet_x_3_2gf", "regnet_x_8gf", "regnet_x_16gf"),
    *("regnet_x_32gf", "regnet_y_400mf", "regnet_y_800mf", "regnet_y_1_6gf", "regnet_y_3_2gf", "regnet_y_8gf"),
    *("regnet_y_16gf", "regnet_y_32gf", "regnet_y_128gf"),
    *("efficientnet_b0", "efficientnet_b1", "efficientnet_b2", "efficientnet_b3", "efficientnet_b4"),
    *("efficientnet_b5", "efficientnet_b6", "efficientnet_b7"),
    *("efficientnet_v2_s", "efficientnet_v2_m", "efficientnet_v2_l"),
    *("convnext_tiny", "convnext_small", "convnext_base", "convnext_large"),
    *("densenet121", "densenet161", "densenet169", "densenet201"),
    *("vgg11", "vgg11_bn", "vgg13", "vgg13_bn", "vgg16", "vgg16_bn", "vgg19", "vgg19_bn"),
    *("vit_b_16", "vit_b_32", "vit_l_16", "vit_l_32", "vit_h_14", "maxvit_t"),
    *("swin_t", "swin_s", "swin_b", "swin_v2_t", "swin_v2_s", "swin_v2_b"),
)
SEGMENTERS: Final = (
    *("lraspp_mobilenet_v3_large", "deeplabv3_mobilenet_v3_large", "fcn_resnet50", "deeplabv3_resnet50"),
    *("fcn_resnet101", "deeplabv3_resnet101"),
)
ONE_STAGE: Final = ("ssdlite320_mobilenet_v3_large", "ssd300_vgg16", "retinanet_resnet50_fpn")
ONE_STAGE_MORE: Final = ("retinanet_resnet50_fpn_v2", "fcos_resnet50_fpn")
TWO_STAGE: Final = (
    *("fasterrcnn_mobilenet_v3_large_320_fpn", "fasterrcnn_mobilenet_v3_large_fpn", "fasterrcnn_resnet50_fpn"),
    *("fasterrcnn_resnet50_fpn_v2", "maskrcnn_resnet50_fpn", "maskrcnn_resnet50_fpn_v2", "keypointrcnn_resnet50_fpn"),
)
DETECTION: Final = (*ONE_STAGE, *ONE_STAGE_MORE, *TWO_STAGE)

KINDS: Final = {
    "classifiers": CLASSIFIERS,
    "segmenters": SEGMENTERS,
    "detectors of one stage": (*ONE_STAGE, *ONE_STAGE_MORE),
    "detectors of two stages": TWO_STAGE,
}
SIDES: Final = {
    "inception_v3": 299,
    "swin_v2_t": 256,
    "swin_v2_s": 256,
    "swin_v2_b": 256,
    "ssd300_vgg16": 300,
    "ssdlite320_mobilenet_v3_large": 320,
    **dict.fromkeys(TWO_STAGE, 320),
    **dict.fromkeys(ONE_STAGE_MORE, 320),
    "retinanet_resnet50_fpn": 320,
}
"""Height and width of images where they are not SIDE: most models take any, and are tried with small ones."""
SIDE: Final = 224


def names() -> list[str]:
    """Returns the names of all models, in the order of the table."""
    return [name for group in KINDS.values() for name in group]


@contextmanager
def telling() -> Iterator[None]:
    """A step, as a program of its own; where it fails, stderr ends with the cause, in one line."""
    try:
        yield
    except Exception as error:
        traceback.print_exc()
        sys.exit(f"\n{type(error).__name__}: {cause(error)}")


@dataclass(frozen=True, kw_only=True)
class Tried:
    """The record of a model that was tried."""

    name: str
    side: int
    at: str
    """Day and time."""
    machine: str
    parameters: int = 0
    spread: float = 0.0
    """The least of the outputs' largest difference between two images, as a share of the largest magnitude."""
    rounding: float = 0.0
    """The largest difference of PyTorch's outputs from those that it computes in float64, by the same measure."""
    exported_s: float = 0.0
    imported_s: float = 0.0
    compiled_s: dict[str, float] = field(default_factory=dict)
    """By mode."""
    differences: dict[str, float] = field(default_factory=dict)
    """By mode: the largest from PyTorch."""
    outputs: dict[str, list[int]] = field(default_factory=dict)
    """Shapes of PyTorch's outputs, without the batch."""
    lowerings: str = ""
    stays: str = ""
    """Why it stays StableHLO; empty where it is translated to TensorFlow's operations."""
    versions: dict[str, str] = field(default_factory=dict)
    failed: str = ""
    """The step that failed, and why."""

    @property
    def is_right(self) -> bool:
        """Whether it is served, and answers as PyTorch does."""
        tolerance = max(TOLERANCE, ROUNDINGS * self.rounding)
        return not self.failed and max(self.differences.values()) <= tolerance < self.spread


def read(file: Path) -> dict[str, Tried]:
    """Returns the records of a file by the names of the models; the last of each counts."""
    lines = file.read_text().splitlines() if file.exists() else []
    return {record.name: record for record in (Tried(**json.loads(line)) for line in lines)}


def add(file: Path, record: Tried) -> None:
    """Appends a record."""
    with file.open("a") as opened:
        opened.write(json.dumps(asdict(record)) + "\n")


def in_order(records: Mapping[str, Tried], group: Iterable[str]) -> list[Tried]:
    """Returns the records of a group of models that were tried."""
    return [records[name] for name in group if name in records]
