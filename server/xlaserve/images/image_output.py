"""Images that a model makes, as PNG files. Blocking functions without state, made for a thread pool."""

from __future__ import annotations

import io
import math
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from xlaserve.config import Color
from xlaserve.images.colors import displayed
from xlaserve.images.frame import Frame

MAX_SIDE: Final = 4096
"""Bounds the memory that a picture takes: 64 MiB of pixels."""
_FAST: Final = 1


class Png(NamedTuple):
    """A picture."""

    height: int
    width: int
    file: bytes


def to_png(levels: NDArray[np.uint8], color: Color, frame: Frame) -> Png:
    """Returns what a model made of an image that lies in its input as in `frame`, without the border.

    `levels` are `[any height, any width, channels]` for the whole input. The picture has the size of the image, or a
    larger one if the model enlarges its input, by as much; it is shrunk where a side would be longer than MAX_SIDE.
    """
    height, width, _ = levels.shape
    sides = frame.height * max(1.0, height / frame.input_height), frame.width * max(1.0, width / frame.input_width)
    scale = min(1.0, MAX_SIDE / max(sides))
    size = [max(1, round(side * scale)) for side in sides]
    left, top, right, bottom = frame.part_of(height, width)
    x, y = math.floor(left), math.floor(top)
    # Cut first: what Pillow resizes takes in pixels around the box.
    part = Image.fromarray(displayed(levels[y : math.ceil(bottom), x : math.ceil(right)], color))
    picture = part.resize((size[1], size[0]), Image.Resampling.BICUBIC, (left - x, top - y, right - x, bottom - y))
    file = io.BytesIO()
    picture.save(file, "PNG", compress_level=_FAST)
    return Png(size[0], size[1], file.getvalue())
