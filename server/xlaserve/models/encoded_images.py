"""Encoded images as a model takes them, by its settings."""

from __future__ import annotations

from xlaserve.images.decoder import Decoded, Encoded, ImageLimits, Place, decode
from xlaserve.models.catalog import Model


def decode_for(model: Model, image: Encoded, place: Place, limits: ImageLimits) -> Decoded:
    """Returns an image as pixels of the model's colours, and of the size that `place` gives it.

    Raises InvalidArgument for a model that takes no pictures, and what `decode` raises.
    """
    settings = model.settings
    return decode(
        image,
        place,
        limits,
        decoding=model.decode,
        color=model.color,
        grey16=settings.grey16,
        resize=model.resize,
        equalize=settings.equalize,
        dtype=model.image.dtype,
    )
