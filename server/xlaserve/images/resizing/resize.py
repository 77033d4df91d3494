"""Resizing of decoded images by the libraries and filters of `config.ResizeSettings`."""

from __future__ import annotations

import math
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from xlaserve.config import ResizeFilter, ResizeLibrary, ResizeSettings
from xlaserve.images.frame import Region, Window
from xlaserve.images.resizing import opencv_filters, tensorflow_filters
from xlaserve.images.resizing.weighted import Axis

_PILLOW: Final = {
    ResizeFilter.NEAREST: Image.Resampling.NEAREST,
    ResizeFilter.BOX: Image.Resampling.BOX,
    ResizeFilter.BILINEAR: Image.Resampling.BILINEAR,
    ResizeFilter.HAMMING: Image.Resampling.HAMMING,
    ResizeFilter.BICUBIC: Image.Resampling.BICUBIC,
    ResizeFilter.LANCZOS: Image.Resampling.LANCZOS,
}
_BLURS: Final = (ResizeFilter.GAUSSIAN, ResizeFilter.MITCHELLCUBIC)
"""Filters that change an image of the right size."""


_MOST_CUT: Final = 1 << 20
"""Pixels up to which the whole is resized before a window is cut out of it. That alone gives Pillow's own pixels to the
bit, as Pillow rounds the corners of a part to float32."""

Value = TypeVar("Value", np.uint8, np.uint16, np.float32)


class Resized(NamedTuple):
    """The resizing of a part of an image, of which a window is wanted."""

    part: Region
    """In the image's pixels; between them where it was cut or reduced so."""
    width: int
    """Pixels that the part is resized to."""
    height: int
    window: Window
    """The pixels of these that are wanted."""

    @property
    def is_whole(self) -> bool:
        """Whether all pixels are wanted."""
        return self.window == (0, 0, self.width, self.height)

    @property
    def sideways(self) -> Resized:
        """The same of an image whose rows are columns, where all pixels are wanted."""
        left, top, right, bottom = self.part
        return Resized((top, left, bottom, right), self.height, self.width, Window(0, 0, self.height, self.width))


def by_pillow(image: Image.Image, to: Resized, how: ResizeFilter) -> Image.Image:
    """Returns the window of an image; `image` itself where nothing has to be done."""
    if to.part == (0, 0, to.width, to.height) == (0, 0, *image.size):
        return image if to.is_whole else image.crop(to.window)
    if to.is_whole:
        return image.resize((to.width, to.height), _PILLOW[how], to.part)
    if to.width * to.height <= _MOST_CUT:
        return image.resize((to.width, to.height), _PILLOW[how], to.part).crop(to.window)
    left, top, right, bottom = to.part
    across, down = (right - left) / to.width, (bottom - top) / to.height
    x, y, x_end, y_end = to.window
    box = (left + x * across, top + y * down, left + x_end * across, top + y_end * down)
    return image.resize((x_end - x, y_end - y), _PILLOW[how], box)


def by_tensorflow(image: NDArray[Any], to: Resized, how: ResizeSettings, dtype: type[Value]) -> NDArray[Value]:
    """Returns the window of an image as TensorFlow resizes it, both `[height, width, channels]`.

    TensorFlow's own results are float32: as whole numbers they are rounded, half to even, and clipped.
    """
    pixels, rows, columns = _sides(image, to)
    if pixels.shape[:2] == (to.height, to.width) and how.filter not in _BLURS:
        return _cut(pixels, to.window).astype(dtype, copy=False)
    out = np.empty((rows.stop - rows.start, columns.stop - columns.start, pixels.shape[2]), dtype)
    tensorflow_filters.resize(pixels, rows, columns, how.filter, antialias=how.is_antialiased, out=out)
    return out


def by_opencv(image: NDArray[np.uint8], to: Resized, how: ResizeFilter) -> NDArray[np.uint8]:
    """Returns the window of an image as OpenCV resizes it, both `[height, width, channels]`."""
    pixels, rows, columns = _sides(image, to)
    if pixels.shape[:2] == (to.height, to.width):
        return _cut(pixels, to.window)
    out = np.empty((rows.stop - rows.start, columns.stop - columns.start, pixels.shape[2]), np.uint8)
    opencv_filters.resize(pixels, rows, columns, how, out)
    return out


def of_pixels(image: NDArray[Any], to: Resized, how: ResizeSettings, dtype: type[Value]) -> NDArray[Value]:
    """Returns the window of an image, both `[height, width, channels]`, by a library other than Pillow."""
    if how.library is ResizeLibrary.OPENCV:
        return by_opencv(image, to, how.filter).astype(dtype, copy=False)  # of levels alone
    return by_tensorflow(image, to, how, dtype)


def _sides(image: NDArray[Any], to: Resized) -> tuple[NDArray[Any], Axis, Axis]:
    """Returns the part of an image that is resized, and its rows and columns."""
    left, top, right, bottom = to.part
    across, down = round(left), round(top)
    pixels = image[down : math.ceil(bottom), across : math.ceil(right)]
    window = to.window
    rows = Axis(pixels.shape[0], bottom - down, to.height, window.top, window.bottom)
    columns = Axis(pixels.shape[1], right - across, to.width, window.left, window.right)
    return pixels, rows, columns


def _cut(pixels: NDArray[Any], window: Window) -> NDArray[Any]:
    return pixels[window.top : window.bottom, window.left : window.right]


def array(image: Image.Image | NDArray[np.uint8]) -> NDArray[Any]:
    """Returns the pixels of an image of mode L, RGB, RGBA or F as `[height, width, channels]`; an array as it is."""
    pixels: NDArray[Any] = np.asarray(image)
    return pixels if pixels.ndim == 3 else pixels[:, :, np.newaxis]


def picture(pixels: NDArray[np.uint8]) -> Image.Image:
    """Returns the image of what `array` returned."""
    return Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)
