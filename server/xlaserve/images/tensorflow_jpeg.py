"""JPEG files decoded as `tf.io.decode_jpeg` and `tf.io.decode_image` do by default.

TensorFlow has libjpeg-turbo use its fast, less accurate inverse transform, which Pillow can't be told to: pixels of
photographs are about one level apart, and up to 16. The package simplejpeg has the same library with that choice.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xlaserve.images.jpeg import JpegFile


@cache
def is_available() -> bool:
    """Whether simplejpeg is installed."""
    return importlib.util.find_spec("simplejpeg") is not None


def pixels_of(data: bytes, image: JpegFile, *, is_grey: bool) -> NDArray[np.uint8] | None:
    """Returns the pixels of a JPEG whose header `image` has read, `[height, width, 3]` of RGB.

    Of a grey image, or with `is_grey`, `[height, width, 1]`. None where Pillow has to decide: of other colours,
    damaged, or read otherwise by the two.
    """
    if image.mode not in ("L", "RGB") or not is_available():
        return None
    import simplejpeg  # noqa: PLC0415 - which need not be installed

    colors = "GRAY" if is_grey or image.mode == "L" else "RGB"
    try:
        height, width, *_ = simplejpeg.decode_jpeg_header(data)
        if (width, height) != image.size:
            return None
        pixels: NDArray[Any] = simplejpeg.decode_jpeg(data, colors, fastdct=True)
    except ValueError:
        return None
    return pixels.astype(np.uint8, copy=False)
