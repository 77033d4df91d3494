"""Frames: the place of an image in a model's input, and boxes and class maps back in the original image's pixels.

Coordinates are in pixels from the top left corner of the image, which is (0, 0); its bottom right corner is
(width, height). The pixel in column x covers x to x + 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from xlaserve.config import Border, Fit
from xlaserve.errors import InvalidArgument

LETTERBOX_LEVEL: Final = 114
"""The grey that the detectors of the YOLO family are trained with, of levels from 0 to 255."""

SAME_ASPECT: Final = 1.05
"""Aspect ratios of inputs that are this factor apart differ by the rounding to what networks take, not by intent."""

_RESIZED_TO_CUT: Final = 256 / 224
"""The shorter side of a resized image over that of what is cut out of it: how networks of ImageNet are evaluated."""

Region = tuple[float, float, float, float]
"""Left, top, right and bottom, in pixels."""


class Window(NamedTuple):
    """A part of a resized image, in whole pixels of it."""

    left: int
    top: int
    right: int
    bottom: int


Scalar = TypeVar("Scalar", bound=np.generic)


@dataclass(frozen=True, slots=True)
class Frame:
    """An image of `height` x `width` pixels, upright, that covers a part of an input or all of it.

    It is resized to `fitted_height` x `fitted_width` pixels, whose top left corner lies at `top` and `left` of the
    input: above 0 they leave a border, below 0 the image reaches beyond the input.
    """

    height: int
    width: int
    input_height: int
    input_width: int
    top: int
    left: int
    fitted_height: int
    fitted_width: int
    border: Border | None = 0
    """The colour of pixels that the image does not cover; None for LETTERBOX_LEVEL, in proportion to their depth."""
    crop: Region | None = None
    """The only part of the image that is resized, in its own pixels; None where that is the whole."""

    @property
    def covers_input(self) -> bool:
        """Whether the image leaves no border, and does not reach beyond the input."""
        return (self.fitted_height, self.fitted_width) == (self.input_height, self.input_width)

    @property
    def seen(self) -> Window:
        """The pixels of the resized image that lie within the input."""
        top, left = max(0, -self.top), max(0, -self.left)
        bottom = min(self.fitted_height, self.input_height - self.top)
        right = min(self.fitted_width, self.input_width - self.left)
        return Window(left, top, right, bottom)

    @property
    def part(self) -> Region:
        """The part of the image that is resized, in its own pixels."""
        return self.crop or (0, 0, self.width, self.height)

    def to_original(self, boxes: NDArray[Any]) -> NDArray[np.float32]:
        """Returns boxes `[k, 4]` of x_min, y_min, x_max, y_max in the image's pixels, clipped to it.

        `boxes` are in pixels of the input.
        """
        corners = self._to_original(boxes.reshape(-1, 2, 2))
        return np.clip(corners, 0, (self.width, self.height)).reshape(-1, 4).astype(np.float32)

    def points_to_original(self, points: NDArray[Any]) -> NDArray[np.float32]:
        """Returns points `[k, 2]` of x and y in the image's pixels, those beyond its edge too.

        `points` are in pixels of the input.
        """
        return self._to_original(points).astype(np.float32)

    def _to_original(self, points: NDArray[Any]) -> NDArray[np.float64]:
        left, top, right, bottom = self.part
        scale = np.array([(right - left) / self.fitted_width, (bottom - top) / self.fitted_height], np.float64)
        moved: NDArray[np.float64] = (points.astype(np.float64) - (self.left, self.top)) * scale + (left, top)
        return moved

    def part_of(self, height: int, width: int) -> tuple[float, float, float, float]:
        """Returns left, top, right and bottom of the image in a map of the whole input, `[height, width]`.

        For an image that lies within the input as a whole.
        """
        left, right = (x * width / self.input_width for x in (self.left, self.left + self.fitted_width))
        top, bottom = (y * height / self.input_height for y in (self.top, self.top + self.fitted_height))
        return left, top, right, bottom

    def map_to_original(self, classes: NDArray[Scalar]) -> NDArray[Scalar]:
        """Returns a map of the whole input, `[any height, any width]`, as `[height, width]` of the image.

        Each pixel takes the value of the map under its centre: no value comes out that did not go in. For an image that
        lies within the input as a whole.
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


class Placing(NamedTuple):
    """The arguments of `place` apart from sizes: with them, they decide where an image goes in an input."""

    fit: Fit
    shorter_side: int | None
    border: Border | None
    cuts_pixels: bool


def place(
    height: int,
    width: int,
    *,
    input_height: int,
    input_width: int,
    fit: Fit,
    shorter_side: int | None = None,
    border: Border | None = None,
    cuts_pixels: bool = False,
) -> Frame:
    """Returns the frame of an upright image of `height` x `width` pixels in an input of the size given.

    `shorter_side` and `border` are as in the settings. With `cuts_pixels`, `crop` cuts between pixels, as Keras does;
    without, where the middle ends, as Pillow's `ImageOps.fit` does. Raises InvalidArgument where `fit` is `reject` and
    the image has another size.
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
            fitted = _scaled(height, width, min(scale, 1.0), size)
            return Frame(height, width, *size, 0, 0, *fitted, border=border or 0)
        case Fit.LETTERBOX:
            fitted = _scaled(height, width, scale, size)
            top, left = (input_height - fitted[0]) // 2, (input_width - fitted[1]) // 2
            return Frame(height, width, *size, top, left, *fitted, border=border)
        case Fit.CROP:
            middle = _whole_middle(height, width, size) if cuts_pixels else _middle(height, width, size)
            return Frame(height, width, *size, 0, 0, *size, crop=middle)
        case Fit.CENTER_CROP:
            fitted = _resized(height, width, shorter_side or round(min(size) * _RESIZED_TO_CUT), size)
            top, left = (-round((fitted[side] - size[side]) / 2) for side in (0, 1))
            return Frame(height, width, *size, top, left, *fitted)


def _middle(height: int, width: int, size: tuple[int, int]) -> Region:
    """Returns the largest part of the aspect ratio of `size` about the centre, as `ImageOps.fit` computes it."""
    aspect = size[1] / size[0]
    if width / height == aspect:
        return 0, 0, width, height
    across, down = (aspect * height, height) if width / height >= aspect else (width, width / aspect)
    left, top = (width - across) * 0.5, (height - down) * 0.5
    return left, top, left + across, top + down


def _whole_middle(height: int, width: int, size: tuple[int, int]) -> Region:
    """Returns the same in whole pixels, as Keras computes it, in float32."""
    down = max(1, min(height, int(np.float32(width * size[0]) / np.float32(size[1]))))
    across = max(1, min(width, int(np.float32(height * size[1]) / np.float32(size[0]))))
    left, top = (width - across) // 2, (height - down) // 2
    return left, top, left + across, top + down


def _resized(height: int, width: int, shorter_side: int, size: tuple[int, int]) -> tuple[int, int]:
    """Returns height and width with a shorter side of `shorter_side`, or of more where that would not cover `size`.

    The longer side is rounded down, as torchvision's `Resize` does.
    """
    shorter_side = max(shorter_side, *size)
    shorter = min(height, width)
    return shorter_side * height // shorter, shorter_side * width // shorter


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
