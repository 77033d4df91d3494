"""Convolutions of images that have fewer pixels than the kernel, or that part of the kernel never meets.

XLA exchanges image and kernel where the image, without its padding, has fewer pixels. That leaves a window that is
turned around, which its CPU backend computes number by number. A barrier after the padding keeps XLA from it. Rows and
columns of the kernel that meet nothing but padding, such as all but the middle ones on a single pixel, are left out.
"""

from __future__ import annotations

from math import prod

import tensorflow as tf

from xlaserve.models.lowering.materialize import materialized
from xlaserve.models.lowering.operations import convolution, with_padding
from xlaserve.models.lowering.replay import Node
from xlaserve.models.lowering.windows import Windows


def substitute(node: Node) -> tf.Tensor | None:
    """Replaces convolutions that XLA would turn around, and those of which a part meets nothing but padding."""
    found = convolution(node)
    if found is None or found.is_depthwise or found.groups > 1:
        return None
    found = with_padding(found)
    kernel, windows = found.kernel, found.windows
    met = _met(windows, 0), _met(windows, 1)
    is_whole = windows.shape == tuple(map(len, met))
    # Convolutions that TensorFlow dilates by batches are padded already, and XLA does not turn them around.
    if is_whole and not (found.node is node and is_turned(windows)):
        return None
    if is_whole or kernel.known is None:
        weights = _part(kernel.tensor, met)
    else:
        with tf.init_scope():  # now, and not in the program
            weights = _part(kernel.known, met)
    return found.computed(lambda images: _convolve(images, weights, windows, met))


def is_turned(windows: Windows) -> bool:
    """Returns whether XLA exchanges image and kernel."""
    return prod(windows.shape) > prod(windows.size)


def _met(windows: Windows, side: int) -> range:
    """Returns the kernel's rows, or columns, from the first to the last that meets a pixel of the images."""
    stride, dilation, (before, _) = windows.strides[side], windows.dilations[side], windows.pads[side]
    pixels = range(before, before + windows.size[side])
    meeting = [
        position
        for position in range(windows.shape[side])
        if any(step * stride + position * dilation in pixels for step in range(windows.output[side]))
    ]
    return range(meeting[0], meeting[-1] + 1) if meeting else range(windows.shape[side])


def _part(kernel: tf.Tensor, met: tuple[range, range]) -> tf.Tensor:
    rows, columns = met
    return kernel[rows.start : rows.stop, columns.start : columns.stop]


def _convolve(images: tf.Tensor, weights: tf.Tensor, windows: Windows, met: tuple[range, range]) -> tf.Tensor:
    """Convolves `images` with the part of a kernel that they meet."""
    rows, columns = (_reached(windows, side, positions) for side, positions in enumerate(met))
    padded = materialized(tf.pad(images, windows.padding)[:, rows, columns])
    return tf.nn.conv2d(padded, weights, windows.strides, "VALID", dilations=windows.dilations)


def _reached(windows: Windows, side: int, met: range) -> slice:
    """Returns the rows, or columns, of padded images under this part of the kernel in all its places."""
    dilation, steps = windows.dilations[side], windows.output[side] - 1
    return slice(met[0] * dilation, met[-1] * dilation + steps * windows.strides[side] + 1)
