"""Decoding: encoded bytes to pixels. Blocking functions without state, made for a thread pool: Pillow decodes and
resizes without the interpreter's lock.

The decoded pixels are part of the API, since they change a model's answers:

- JPEG, PNG and WebP; of an animation, the first frame.
- Turned upright as its EXIF says, or its XMP where that has no orientation (`orientation`).
- RGB: transparency is dropped, not blended; grey, palette and CMYK images are converted; of 16 bits the upper 8 stay,
  unless the model says otherwise for grey ones (`config.Grey16`), or has a depth of more than 8 bits: then all bits of
  grey ones stay. Colour profiles are not applied.
- Or what else the model takes (`config.Color`): grey as Pillow's mode L (ITU-R 601-2 luma, rounded) and RGBA, both
  converted before they are resized; BGR and OpenCV's YUV, of what has become of RGB in the end.
- Brought to the model's size by the model's policy (`config.Fit`): stretched, letterboxed or padded; resized by the
  library and the filter that the model says (`config.ResizeSettings`), whose own function is the reference. An image
  that already has the size is left as it is.
- With `decode: tensorflow`, JPEGs are decoded as TensorFlow does by default.
- With `decode: fast`, the JPEG decoder first halves the sides of an image as long as they are at least twice those that
  it is brought to. Pixels then differ by some levels; where it lies does not.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing, nullcontext
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from PIL.ImageFile import ImageFile

from xlaserve.config import (
    PILLOW_BILINEAR,
    Color,
    Decoding,
    Grey16,
    PixelRange,
    ResizeLibrary,
    ResizeSettings,
    Settings,
    Window,
)
from xlaserve.errors import ImageTooLarge, InvalidArgument
from xlaserve.images import colors, deep_pixels, tensorflow_jpeg
from xlaserve.images.fitting import bordered, fitted
from xlaserve.images.frame import Frame
from xlaserve.images.image_file import Hold, Place, opened, placed
from xlaserve.images.image_input import RGB, ImageInput, PixelType
from xlaserve.images.jpeg import JpegFile
from xlaserve.images.orientation import orientation
from xlaserve.images.resizing.resize import picture

_BLOCK_VALUES: Final = 1 << 16

GREY16_WARNING: Final = (
    "grey of 16 bits: the upper 8 bits were taken, so that values up to 4095 are levels 0 to 15;"
    " choose with the model's setting grey16"
)

_MAX_NAMED: Final = 8
"""Images that a warning names."""


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """Bounds on one image, named as in the settings."""

    max_image_bytes: int
    """Most bytes of the encoded image."""
    max_image_pixels: int
    """Height times width, as its header states them."""

    @classmethod
    def of(cls, settings: Settings) -> Self:
        """Returns the limits that are configured."""
        return cls(settings.max_image_bytes, settings.max_image_pixels)


class Decoded(NamedTuple):
    """An image as the model sees it."""

    pixels: NDArray[Any]
    """`[height, width, channels]` of the model's input, colours and type; read-only."""
    frame: Frame
    """The place of the original image in the pixels."""
    warning: str = ""
    """A warning for the client about a choice that no setting made; empty without one."""


Encoded = bytes | memoryview
"""An encoded image, perhaps where it lies in a message."""


def of_images(warning: str, rows: Iterable[int], images: int, name: str = "") -> str:
    """Returns a warning that names which of a request's images it is about, counted from 0; `name` is that of their
    input, where there are several."""
    if images == 1:
        return f"{name}: {warning}" if name else warning
    in_order = sorted(rows)
    named = ", ".join(f"{name or 'images'}[{row}]" for row in in_order[:_MAX_NAMED])
    more = f" and {len(in_order) - _MAX_NAMED} more" if len(in_order) > _MAX_NAMED else ""
    return f"{named}{more}: {warning}"


def decode(
    data: Encoded,
    place: Place,
    limits: ImageLimits,
    hold: Hold = nullcontext,
    decoding: Decoding = Decoding.EXACT,
    *,
    color: Color = Color.RGB,
    grey16: Grey16 | Window | None = None,
    resize: ResizeSettings = PILLOW_BILINEAR,
    equalize: bool = False,
    dtype: PixelType = "uint8",
) -> Decoded:
    """Returns the image as pixels of `color` and `dtype`, and of the size that `place` gives it; grey ones of uint8
    equalized on demand.

    Holds the bytes that decoding takes at its peak, once the header is read and before any pixel is allocated. Raises
    InvalidImage for anything but a whole JPEG, PNG or WebP image, ImageTooLarge before that, and the errors of `place`.
    """
    if len(data) > limits.max_image_bytes:
        raise ImageTooLarge(
            f"image: expected at most {limits.max_image_bytes} encoded bytes (max_image_bytes), got {len(data)}"
        )
    shrink_to = place if decoding is Decoding.FAST else None
    data = bytes(data)
    with opened(data, limits.max_image_pixels, hold, shrink_to, resize.library) as (image, width, height, box):
        source, warning = _decoded(data, image, decoding, color, grey16, library=resize.library, dtype=dtype)
        turn = orientation(image.info)  # which a PNG may hold behind its pixels
        frame = placed(width, height, turn, place)
        pixels = fitted(source, frame, turn, box, resize, dtype=dtype)
        if equalize:
            pixels = colors.equalized(pixels)
        return Decoded(colors.colored(bordered(pixels, frame, color.channels), color), frame, warning)


def _decoded(
    data: bytes,
    image: ImageFile,
    decoding: Decoding,
    color: Color,
    grey16: Grey16 | Window | None,
    *,
    library: ResizeLibrary,
    dtype: PixelType,
) -> tuple[Image.Image | NDArray[np.uint8], str]:
    """Returns the pixels of an opened image in the mode of `color`, or in mode L or F, and a warning for the client.

    `library` resizes them then. The image is closed where others are returned than its own.
    """
    if decoding is Decoding.TENSORFLOW and isinstance(image, JpegFile) and color is not Color.RGBA:
        levels = tensorflow_jpeg.pixels_of(data, image, is_grey=color is Color.GREY)
        if levels is not None:
            # Only of a picture can the pixels be freed once they are turned.
            return picture(levels) if library is ResizeLibrary.PILLOW else levels, ""
    image.load()
    mode = colors.MODES.get(color, "RGB")
    if image.mode != "I;16":
        return colors.to_mode(mode, image), ""
    if dtype != "uint8" and color is not Color.RGBA:
        return colors.to_mode("F", image), ""  # which holds them all, and is resized without rounding
    with closing(image):
        of_8_bits = Image.fromarray(colors.levels(np.asarray(image), grey16))
    return colors.to_mode(mode, of_8_bits), GREY16_WARNING if grey16 is None else ""


def check_pixels(
    array: NDArray[Any], pixel_range: PixelRange = PixelRange.LEVELS, image: ImageInput = RGB
) -> NDArray[Any]:
    """Returns pixels as uint8 `[n, height, width, channels]`: uint8 as it is, others copied, float16 and float32
    rounded. Of an input of more depth, see `deep_pixels.check`.

    `pixel_range` applies to float16 and float32; other types are from 0 to 255. `image` is the input that they are for.

    Raises InvalidArgument for another shape or type, for no images, for values out of their range, and for floats that
    are said to be from 0 to 255 but hold fractions of at most 1: every image would be black.
    """
    array = image.arranged(array)
    if image.is_deep:
        return deep_pixels.check(array, image.dtype)
    if array.dtype == np.uint8:
        return array.view(np.uint8)
    if array.dtype == np.float16:
        array = array.astype(np.float32)
    if array.dtype not in (np.int32, np.float32):
        raise InvalidArgument("pixels", "UINT8, INT32, FP16 or FP32", array.dtype)
    is_unit = array.dtype == np.float32 and pixel_range is PixelRange.UNIT
    white = 1 if is_unit else 255
    least, most = array.min(), array.max()  # either is NaN where any value is
    for extreme in (least, most):
        if not 0 <= extreme <= white:
            raise InvalidArgument("pixels", f"values from 0 to {white}", extreme)
    if array.dtype == np.int32:
        return array.astype(np.uint8)
    levels = np.empty(array.shape, np.uint8)
    values, rounded = array.astype(np.float32, copy=False).reshape(-1), levels.reshape(-1)
    may_be_fractions = most <= 1 and not is_unit
    # In blocks: to get and free temporary memory of the size of a large request takes long, and holds up other threads.
    for start in range(0, len(values), _BLOCK_VALUES):
        block = values[start : start + _BLOCK_VALUES]
        whole: NDArray[np.float32] = np.rint(block * np.float32(255) if is_unit else block)
        if may_be_fractions and not np.array_equal(whole, block):
            raise InvalidArgument(
                "pixels",
                "values from 0 to 255, or pixel_range 0..1 as a parameter of the request or in the model's settings",
                f"fractions from {least:g} to {most:g}",
            )
        rounded[start : start + _BLOCK_VALUES] = whole
    return levels
