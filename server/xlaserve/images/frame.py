"""Frames: the place of an image in a model's input, and boxes and class maps back in the original image's pixels.

Coordinates are in pixels from the top left corner of the image, which is (0, 0); its bottom right corner is
(width, height). The pixel in column x covers x to x + 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from xlaserve.config import Fit
from xlaserve.errors import InvalidArgument

LETTERBOX_LEVEL: Final = 114
"""The grey that the detectors of the YOLO family are trained with."""

SAME_ASPECT: Final = 1.05
"""Aspect ratios of inputs that are this factor apart differ by the rounding to what networks take, not by intent."""

Scalar = TypeVar("Scalar", bound=np.generic)


@dataclass(frozen=True, slots=True)
class Frame:
    """An image of `height` x `width` pixels, upright, that covers a part of an input or all of it."""

    height: int
    width: int
    input_height: int
    input_width: int
    top: int
    left: int
    fitted_height: int
    fitted_width: int
    border: int = 0
    """The level, in all channels, of pixels that the image does not cover."""

    @property
    def covers_input(self) -> bool:
        """Whether the image leaves no border."""
        return (self.fitted_height, self.fitted_width) == (self.input_height, self.input_width)

    def to_original(self, boxes: NDArray[Any]) -> NDArray[np.float32]:
        """Returns boxes `[k, 4]` of x_min, y_min, x_max, y_max in the image's pixels, clipped to it.

        `boxes` are in pixels of the input.
        """
        scale = np.array([self.width / self.fitted_width, self.height / self.fitted_height], np.float64)
        corners = (boxes.astype(np.float64).reshape(-1, 2, 2) - (self.left, self.top)) * scale
        return np.clip(corners, 0, (self.width, self.height)).reshape(-1, 4).astype(np.float32)

    def part_of(self, height: int, width: int) -> tuple[float, float, float, float]:
        """Returns left, top, right and bottom of the image in a map of the whole input, `[height, width]`."""
        left, right = (x * width / self.input_width for x in (self.left, self.left + self.fitted_width))
        top, bottom = (y * height / self.input_height for y in (self.top, self.top + self.fitted_height))
        return left, top, right, bottom

    def map_to_original(self, classes: NDArray[Scalar]) -> NDArray[Scalar]:
        """Returns a map of the whole input, `[any height, any width]`, as `[height, width]` of the image.

        Each pixel takes the value of the map under its centre: no value comes out that did not go in.
        """
        rows = _under(self.height, self.top, self.fitted_height, self.input_height, classes.shape[0])
        columns = _under(self.width, self.left, self.fitted_width, self.input_width, classes.shape[1])
        # The columns of the small map first: what is then left to do for each row is one copy.
        return classes.take(columns, axis=1).take(rows, axis=0)


def _under(pixels: int, start: int, fitted: int, whole: int, cells: int) -> NDArray[np.intp]:
    """Returns for each of an image's `pixels` along one side the cell of the map that its centre falls on.

    The image covers `fitted` of the input's `whole` pixels from `start` on, and the map divides them into `cells`.
    """
    centres = (np.arange(pixels) + 0.5) * (fitted / pixels) + start
    return np.clip((centres * (cells / whole)).astype(np.intp), 0, cells - 1)


def place(height: int, width: int, *, input_height: int, input_width: int, fit: Fit) -> Frame:
    """Returns the frame of an upright image of `height` x `width` pixels in an input of the size given.

    Raises InvalidArgument where `fit` is `reject` and the image has another size.
    """
    size = (input_height, input_width)
    scale = min(input_height / height, input_width / width)
    match fit:
        case Fit.REJECT:
            if (height, width) != size:
                expected = f"{input_width} x {input_height} pixels, as the model's fit is reject"
                raise InvalidArgument("image", expected, f"{width} x {height}")
            return whole(height, width)
        case Fit.RESIZE:
            return Frame(height, width, *size, 0, 0, *size)
        case Fit.PAD:
            return Frame(height, width, *size, 0, 0, *_scaled(height, width, min(scale, 1.0), size))
        case Fit.LETTERBOX:
            fitted = _scaled(height, width, scale, size)
            top, left = (input_height - fitted[0]) // 2, (input_width - fitted[1]) // 2
            return Frame(height, width, *size, top, left, *fitted, border=LETTERBOX_LEVEL)


def _scaled(height: int, width: int, scale: float, size: tuple[int, int]) -> tuple[int, int]:
    """Returns a height and a width times `scale`, at least 1 and at most `size`."""
    return min(max(round(height * scale), 1), size[0]), min(max(round(width * scale), 1), size[1])


def best_input(height: int, width: int, inputs: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Returns the one of a model's `inputs`, heights and widths, that suits an image of `height` x `width` pixels best.

    Of those whose aspect ratio comes closest (SAME_ASPECT apart counts as equally close), the smallest that the image
    need not be shrunk for; where it must be for all of them, the largest.
    """

    def distortion(size: tuple[int, int]) -> float:
        return abs(math.log((size[1] * height) / (size[0] * width)))

    least = min(map(distortion, inputs))
    close = [size for size in inputs if distortion(size) <= least + math.log(SAME_ASPECT)]
    holding = [size for size in close if size[0] >= height and size[1] >= width]
    return min(holding, key=math.prod) if holding else max(close, key=math.prod)


def within(max_side: int, height: int, width: int) -> Frame:
    """Returns the frame of an image that is an input by itself, shrunk where a side would be longer than `max_side`."""
    size = _scaled(height, width, min(1.0, max_side / max(height, width)), (height, width))
    return Frame(height, width, *size, 0, 0, *size)


@lru_cache(maxsize=256)
def whole(height: int, width: int) -> Frame:
    """Returns the frame of an image that is the input as it is."""
    return Frame(height, width, height, width, 0, 0, height, width)
