"""One size for images of any size, for files whose operations are translated for a known size alone."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from xlaserve.config import Layout, ModelSettings
from xlaserve.errors import ModelFailed
from xlaserve.images.image_input import axes_of
from xlaserve.models.sources.onnx_tflite.openvino_to_tensorflow import static_shape
from xlaserve.models.sources.onnx_tflite.openvino_values import cause

Size = tuple[int, int]
"""Height and width."""
Shapes = dict[int, list[int]]
"""The shapes of inputs by their numbers; a side of any size is -1."""


def is_open(model: Any, settings: ModelSettings) -> bool:
    """Returns whether a model that OpenVINO has read takes images of any height or width."""
    return bool(_shapes(model, settings, (1, 1)))


def fix(model: Any, settings: ModelSettings, file: str, why: str) -> Size:
    """Gives the images of a model the only size that the settings name, and returns that.

    `file` is the name of its file, `why` the reason, for messages. Raises ModelFailed where the settings name no size
    or several, or one that the model can't take.
    """
    if (size := settings.only_size) is None:
        sizes = settings.resolutions
        field, got = ("resolutions", f"{len(sizes)} sizes") if sizes else ("input_size", "none")
        height, width = sizes[0] if sizes else (224, 224)
        raise ModelFailed(
            f"{field}: expected the one size of the images of {file}, which can't be translated for any size ({why}),"
            f" got {got}; write input_size: [{height}, {width}], with the height and width of the images that it was"
            " trained on"
        )
    try:
        model.reshape(_shapes(model, settings, size))
    except RuntimeError as error:
        raise ModelFailed(
            f"input_size: expected a size that {file} takes, got {size[0]}x{size[1]}: {cause(error)}; write that of the"
            " images that it was trained on: input_size: [HEIGHT, WIDTH]"
        ) from error
    return size


def filled(shape: Sequence[int | None] | None, layout: Layout | None, size: Size) -> list[int | None]:
    """Returns a shape with `size` for the height and width that it leaves open, if it is that of images."""
    axes = axes_of(shape, layout) or ""
    sides = dict(zip("HW", size, strict=True))
    return [sides.get(axis) if side is None else side for axis, side in zip_longest(axes, shape or ())]


def _shapes(model: Any, settings: ModelSettings, size: Size) -> Shapes:
    """Returns the shapes of the images whose height or width is open, with those of `size` in their place."""
    found = {}
    for index, each in enumerate(model.inputs):
        shape = static_shape(each)
        fixed = filled(shape, settings.layout, size)
        if shape is not None and fixed != shape:
            found[index] = [-1 if side is None else side for side in fixed]
    return found
