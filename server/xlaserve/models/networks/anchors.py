"""Anchors, the boxes from which detectors give offsets, as NumPy arrays.

Every function returns `[k, 4]`: x and y of the centre, width and height, in pixels of the input. Anchors stand in the
order of the strides, then by rows and columns of cells, then as in each cell.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from xlaserve.config import BoxDecoding, BoxFormat
from xlaserve.config.box_decoding_settings import SSD_STRIDES
from xlaserve.errors import ModelFailed

Anchors = NDArray[np.float32]

SSD_RATIOS: Final = (1.0, 2.0, 0.5, 3.0, 1 / 3)
SSD_SCALES: Final = (0.2, 0.95)
"""The first and the last but one."""
WRITE: Final = 'write it: np.save("anchors.npy", anchors)'
"""The next step for a file that is none of anchors."""
FIRST_SCALE: Final = 0.1
"""The scale of the first anchor of a reduced first layer."""
RETINANET_STRIDES: Final = (8, 16, 32, 64, 128)
RETINANET_RATIOS: Final = (0.5, 1.0, 2.0)
RETINANET_SCALES: Final = tuple(4 * 2 ** (third / 3) for third in range(3))
YOLO_STRIDES: Final = (8, 16, 32)


def anchors(decoding: BoxDecoding, height: int, width: int) -> Anchors:
    """Returns the anchors of an input of `height` x `width` pixels. Raises ModelFailed for a file that holds none."""
    found = _unclipped(decoding, height, width)
    if not decoding.clip_anchors:
        return found
    half = found[:, 2:] / 2
    low, high = (np.clip(found[:, :2] + side, 0, (width, height)) for side in (-half, half))
    return np.concatenate(((low + high) / 2, high - low), axis=1).astype(np.float32)


def _unclipped(decoding: BoxDecoding, height: int, width: int) -> Anchors:
    if decoding.anchors is not None:
        return from_file(decoding.anchors, decoding.anchor_format, height, width)
    match decoding.kind:
        case "ssd":
            return _ssd(decoding, height, width)
        case "retinanet":
            return _retinanet(decoding, height, width)
        case "blazeface":
            return _blazeface(decoding, height, width)
        case "yolov8" | "yolo":
            return _points(decoding, height, width, decoding.offset)
        case "yolox":
            return _points(decoding, height, width, 0.0)


def from_file(file: Path, how: BoxFormat, height: int, width: int) -> Anchors:
    """Reads the anchors in a `.npy` file. Raises ModelFailed where it has none."""
    try:
        with file.open("rb") as opened:
            values: NDArray[Any] = np.lib.format.read_array(opened, allow_pickle=False)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ModelFailed(f"box_decoding.anchors: {file.name} is no .npy file of numbers: {reason}; {WRITE}") from error
    if values.ndim != 2 or values.shape[1] != 4 or values.dtype.kind not in "fiu":
        got = f"{values.dtype} {list(values.shape)}"
        raise ModelFailed(f"box_decoding.anchors: expected numbers [k, 4] in {file.name}, got {got}; {WRITE}")
    a, b, c, d = values.astype(np.float64).T
    match how.removeprefix("rel_"):
        case "xyxy":
            sides = (a + c) / 2, (b + d) / 2, c - a, d - b
        case "yxyx":
            sides = (b + d) / 2, (a + c) / 2, d - b, c - a
        case "xywh":
            sides = a + c / 2, b + d / 2, c, d
        case _:
            sides = a, b, c, d
    stacked = np.stack(sides, axis=1)
    return (stacked * [width, height, width, height] if how.startswith("rel_") else stacked).astype(np.float32)


def _ssd(decoding: BoxDecoding, height: int, width: int) -> Anchors:
    """Anchors as TensorFlow's Object Detection API generates them (create_ssd_anchors in
    anchor_generators/multiple_grid_anchor_generator.py): scales of the shorter side, and cells that divide the input
    evenly."""
    strides = decoding.strides or SSD_STRIDES
    scales = decoding.scales or (*np.linspace(*SSD_SCALES, len(strides)).tolist(), 1.0)
    ratios = decoding.aspect_ratios or SSD_RATIOS
    levels = []
    for level, stride in enumerate(strides):
        scale = scales[level]
        shapes = [(scale, ratio) for ratio in ratios]
        shapes.append((math.sqrt(scale * scales[level + 1]), 1.0))
        if level == 0 and decoding.reduce_first_layer:
            shapes = [(FIRST_SCALE, 1.0), (scale, 2.0), (scale, 0.5)]
        rows, columns = math.ceil(height / stride), math.ceil(width / stride)
        cell = height / rows, width / columns
        short = min(height, width)
        levels.append(_grid((rows, columns), cell, decoding.offset, [(size * short, ratio) for size, ratio in shapes]))
    return np.concatenate(levels)


def _retinanet(decoding: BoxDecoding, height: int, width: int) -> Anchors:
    """Anchors of RetinaNet, by Lin et al. 2017, section 4: three scales, from four strides on, of each aspect ratio."""
    ratios, scales = decoding.aspect_ratios or RETINANET_RATIOS, decoding.scales or RETINANET_SCALES
    pairs = [(scale, ratio) for ratio in ratios for scale in scales]
    if decoding.scales_first:
        pairs = [(scale, ratio) for scale in scales for ratio in ratios]
    levels = []
    for stride in decoding.strides or RETINANET_STRIDES:
        shapes = [(scale * stride, ratio) for scale, ratio in pairs]
        levels.append(_cells(height, width, stride, decoding.offset, shapes))
    return np.concatenate(levels)


def _blazeface(decoding: BoxDecoding, height: int, width: int) -> Anchors:
    """Anchors as MediaPipe's SsdAnchorsCalculator makes them for face detectors: one or two for each layer in each
    cell, and those of layers of one stride together. Only their centres count."""
    strides = decoding.strides or (max(1, height // 16), *(max(1, height // 8),) * 3)
    levels = []
    for stride in dict.fromkeys(strides):
        shapes = [(1.0, 1.0)] * (decoding.anchors_per_layer * strides.count(stride))
        levels.append(_cells(height, width, stride, decoding.offset, shapes))
    return np.concatenate(levels)


def _points(decoding: BoxDecoding, height: int, width: int, offset: float) -> Anchors:
    """Cells as anchors: a point in each, by default its centre, and their strides for sides."""
    strides = decoding.strides or YOLO_STRIDES
    return np.concatenate([_cells(height, width, stride, offset, [(stride, 1.0)]) for stride in strides])


def _cells(height: int, width: int, stride: int, offset: float, shapes: Iterable[tuple[float, float]]) -> Anchors:
    """Returns the anchors of one feature map whose cells are `stride` pixels wide and high."""
    return _grid((math.ceil(height / stride), math.ceil(width / stride)), (stride, stride), offset, shapes)


def _grid(
    sides: tuple[int, int], cell: tuple[float, float], offset: float, shapes: Iterable[tuple[float, float]]
) -> Anchors:
    """Returns anchors of `shapes`, the root of the area and width over height, in cells of a feature map.

    `sides` are its rows and columns, `cell` the height and width of its cells in pixels.
    """
    sizes = np.array([(size * math.sqrt(ratio), size / math.sqrt(ratio)) for size, ratio in shapes])
    y, x = ((np.arange(side) + offset) * pixels for side, pixels in zip(sides, cell, strict=True))
    centres = np.stack(np.meshgrid(x, y), axis=-1).reshape(-1, 1, 2)
    count = len(centres), len(sizes), 2
    pairs = np.broadcast_to(centres, count), np.broadcast_to(sizes, count)
    return np.concatenate(pairs, axis=-1).reshape(-1, 4).astype(np.float32)
