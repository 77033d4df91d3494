"""The image input of a model: the number and meaning of its channels, and the axes of its pixels."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from xlaserve.config import Color, Depth, Layout
from xlaserve.errors import InvalidArgument

Axes = Literal["NHWC", "NCHW", "NHW"]
"""The axes of an image tensor: batch, height, width and channels."""

PixelType = Literal["uint8", "uint16", "float32"]
"""NumPy's name of the type of pixels on the way from a request to a program."""
PIXEL_TYPES: Final[Mapping[Depth, PixelType]] = {8: "uint8", 16: "uint16", "float": "float32"}
"""The type of pixels of each depth."""

DTYPES: Final = ("float32", "float16", "bfloat16", "float64", "uint8", "uint16", "int32")
"""Types that pixels have in models."""
MIN_FLAT: Final = 64
"""Pixels of the smallest images that are taken for such where they are flattened: 8x8."""
FLAT_CHANNELS: Final = (1, 3)
"""Channels that flattened images commonly have."""
COLORS: Final = {color.channels: color for color in (Color.GREY, Color.RGB, Color.RGBA)}
"""The colours of models by their channels, unless the settings say otherwise."""
FIRST_TO_LAST: Final = (0, 2, 3, 1)
"""Axes of `[n, channels, height, width]`, ordered with the channels last."""


@dataclass(frozen=True, slots=True)
class ImageInput:
    """The image input of a model. Queues and programs have its pixels as `[n, height, width, channels]` of `dtype`."""

    channels: int = 3
    color: Color | None = Color.RGB
    """The meaning of the channels, to which encoded images are converted; None where only pixels are taken."""
    axes: Axes = "NHWC"
    """The axes that the model itself declares, which metadata show. Clients may send NHWC to any model."""
    dtype: PixelType = "uint8"
    """The type of its pixels: uint8 levels unless the model has a depth of more than 8 bits."""

    @property
    def is_deep(self) -> bool:
        """Whether its pixels have more than 8 bits."""
        return self.dtype != "uint8"

    @property
    def ranks(self) -> tuple[int, ...]:
        """Numbers of axes that pixels of a request may have."""
        return (3, 4) if self.channels == 1 else (4,)

    def shape(self, images: int, height: int, width: int) -> tuple[int, ...]:
        """Returns the shape of pixels as the model declares them."""
        match self.axes:
            case "NHWC":
                return images, height, width, self.channels
            case "NCHW":
                return images, self.channels, height, width
            case "NHW":
                return images, height, width

    def text(self, height: int | str = "height", width: int | str = "width") -> str:
        """Returns the shape of pixels in words: `[n, height, width, 3]`."""
        sides = {"N": "n", "H": str(height), "W": str(width), "C": str(self.channels)}
        return f"[{', '.join(sides[axis] for axis in self.axes)}]"

    def arranged_shape(self, shape: Sequence[int]) -> tuple[int, int, int, int]:
        """Returns the shape `[n, height, width, channels]` of pixels that a request has in `shape`.

        Raises InvalidArgument where they are not of this input.
        """
        match tuple(shape), self._is_first(shape):
            case (images, _, height, width), True:
                return images, height, width, self.channels
            case (images, height, width, channels), False if channels == self.channels:
                return images, height, width, channels
            case (images, height, width), False if self.channels == 1:
                return images, height, width, 1
        raise InvalidArgument("pixels", f"shape {self.text()} of at least one pixel", list(shape))

    def is_arranged(self, shape: Sequence[int]) -> bool:
        """Whether pixels of `shape` need not be copied to have their channels last."""
        return self.channels == 1 or not self._is_first(shape)

    def arranged(self, pixels: NDArray[Any]) -> NDArray[Any]:
        """Returns the pixels of a request as `[n, height, width, channels]`: a view, or a copy where the channels came
        first. Raises InvalidArgument where they are not of this input, or there are none."""
        shape = self.arranged_shape(pixels.shape)
        if pixels.size == 0:
            raise InvalidArgument("pixels", f"shape {self.text()} of at least one pixel", list(pixels.shape))
        if self.is_arranged(pixels.shape):
            return pixels.reshape(shape)
        return np.ascontiguousarray(pixels.transpose(FIRST_TO_LAST))

    def _is_first(self, shape: Sequence[int]) -> bool:
        """Whether pixels of `shape` have their channels first, which only a model that declares them so takes."""
        return self.axes == "NCHW" and len(shape) == len("NCHW") and shape[1] == self.channels


def axes_of(shape: Sequence[int | None] | None, layout: Layout | None = None) -> Axes | None:
    """Returns the axes of an image input by its shape; None where that is of no image.

    Without a layout, channels come first where there are as many as colours have and both other sides are longer. With
    `Layout.NONE`, no shape is of an image.
    """
    if layout is Layout.NONE:
        return None
    match shape:
        case (_, first, *sides) if len(sides) == 2:
            is_first = layout is Layout.CHANNELS_FIRST if layout else first in COLORS and all(map(_is_long, sides))
            return "NCHW" if is_first else "NHWC"
        case (_, _, _):
            return "NHW"
    return None


def of_flattened(shape: Sequence[int | None] | None) -> str:
    """Returns the next step for an input of flattened square images, after a semicolon; empty for other inputs."""
    match shape:
        case (_, int(count)) if count >= MIN_FLAT:
            for channels in FLAT_CHANNELS:
                side = math.isqrt(count // channels)
                if side**2 * channels == count:
                    return (
                        "; if these are the pixels of images, flatten them in the model: keras.Sequential([keras.Input("
                        f'({side}, {side}, {channels})), keras.layers.Flatten(), model]).save("model.keras")'
                    )
    return ""


def _is_long(side: int | None) -> bool:
    """Whether a side is too long to be a number of channels."""
    return side is None or side > max(COLORS)


EXPORT: Final = (
    "tf.saved_model.save(model, folder,"
    " signatures=tf.function(model).get_concrete_function(tf.TensorSpec([None, HEIGHT, WIDTH, 3])))"
)
"""The line that exports a model from its pixels on."""
OF_TEXT: Final = (
    "text, such as encoded images, which the server decodes itself; where the model is, export it from the pixels on:"
    f" {EXPORT}"
)
"""Words for an input of strings, and the export with which the model can be served."""
WITHOUT_FUNCTION: Final = (
    "expected a signature, or a function of one image input, got a SavedModel of neither; where the model is, write it"
    f" with a signature: {EXPORT}"
)
"""Words for a SavedModel that can't be called, and the export with which the model can be served."""

RGB: Final = ImageInput()
"""The image input of most models."""
NO_IMAGE: Final = ImageInput(0, None)
"""Stands for the image input of a model that takes no images."""
