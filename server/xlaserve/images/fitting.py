"""Fitting: a decoded image turned upright, resized and given its border, as its frame says."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from xlaserve.config import ResizeLibrary, ResizeSettings
from xlaserve.images import colors
from xlaserve.images.deep_pixels import from_floats
from xlaserve.images.frame import LETTERBOX_LEVEL, Frame, Region
from xlaserve.images.image_input import PixelType
from xlaserve.images.orientation import SIDEWAYS, TURNS
from xlaserve.images.resizing.resize import Resized, array, by_pillow, of_pixels, picture

_TYPES: Final[Mapping[PixelType, type[Any]]] = {"uint8": np.uint8, "uint16": np.uint16, "float32": np.float32}


def fitted(
    source: Image.Image | NDArray[np.uint8],
    frame: Frame,
    turn: int,
    box: Region | None,
    resize: ResizeSettings,
    *,
    dtype: PixelType = "uint8",
) -> NDArray[Any]:
    """Returns a decoded image resized and upright, as `[height, width, channels]` of its mode, in `dtype`.

    `box` is the part of the decoded pixels, before they are turned, that is the image; None for all of them. An image
    of Pillow's may be closed then, so that its pixels don't take memory beside what became of them.
    """
    to = _resizing(frame, turn, box)
    if resize.library is not ResizeLibrary.PILLOW:
        upright = _upright(_picture(source), turn) if turn in TURNS else source
        return of_pixels(array(upright), to, resize, _TYPES[dtype])
    image = _picture(source)
    if to.is_whole:  # before the turn, which is then one of fewer pixels
        image = _upright(by_pillow(image, to.sideways if turn in SIDEWAYS else to, resize.filter), turn)
    else:
        image = by_pillow(_upright(image, turn), to, resize.filter)
    return from_floats(array(image), dtype)


def bordered(pixels: NDArray[Any], frame: Frame, channels: int) -> NDArray[Any]:
    """Returns the model's whole input: an image, or its levels in all channels where it has only one, and the border
    that it does not cover, which is opaque."""
    height, width = pixels.shape[:2]
    if (height, width) == (frame.input_height, frame.input_width):
        return np.broadcast_to(pixels, (height, width, channels))
    canvas = np.empty((frame.input_height, frame.input_width, channels), pixels.dtype)
    grey = LETTERBOX_LEVEL * 257 if pixels.dtype == np.uint16 else LETTERBOX_LEVEL
    border = grey if frame.border is None else frame.border
    canvas[:, :, : min(3, channels)] = colors.in_channels(border, channels)
    canvas[:, :, 3:] = 255
    top, left = max(0, frame.top), max(0, frame.left)
    canvas[top : top + height, left : left + width] = pixels
    return canvas


def _picture(source: Image.Image | NDArray[np.uint8]) -> Image.Image:
    return source if isinstance(source, Image.Image) else picture(source)


def _upright(image: Image.Image, turn: int) -> Image.Image:
    """Returns an image turned upright; the one given is closed where it is not that one."""
    if turn not in TURNS:
        return image
    with closing(image):
        return image.transpose(TURNS[turn])


def _resizing(frame: Frame, turn: int, box: Region | None) -> Resized:
    """Returns the resizing of a decoded image once it is upright."""
    left, top, right, bottom = frame.part
    if box is not None:
        width, height = box[2:] if turn not in SIDEWAYS else (box[3], box[2])
        across, down = width / frame.width, height / frame.height
        left, top, right, bottom = left * across, top * down, right * across, bottom * down
    return Resized((left, top, right, bottom), frame.fitted_width, frame.fitted_height, frame.seen)
