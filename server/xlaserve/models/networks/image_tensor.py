"""The image input of a network, recognised by its shape, and the network as a function of pixels with channels last."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import tensorflow as tf

from xlaserve.config import Color, Depth, Layout
from xlaserve.errors import ModelFailed
from xlaserve.images.image_input import (
    COLORS,
    DTYPES,
    FIRST_TO_LAST,
    OF_TEXT,
    PIXEL_TYPES,
    Axes,
    ImageInput,
    PixelType,
    axes_of,
    of_flattened,
)
from xlaserve.models.networks.heads import Raw, TensorShape
from xlaserve.models.networks.network import Size

Call = Callable[..., Raw]
"""Maps the inputs of a network, as it takes them, to its outputs."""

_LAST_TO_FIRST: Final = (0, 3, 1, 2)
_MANY: Final = 16
"""Channels from which on a layout is doubted that takes as many, where the other one has those of a colour."""


class ImageTensor(NamedTuple):
    """The image input of a network."""

    batch: int | None
    """The only batch size that it takes, where it was made for one."""
    size: Size
    dtype: str
    image: ImageInput

    @property
    def takes_levels(self) -> bool:
        """Whether it takes whole numbers, which are not scaled."""
        return "float" not in self.dtype

    @property
    def has_channels_first(self) -> bool:
        """Whether it is `[n, channels, height, width]`."""
        return self.image.axes == "NCHW"

    def declared(self, pixels: tf.Tensor) -> tf.Tensor:
        """Returns pixels `[n, h, w, channels]` as the network declares them."""
        match self.image.axes:
            case "NHW":
                return tf.squeeze(pixels, -1)
            case "NHWC":
                return pixels
            case "NCHW":
                return tf.transpose(pixels, _LAST_TO_FIRST)

    def gives_first(self, output: TensorShape) -> bool:
        """Whether an output, if it is maps, is `[n, channels, height, width]`: as the input is, or by its sides.

        Converters from ONNX leave maps so in models whose images have their channels last.
        """
        match output.shape:
            case (_, first, height, width):
                by_sides = None not in self.size and (height, width) == self.size != (first, height)
                return self.has_channels_first or by_sides
        return False


def image_tensor(
    declared: TensorShape, color: Color | None = None, layout: Layout | None = None, depth: Depth | None = None
) -> ImageTensor:
    """Returns the image input of a network that declares it so, with the settings `color`, `layout` and `depth`.

    Raises ModelFailed where it is none, or where the settings do not fit it.
    """
    axes = _axes(declared, layout)
    batch, *rest = declared.shape or ()
    height, width = rest[1:] if axes == "NCHW" else rest[:2]
    channels = {"NHW": 1, "NHWC": rest[-1], "NCHW": rest[0]}[axes]
    if channels is None and color is None:
        raise ModelFailed(
            f"color: expected the colours of the pixels, as the model leaves it open: {declared}; write color: rgb, or"
            " another that its training had"
        )
    color = color or COLORS.get(channels or 0)
    if color is not None and channels not in (None, color.channels):
        fitting = [str(one) for one in Color if one.channels == channels]
        expected = f"{' or '.join(fitting)} for" if fitting else "none, as encoded images can't become"
        remedy = f"write color: {fitting[0]}" if fitting else "leave color out"
        raise ModelFailed(f"color: expected {expected} {channels} {_plural(channels)}, got {color}; {remedy}")
    channels = channels or (color or Color.RGB).channels
    return ImageTensor(
        batch, (height, width), declared.dtype, ImageInput(channels, color, axes, _pixel_type(declared, color, depth))
    )


def maps_last(maps: tf.Tensor) -> tf.Tensor:
    """Returns `[n, channels, height, width]` as `[n, height, width, channels]`."""
    return tf.transpose(maps, FIRST_TO_LAST)


def channels_last(declared: TensorShape) -> TensorShape:
    """Returns `[n, channels, height, width]` as `[n, height, width, channels]`; other shapes as they are."""
    match declared.shape:
        case (batch, channels, height, width):
            return TensorShape((batch, height, width, channels), declared.dtype)
    return declared


def _axes(declared: TensorShape, layout: Layout | None) -> Axes:
    if layout is Layout.NONE:
        raise ModelFailed(
            "layout: expected that of images, which this kind of model takes alone, got none; leave layout out"
        )
    axes = axes_of(declared.shape, layout) if declared.dtype in DTYPES else None
    if axes == "NHW" and layout is not None:
        raise ModelFailed(f"layout: expected none, as the model's input has no channels: {declared}; leave layout out")
    if axes is not None:
        if layout is not None:
            _check_layout(declared, layout)
        return axes
    if declared.dtype == "string":
        raise ModelFailed(f"source: expected pixels, got {declared}: {OF_TEXT}")
    raise ModelFailed(
        "source: expected an input of images, such as [None, height, width, channels], of"
        f" {', '.join(DTYPES[:-1])} or {DTYPES[-1]}, got {declared}"
        f"{of_flattened(declared.shape) or '; where the model is, export it with such an input'}"
    )


def _pixel_type(declared: TensorShape, color: Color | None, depth: Depth | None) -> PixelType:
    """Returns the type of the pixels of an input. Raises ModelFailed where it can't hold those of `depth`."""
    if depth is None:
        depth = 16 if declared.dtype == "uint16" and color is not Color.YUV else 8
    dtype = PIXEL_TYPES[depth]
    if (depth == 16 and declared.dtype == "uint8") or (depth == "float" and "float" not in declared.dtype):
        fitting = "8" if declared.dtype == "uint8" else "8 or 16"
        raise ModelFailed(
            f"depth: expected {fitting}, as the model's input is {declared}, got {depth}; leave depth out"
        )
    if depth != 8 and color is Color.YUV:
        raise ModelFailed(
            f"depth: expected 8 with color: {color}, whose channels are of 8 bits, got {depth}; leave depth out"
        )
    return dtype


def _check_layout(declared: TensorShape, layout: Layout) -> None:
    """Raises ModelFailed where a side of the image would be its channels, and the other layout has a colour's."""
    _, first, *_, last = declared.shape or ()
    channels, others = (first, last) if layout is Layout.CHANNELS_FIRST else (last, first)
    if others in COLORS and channels is not None and channels >= _MANY:
        other = Layout.CHANNELS_LAST if layout is Layout.CHANNELS_FIRST else Layout.CHANNELS_FIRST
        raise ModelFailed(
            f"layout: expected {other} for the model's input {declared}, of which {layout} takes {channels} for the"
            f" channels; write layout: {other}, or leave it out"
        )


def _plural(channels: int | None) -> str:
    return "channel" if channels == 1 else "channels"
