"""TensorFlow's operations on windows of images, as far as they can be replaced: convolutions and poolings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import tensorflow as tf

from xlaserve.models.lowering.replay import GraphTensor, Node
from xlaserve.models.lowering.windows import Pair, Windows, same

DEPTHWISE: Final = "DepthwiseConv2dNative"
CONVOLUTIONS: Final = frozenset({"Conv2D", DEPTHWISE})
PADS: Final = frozenset({"Pad", "PadV2"})
POOLINGS: Final = frozenset({"MaxPool", "AvgPool"})
TO_BATCH, TO_SPACE = "SpaceToBatchND", "BatchToSpaceND"
"""Operations that TensorFlow puts before and after a convolution to dilate it."""


@dataclass(frozen=True)
class Operation:
    """An operation on windows of images whose size is known."""

    node: Node
    images: GraphTensor
    windows: Windows

    def computed(self, compute: Callable[[tf.Tensor], tf.Tensor]) -> tf.Tensor:
        """Returns the result of `compute` on the images, both channels last, in the operation's own data format."""
        if _format(self.node) == "NHWC":
            return compute(self.images.tensor)
        return tf.transpose(compute(tf.transpose(self.images.tensor, [0, 2, 3, 1])), [0, 3, 1, 2])


@dataclass(frozen=True)
class Convolution(Operation):
    """A convolution."""

    channels: int

    @property
    def kernel(self) -> GraphTensor:
        """The weights `[rows, columns, a, b]`."""
        return self.node.inputs[1]

    @property
    def shape(self) -> Sequence[int]:
        """The shape of the kernel, `[rows, columns, a, b]`."""
        return tuple(self.kernel.shape)

    @property
    def is_depthwise(self) -> bool:
        """Whether each output reads one channel: its kernel has `a * b` outputs."""
        return self.node.kind == DEPTHWISE or 1 == self.shape[2] < self.channels

    @property
    def groups(self) -> int:
        """Groups of `a` channels, of which each of `b` outputs reads one; unless it is DEPTHWISE."""
        return self.channels // self.shape[2]


def convolution(node: Node) -> Convolution | None:
    """Returns the convolution that ends in `node`: a dilated one ends where its batches become images again."""
    if node.kind in CONVOLUTIONS:
        is_inside = [reader.type for reader in readers(node.operation)] == [TO_SPACE]
        return None if is_inside else _convolution(node, node.inputs[0])
    inner = node.inputs[0].node if node.kind == TO_SPACE else None
    if inner is None or inner.kind not in CONVOLUTIONS or len(readers(inner.operation)) > 1:
        return None
    before = inner.inputs[0].node
    if before is None or before.kind != TO_BATCH:
        return None
    block, padding, crops = before.inputs[1].known, before.inputs[2].known, node.inputs[2].known
    is_plain = inner.attribute("padding") == b"VALID" and _sides(inner, "strides") == (1, 1)
    if block is None or padding is None or crops is None or len(block) != 2 or not is_plain:
        return None
    dilated = {"dilations": block.numpy(), "pads": padding.numpy() - crops.numpy()}
    return _convolution(inner, before.inputs[0], **dilated)


def with_padding(found: Convolution) -> Convolution:
    """Returns `found` with the zeros that other operations put around its images as its own padding, as XLA has it."""
    pad, windows = found.images.node, found.windows
    if pad is None or pad.kind not in PADS:
        return found
    numbers, *fill = (value.known for value in pad.inputs[1:])
    if numbers is None or any(value is None or value.numpy() != 0 for value in fill):
        return found
    pads, size = dict(zip(_format(found.node), numbers.numpy(), strict=True)), _size(found.node, pad.inputs[0])
    if size is None or any(pads["N"]) or any(pads["C"]):
        return found
    above, left = (_pair(own + pads[side]) for own, side in zip(windows.pads, "HW", strict=True))
    windows = replace(windows, size=size, pads=(above, left))
    return with_padding(replace(found, images=pad.inputs[0], windows=windows))


def pooling(node: Node) -> Operation | None:
    """Returns the maximum or average pooling that `node` is, within images."""
    if node.kind not in POOLINGS or (size := _size(node, node.inputs[0])) is None:
        return None
    for name in ("ksize", "strides"):
        if sorted(node.attribute(name)) != sorted((1, 1, *_sides(node, name))):
            return None
    windows = _windows(node, size, _sides(node, "ksize"))
    return None if windows is None else Operation(node, node.inputs[0], windows)


def readers(operation: Any) -> list[Any]:
    """Returns the operations that read an operation's first output."""
    return list(operation.outputs[0].consumers())


def _convolution(node: Node, images: GraphTensor, **dilated: Any) -> Convolution | None:
    size, kernel = _size(node, images), node.inputs[1].shape
    channels = images.tensor.shape[_format(node).index("C")] if size else None
    if size is None or channels is None or not kernel.is_fully_defined():
        return None
    windows = _windows(node, size, (kernel[0], kernel[1]), **dilated)
    return None if windows is None else Convolution(node, images, windows, channels)


def _windows(
    node: Node, size: Pair, shape: Pair, dilations: Sequence[int] | None = None, pads: Any = None
) -> Windows | None:
    """Returns the windows of `node`, with the `dilations` and `pads` that come from around it, if any do."""
    strides = _sides(node, "strides")
    if dilations is None:
        dilations = _sides(node, "dilations") if node.kind in CONVOLUTIONS else (1, 1)
    match node.attribute("padding"):
        case _ if pads is not None:
            pass
        case b"SAME":
            pads = [
                same(pixels, 1 + (positions - 1) * dilation, stride)
                for pixels, positions, dilation, stride in zip(size, shape, dilations, strides, strict=True)
            ]
        case b"EXPLICIT":
            explicit = node.attribute("explicit_paddings")
            pads = [explicit[2 * side : 2 * side + 2] for side in map(_format(node).index, "HW")]
        case _:
            pads = [(0, 0), (0, 0)]
    above, left = (_pair(pad) for pad in pads)
    windows = Windows(size, shape, strides, _pair(dilations), (above, left))
    return windows if min(windows.output) > 0 else None


def _size(node: Node, images: GraphTensor) -> Pair | None:
    """Returns the height and width of `images` that `node` reads, where they are known."""
    shape = images.tensor.shape
    if shape.rank != 4 or _format(node) not in {"NHWC", "NCHW"}:
        return None
    height, width = (shape[_format(node).index(side)] for side in "HW")
    return None if height is None or width is None else (height, width)


def _sides(node: Node, name: str) -> Pair:
    """Returns an attribute's numbers for height and width."""
    values = node.attribute(name)
    return _pair([values[_format(node).index(side)] for side in "HW"])


def _pair(values: Sequence[Any]) -> Pair:
    first, second = values
    return int(first), int(second)


def _format(node: Node) -> str:
    return str(node.attribute("data_format").decode())
