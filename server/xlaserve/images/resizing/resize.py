"""Resizing of decoded images by the libraries and filters of `config.ResizeSettings`."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from xlaserve.config import ResizeFilter, ResizeSettings
from xlaserve.images.jpeg import Region
from xlaserve.images.resizing import tensorflow_filters
from xlaserve.images.resizing.tensorflow_filters import Axis

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


def by_pillow(image: Image.Image, size: tuple[int, int], how: ResizeFilter, box: Region | None = None) -> Image.Image:
    """Returns an image of `size`, width and height, or `image` itself where it has that.

    `box` is the part that is resized; the whole image without one.
    """
    return image if image.size == size else image.resize(size, _PILLOW[how], box)


def by_tensorflow(
    image: Image.Image,
    size: tuple[int, int],
    how: ResizeSettings,
    box: Region | None = None,
    dtype: type[np.uint8 | np.float32] = np.uint8,
) -> NDArray[np.uint8 | np.float32]:
    """Returns an image of mode L, RGB or RGBA as `[height, width, channels]` of `size`, width and height.

    `box` is the part that is resized, from the top left corner on; the whole image without one. TensorFlow's own
    results are float32: as uint8 they are rounded, half to even, and clipped.
    """
    pixels = array(image)
    if image.size == size and how.filter not in _BLURS:
        return pixels.astype(dtype, copy=False)
    width, height = image.size if box is None else box[2:]
    out = np.empty((size[1], size[0], pixels.shape[2]), dtype)
    rows, columns = Axis(image.height, height, size[1]), Axis(image.width, width, size[0])
    tensorflow_filters.resize(pixels, rows, columns, how.filter, antialias=how.is_antialiased, out=out)
    return out


def array(image: Image.Image) -> NDArray[np.uint8]:
    """Returns the pixels of an image of mode L, RGB or RGBA as `[height, width, channels]`."""
    pixels: NDArray[np.uint8] = np.asarray(image)
    return pixels if pixels.ndim == 3 else pixels[:, :, np.newaxis]
