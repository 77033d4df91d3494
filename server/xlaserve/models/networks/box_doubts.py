"""Boxes that are not of the form that the setting `box_decoding` says, told by outputs for sample images."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from xlaserve.config import BoxDecoding
from xlaserve.errors import ModelFailed
from xlaserve.models.networks.anchors import anchors

MOST_RELATIVE: Final = 1.5
"""Places of nearly all boxes that are relative to the image are smaller."""
LEAST_SHARE: Final = 1 / 8
"""Share of the image's longer side beyond which some boxes in pixels are, as there is one for each cell."""
NEARLY_ALL: Final = 0.95
LEAST_NUMBER: Final = -0.1
"""Decoded boxes have their centres in the image, and no sides below 0; offsets from cells are often less."""
MOST_BELOW: Final = 0.01
FEWEST: Final = 20
"""Boxes, other than zeros, of which fewer tell nothing."""
SMALLEST: Final = 32
"""The image's longer side, in pixels, below which boxes in pixels can't be told from others."""


def check(given: NDArray[Any], decoding: BoxDecoding, size: tuple[int, int]) -> None:
    """Raises ModelFailed where boxes `[n, k, numbers]` for images of `size`, height and width, are unmistakably of
    another form than `decoding` says, with the line to write."""
    boxes = given[..., :4].astype(np.float64)
    boxes = boxes[boxes.any(axis=-1)]  # some networks fill up their rows with zeros
    if max(size) < SMALLEST or len(boxes) < FEWEST or not np.isfinite(boxes).all():
        return
    extent = float(np.quantile(np.abs(boxes[..., :2]), NEARLY_ALL))
    form, is_relative = decoding.format.removeprefix("rel_"), decoding.format.startswith("rel_")
    objectness = ", has_objectness: true" if decoding.has_objectness else ""
    has_negative = bool(np.mean(boxes.min(axis=-1) < LEAST_NUMBER) > MOST_BELOW)
    got = f"got places up to {extent:.3g} in images of {size[0]}x{size[1]}"
    if extent >= max(size) * LEAST_SHARE:
        if decoding.kind == "yolox" and not has_negative:
            raise _unfit(f"offsets from cells, {got}", "{kind: yolo, has_objectness: true}")
        if is_relative:
            raise _unfit(f"boxes from 0 to 1, {got}", f"{{kind: yolo, format: {form}{objectness}}}")
    elif decoding.kind == "yolo":
        if form == "center_xywh" and has_negative:
            got = "decoded boxes, got numbers below 0, as of offsets from cells"
            if given.shape[-2] == len(anchors(BoxDecoding(kind="yolox"), *size)):
                raise _unfit(got, "yolox")
            raise ModelFailed(f"box_decoding: expected {got}; write task: tensors, and decode them in your application")
        if extent <= MOST_RELATIVE and not is_relative:
            raise _unfit(f"boxes in pixels, {got}", f"{{kind: yolo, format: rel_{form}{objectness}}}")


def _unfit(text: str, line: str) -> ModelFailed:
    return ModelFailed(f"box_decoding: expected {text}; write box_decoding: {line}")
