"""Choices of how images become a model's pixels: decoding, fit, colour, layout, depth, range, and grey images of 16
bits."""

from __future__ import annotations

from enum import StrEnum
from typing import Final, Literal

MAX_GREY16: Final = 2**16 - 1


class Fit(StrEnum):
    """How an encoded image comes to have the model's size."""

    RESIZE = "resize"
    """Stretched to it, regardless of its aspect ratio."""
    LETTERBOX = "letterbox"
    """Enlarged or shrunk as a whole until it fills the height or the width, centred, on grey (114)."""
    PAD = "pad"
    """At the top left, on black; shrunk as a whole where it is larger, never enlarged."""
    CROP = "crop"
    """Cut to the model's aspect ratio about its centre, then stretched to its size."""
    CENTER_CROP = "center_crop"
    """Resized as a whole to `shorter_side`, then cut to the model's size about its centre."""
    REJECT = "reject"
    """Not at all: another size is refused."""


CUTS: Final = (Fit.CROP, Fit.CENTER_CROP)
"""Fits that leave parts of an image out."""

Border = int | tuple[int, int, int]
"""The level of all channels, or red, green and blue, of pixels that an image does not cover."""


class Decoding(StrEnum):
    """How JPEG images are decoded."""

    EXACT = "exact"
    """Every pixel, as accurately as libjpeg-turbo can; what Pillow, and so torchvision, gives."""
    FAST = "fast"
    """To a half, a quarter or an eighth of the sides by the decoder itself, where more than enough pixels remain."""
    TENSORFLOW = "tensorflow"
    """Every pixel, as `tf.io.decode_jpeg` does by default: by a transform that is less accurate."""


class Color(StrEnum):
    """The channels of a model's pixels, to which encoded images are converted."""

    GREY = "grey"
    """Luma of ITU-R 601-2: 0.299 red + 0.587 green + 0.114 blue, as Pillow's mode L."""
    RGB = "rgb"
    BGR = "bgr"
    """Blue first, as OpenCV has it."""
    RGBA = "rgba"
    """Opacity last; an image without it is opaque."""
    YUV = "yuv"
    """Luma and two differences of colour around 128, as OpenCV's BGR2YUV."""

    @property
    def channels(self) -> int:
        """Number of channels."""
        return {Color.GREY: 1, Color.RGBA: 4}.get(self, 3)


class Layout(StrEnum):
    """The place of the channels among the axes of a model's image input."""

    CHANNELS_LAST = "channels_last"
    """`[n, height, width, channels]`."""
    CHANNELS_FIRST = "channels_first"
    """`[n, channels, height, width]`."""
    NONE = "none"
    """Of no image: the numbers are a tensor, passed as they come."""


Depth = Literal[8, 16, "float"]
"""The values that each channel of a pixel may have: whole numbers of so many bits, or any float32."""


class Grey16(StrEnum):
    """How grey images of 16 bits become levels from 0 to 255."""

    HIGH_BYTE = "high_byte"
    """By their upper 8 bits."""
    LARGEST = "largest"
    """In proportion to the largest value of each image."""


Window = tuple[int, int]
"""The values of 16 bits that become black and white; those between are scaled, those beyond clipped."""


class PixelRange(StrEnum):
    """The values of black and white in FP16 and FP32 pixels."""

    LEVELS = "0..255"
    """The range of UINT8."""
    UNIT = "0..1"
    """The range that PyTorch's and many other transforms give."""
