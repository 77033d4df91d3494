"""Encoded images as a model takes them, by its settings."""

from __future__ import annotations

from contextlib import nullcontext
from typing import NamedTuple

from xlaserve.config import Color, Decoding, Grey16, ResizeSettings, Window
from xlaserve.images.decoder import Decoded, Encoded, ImageLimits, decode
from xlaserve.images.image_file import Hold, Place
from xlaserve.images.image_input import ImageInput, PixelType
from xlaserve.models.catalog import Model


class Conversion(NamedTuple):
    """Arguments of `images.decoder.decode` that decide which pixels an encoded image becomes, but not its place in the
    model's input."""

    decoding: Decoding
    color: Color
    grey16: Grey16 | Window | None
    resize: ResizeSettings
    equalize: bool
    dtype: PixelType


def conversion(model: Model, image: ImageInput | None = None) -> Conversion:
    """Returns how images become the pixels of an input, the model's first by default.

    Raises InvalidArgument for a first input that takes no pictures; others must take them.
    """
    settings = model.settings
    color = model.color if image is None else image.color
    assert color is not None
    dtype = (image or model.image).dtype
    return Conversion(model.decode, color, settings.grey16, model.resize, settings.equalize, dtype)


def decode_for(
    model: Model,
    encoded: Encoded,
    place: Place,
    limits: ImageLimits,
    hold: Hold = nullcontext,
    *,
    image: ImageInput | None = None,
) -> Decoded:
    """Returns an image as an input of the model takes it, in the size that `place` gives it; see `conversion`.

    Raises what that and `decode` raise.
    """
    return decode(encoded, place, limits, hold, **conversion(model, image)._asdict())
