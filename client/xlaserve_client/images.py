"""Images as callers pass them, and the two forms in which they are sent: encoded files and pixels."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Encoded = str | PathLike[str] | bytes
"""A path, or the bytes of a JPEG, PNG or WebP file."""

Images = Encoded | Sequence[Encoded] | NDArray[Any]
"""One or several encoded images of any size; or pixels from 0 to 255, uint8 or float32, of the model's own size and
channels: `[height, width, channels]`, `[n, height, width, channels]`, `[n, channels, height, width]` or, of one
channel, `[height, width]` and `[n, height, width]`. Only `infer` sends float32 unchanged, also pixels from 0 to 1 for
models that are configured to take them."""
MAX_CHANNELS = 4
"""Most channels of pixels whose axes are told by their lengths."""


def any_on_disk(images: Images) -> bool:
    """Returns whether `load` will read files."""
    if isinstance(images, (list, tuple)):
        return any(isinstance(image, (str, PathLike)) for image in images)
    return isinstance(images, (str, PathLike))


def load(images: Images) -> list[bytes] | NDArray[Any]:
    """Returns encoded images as a list of bytes, and pixels as `[n, height, width, channels]`.

    Raises OSError when a file can't be read, TypeError and ValueError when `images` is of no accepted type.
    """
    if isinstance(images, np.ndarray):
        return _checked(images)
    if isinstance(images, (str, PathLike, bytes, bytearray, memoryview)):
        return [_read(images)]
    if not isinstance(images, Sequence):
        raise TypeError(f"images: expected a path, encoded bytes, a list of these or an array, got {_kind(images)}")
    if not images:
        raise ValueError("images: expected at least one, got an empty list")
    return [_read(image) for image in images]


def whole_levels(pixels: NDArray[Any]) -> NDArray[np.uint8]:
    """Returns pixels as uint8; float32 is rounded, as by the server. Raises ValueError for values outside of 0 to 255,
    and for fractions of at most 1, which would give a black image."""
    if pixels.dtype == np.uint8:
        return np.asarray(pixels, np.uint8)
    for extreme in (pixels.min(), pixels.max()):  # either is NaN where any value is
        if not 0 <= extreme <= 255:
            raise ValueError(f"images: expected values from 0 to 255, got {extreme}")
    levels = np.rint(pixels)
    if pixels.max() <= 1 and not np.array_equal(levels, pixels):
        raise ValueError("images: expected values from 0 to 255, got fractions of at most 1; multiply them by 255")
    return np.asarray(levels, np.uint8)


def _read(image: object) -> bytes:
    if isinstance(image, (str, PathLike)):
        return Path(image).read_bytes()
    if isinstance(image, (bytes, bytearray, memoryview)):
        return bytes(image)
    raise TypeError(f"images: expected paths or encoded bytes in the list, got {_kind(image)}; stack arrays into one")


def _checked(pixels: NDArray[Any]) -> NDArray[Any]:
    if pixels.dtype not in (np.uint8, np.float32):
        raise TypeError(f"images: expected pixels of dtype uint8 or float32, got {pixels.dtype}")
    match pixels.shape:
        case shape if 0 in shape:
            pass
        case (_, channels, height, width) if channels <= MAX_CHANNELS < min(height, width):
            return pixels.transpose(0, 2, 3, 1)
        case (_, _, _, _):
            return pixels
        case (_, _, channels) if channels <= MAX_CHANNELS:
            return pixels[np.newaxis]
        case (_, _, _):
            return pixels[..., np.newaxis]
        case (_, _):
            return pixels[np.newaxis, ..., np.newaxis]
    raise ValueError(
        "images: expected pixels [height, width], [height, width, channels] or either with a batch first, got"
        f" {pixels.shape}"
    )


def _kind(value: object) -> str:
    return type(value).__name__
