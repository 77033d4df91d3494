"""The image input of a model file, recognised by its shape. `images.image_input` is that of a model that serves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from xlaserve.images.image_input import COLORS, DTYPES, axes_of
from xlaserve.inspection.model_file.description import Tensor

SIGNED: Final = "int8"
"""The type of levels that quantized networks take; the server makes them of pixels in files that OpenVINO reads."""


class ImageInput(NamedTuple):
    """The input of a model that takes pixels."""

    batch: int | None
    """The only batch size that the file was made for."""
    height: int | None
    width: int | None
    channels: int | None
    is_channels_first: bool = False

    @property
    def text(self) -> str:
        """Colour and size: `grey, 28x28`."""
        color = COLORS.get(self.channels or 0)
        if color is None:
            shown = f"{self.channels or 'any number of'} channels, which only pixels have"
        else:
            shown = color.upper() if color != "grey" else color
        size = f"{self.height or 'any'}x{self.width or 'any'}" if self.height or self.width else "any size"
        return f"{shown}, {size}{', channels first' if self.is_channels_first else ''}"


def image_input(tensor: Tensor) -> ImageInput | None:
    """Returns the image input that a tensor is; None where it is none."""
    if tensor.dtype not in ("", SIGNED, *DTYPES):
        return None
    batch, *sides = tensor.shape or (None,)
    match axes_of(tensor.shape):
        case "NHWC":
            return ImageInput(batch, *_sides(sides, 0), sides[2])
        case "NCHW":
            return ImageInput(batch, *_sides(sides, 1), sides[0], True)
        case "NHW":
            return ImageInput(batch, *_sides(sides, 0), 1)
        case None:
            return None


def _sides(sides: Sequence[int | None], start: int) -> tuple[int | None, int | None]:
    return sides[start], sides[start + 1]
