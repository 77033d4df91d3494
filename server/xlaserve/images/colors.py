"""Colours of decoded pictures: conversion from grey and others to the channels of a model, and of 16 bits to 8."""

from __future__ import annotations

from contextlib import closing
from functools import lru_cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from xlaserve.config import Border, Color, Grey16, Window

_BLOCK_VALUES: Final = 1 << 16
MODES: Final = {Color.GREY: "L", Color.RGBA: "RGBA"}
"""Pillow's mode of the colours that pictures are converted to before they are resized; RGB for the others."""


def to_mode(mode: str, image: Image.Image) -> Image.Image:
    """Returns the image in `mode`, or in mode L, which is cheaper to resize, where it is grey and opaque.

    The image given is closed where another one is returned, so that only the pixels of one take memory from then on.
    """
    if image.mode == mode or (image.mode == "L" and mode == "RGB"):
        return image
    if image.mode == "CMYK" and mode != "RGB":  # Pillow converts it to RGB as well, but keeps all three
        image = to_mode("RGB", image)
    if mode != "RGBA":
        image.info.pop("transparency", None)  # else Pillow looks for a place to keep it
    with closing(image):
        return image.convert(mode)


def colored(pixels: NDArray[Any], color: Color) -> NDArray[Any]:
    """Returns `[height, width, channels]` of `color`, of pixels of the mode in `MODES`."""
    match color:
        case Color.BGR:
            return pixels[:, :, ::-1]
        case Color.YUV:
            return _yuv(pixels)
        case Color.GREY | Color.RGB | Color.RGBA:
            return pixels


def in_channels(border: Border, channels: int) -> Border:
    """Returns a colour for pixels of so many channels: of one channel its luma, as Pillow's mode L."""
    if isinstance(border, int) or channels > 1:
        return border
    red, green, blue = border
    return (19595 * red + 38470 * green + 7471 * blue + (1 << 15)) >> 16


def _yuv(rgb: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Returns the levels that OpenCV's BGR2YUV gives, which computes with 14 bits behind the point."""
    half = 1 << 13
    red, green, blue = (rgb[:, :, channel].astype(np.int32) for channel in range(3))
    luma = (4899 * red + 9617 * green + 1868 * blue + half) >> 14
    differences = (
        ((other - luma) * factor + (128 << 14) + half) >> 14 for other, factor in ((blue, 8061), (red, 14369))
    )
    return np.clip(np.stack([luma, *differences], axis=2), 0, 255).astype(np.uint8)


def displayed(pixels: NDArray[np.uint8], color: Color) -> NDArray[np.uint8]:
    """Returns `[height, width, channels]` of `color` as Pillow has it: `[height, width]` of grey, else RGB or RGBA."""
    match color:
        case Color.GREY:
            return pixels[:, :, 0]
        case Color.BGR:
            return np.ascontiguousarray(pixels[:, :, ::-1])
        case Color.YUV:
            return _rgb(pixels)
        case Color.RGB | Color.RGBA:
            return pixels


def _rgb(yuv: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Returns the inverse of `_yuv`, up to the rounding there."""
    luma, blue, red = (yuv[:, :, channel].astype(np.float32) for channel in range(3))
    blue, red = (luma + (other - 128) * ((1 << 14) / factor) for other, factor in ((blue, 8061), (red, 14369)))
    green = ((luma * (1 << 14)) - 4899 * red - 1868 * blue) / 9617
    rgb: NDArray[np.float32] = np.stack([red, green, blue], axis=2)
    return np.rint(np.clip(rgb, 0, 255)).astype(np.uint8)


def equalized(grey: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Returns the levels of an image of one channel with its histogram equalized, as `cv2.equalizeHist` does."""
    counts = np.bincount(grey.ravel(), minlength=256)
    darkest = counts.nonzero()[0][0]
    rest = grey.size - counts[darkest]
    if not rest:  # one level alone stays as it is
        return grey
    counts[darkest] = 0
    shares = np.cumsum(counts).astype(np.float32) * (np.float32(255) / np.float32(rest))
    table: NDArray[np.uint8] = np.rint(shares).astype(np.uint8)
    return table[grey]


def levels(values: NDArray[np.uint16], grey16: Grey16 | Window | None) -> NDArray[np.uint8]:
    """Returns values of 16 bits as levels from 0 to 255. Pillow would clip them, not scale."""
    if grey16 is None or grey16 is Grey16.HIGH_BYTE:
        return (values >> 8).astype(np.uint8)
    table = _window(*((0, int(values.max()) or 1) if grey16 is Grey16.LARGEST else grey16))
    levels = np.empty(values.shape, np.uint8)
    rows = max(1, _BLOCK_VALUES // values.shape[1])  # NumPy makes eight bytes of each index
    for start in range(0, len(values), rows):
        np.take(table, values[start : start + rows], out=levels[start : start + rows], mode="clip")
    return levels


@lru_cache(maxsize=16)
def _window(low: int, high: int) -> NDArray[np.uint8]:
    """Returns the level of each value of 16 bits: 0 up to `low`, 255 from `high` on."""
    share = (np.arange(1 << 16, dtype=np.float32) - low) / (high - low)
    return np.rint(np.clip(share, 0, 1) * 255).astype(np.uint8)
