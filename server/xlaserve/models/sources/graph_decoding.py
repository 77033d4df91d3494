"""The decoding of encoded images in a graph: the operations from the text to a batch of images, found by their kinds.

Such graphs decode each image in a loop (`tf.map_fn`), or decode one image and make a batch of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray
from tensorflow.python.framework import tensor_util

from xlaserve.models.lowering.replay import CALLS, PASSED_ON
from xlaserve.models.networks.network import Size
from xlaserve.models.sources.graph_operations import DECODERS, PLACEHOLDERS

LOOPS: Final = frozenset({"While", "StatelessWhile"})
ARITHMETIC: Final = frozenset({"Add", "AddV2", "Sub", "Mul", "Div", "RealDiv"})
"""Operations that scale an image with numbers of the graph."""
RESIZES: Final = frozenset({"ResizeBilinear", "ResizeNearestNeighbor", "ResizeBicubic", "ResizeArea"})
WRITES: Final = ("TensorListSetItem", "TensorArrayWriteV3")
"""Operations that put an image of a loop in its place among others."""
PASSING: Final = PASSED_ON | {"EnsureShape", "Squeeze"}
"""Operations that change no number."""
ASIDE: Final = frozenset({"Shape", "ShapeN", "Size", "Rank", "Assert"})
"""Operations that do not continue the path of an image."""


@dataclass(frozen=True)
class Step:
    """An operation that scales or casts images."""

    kind: str
    dtype: tf.DType
    """The type that it gives."""
    number: NDArray[Any] | None = None
    """The other operand of arithmetic."""
    is_number_first: bool = False


@dataclass(frozen=True)
class Decoding:
    """The way from encoded images to a batch of pixels."""

    batch: Any
    """The tensor that has the decoded images, `[n, height, width, channels]`, and that the network reads."""
    steps: tuple[Step, ...]
    """The operations on decoded pixels, other than resizing."""
    channels: int | None
    """Channels that images are decoded to; None for those of each image."""
    size: Size
    """The height and width that images are resized to; None where they are not resized."""
    resize: str
    """The operation that resizes them, in words; empty without one."""
    is_single: bool
    """Whether it decodes one image alone."""


@dataclass(frozen=True, eq=False)
class _Place:
    """A graph, and the operation that runs it, if it is a function of another."""

    graph: Any
    caller: Any = None
    parent: _Place | None = None

    @property
    def is_in_loop(self) -> bool:
        """Whether it is the body of a loop, or called by one."""
        if self.parent is None:
            return False
        return self.caller.type in LOOPS or self.parent.is_in_loop

    def known(self, tensor: Any) -> NDArray[Any] | None:
        """Returns a constant, also where it comes from an outer graph; None for other tensors."""
        tensor = _origin(tensor)
        if (value := tensor_util.constant_value(tensor)) is not None:
            return np.asarray(value)
        index = _index(tensor, self.graph.inputs) if self.parent is not None else None
        return None if index is None or self.parent is None else self.parent.known(self.caller.inputs[index])


def find(graph: Any) -> Decoding | None:
    """Returns the decoding in the graph of a function; None where there is none that can be replaced, or several."""
    decoders = [(place, one) for place in _places(_Place(graph)) for one in _of_kind(place.graph, *DECODERS)]
    return _Path(*decoders[0]).follow() if len(decoders) == 1 else None


def encoded(graph: Any) -> list[Any]:
    """Returns the encoded images that a graph decodes: texts that it takes, or an example in their place."""
    return [one.outputs[0] for one in _of_kind(graph, *PLACEHOLDERS, "Const") if _is_encoded(one.outputs[0])]


class _Path:
    """The path of an image through a graph, from the operation that decodes it."""

    def __init__(self, place: _Place, decoder: Any) -> None:
        self._place = place
        self._is_in_loop = place.is_in_loop or _is_read(decoder.inputs[0])
        self._is_stacked = False
        self._tensor = decoder.outputs[0]
        channels = decoder.get_attr("channels")
        self._channels = None if channels == 0 else int(channels)
        self._steps: list[Step] = []
        if self._tensor.dtype == tf.float32:  # from 0 to 1
            self._steps.append(Step("Mul", tf.float32, np.asarray(1 / 255, np.float32)))
        self._is_known = self._tensor.dtype in (tf.uint8, tf.float32)
        self._size: Size = (None, None)
        self._resize = ""

    def follow(self) -> Decoding | None:
        """Returns the decoding; None where something else is done to the image before it is in a batch."""
        while self._is_known:
            if self._leave_call():
                continue
            if self._is_batch and not self._becomes_another():
                return self._decoding()
            consumers = [one for one in self._tensor.consumers() if one.type not in ASIDE]
            if len(consumers) != 1 or not self._pass(*consumers):
                break
        return None

    @property
    def _is_batch(self) -> bool:
        """Whether the image is in a batch: of all images, or of itself alone."""
        return self._is_stacked or (not self._is_in_loop and self._tensor.shape.rank == 4)

    def _becomes_another(self) -> bool:
        """Whether another batch is made of the one that there is: resized, or one more time of the image alone."""
        tensor = self._tensor
        while len(consumers := [one for one in tensor.consumers() if one.type not in ASIDE]) == 1:
            (operation,) = consumers
            if operation.type in RESIZES or _makes_batch(operation):
                return True
            if operation.type not in PASSING | ARITHMETIC | {"Cast"}:
                return False
            tensor = operation.outputs[0]
        return False

    def _leave_call(self) -> bool:
        place = self._place
        if place.parent is None or place.caller.type not in CALLS:
            return False
        if (index := _index(self._tensor, place.graph.outputs)) is None:
            return False
        self._tensor, self._place = place.caller.outputs[index], place.parent
        return True

    def _pass(self, operation: Any) -> bool:
        """Goes on behind an operation; returns whether it is one whose effect is known."""
        kind, output = operation.type, operation.outputs[0]
        if kind == "Cast":
            self._steps.append(Step(kind, output.dtype))
        elif kind in ARITHMETIC:
            first, second = operation.inputs
            is_first = first is not self._tensor
            if (number := self._place.known(first if is_first else second)) is None:
                return False
            self._steps.append(Step(kind, output.dtype, number, is_first))
        elif kind in RESIZES:
            size = self._place.known(operation.inputs[1])
            if size is None or self._resize:
                return False
            self._size, self._resize = (int(size[0]), int(size[1])), _described(operation)
            self._steps.append(Step("Cast", output.dtype))
        elif kind in CALLS:
            if (index := _index(self._tensor, operation.inputs)) is None:
                return False
            self._place = _Place(_function(operation, "f"), operation, self._place)
            output = self._place.graph.inputs[index]
        elif kind in WRITES:
            if (batch := self._stacked(operation)) is None:
                return False
            self._is_stacked, output = True, batch
        elif kind not in PASSING and not _makes_batch(operation):
            return False
        self._tensor = output
        return True

    def _stacked(self, write: Any) -> Any:
        """Returns the batch of all images of a loop, which ends with one being written to a list; None without one."""
        if write.type == "TensorArrayWriteV3":
            array = _origin(write.inputs[0])
            gathers = [one for one in _of_kind(write.graph, "TensorArrayGatherV3") if _origin(one.inputs[0]) is array]
            return gathers[0].outputs[0] if len(gathers) == 1 else None
        loop = self._place.caller
        if self._place.parent is None or loop.type not in LOOPS:
            return None
        ends = [_origin(output) for output in self._place.graph.outputs]
        if (index := _index(write.outputs[0], ends)) is None:
            return None
        tensor, self._place = loop.outputs[index], self._place.parent
        while len(consumers := tensor.consumers()) == 1:
            (operation,) = consumers
            tensor = operation.outputs[0]
            if operation.type == "TensorListStack":
                return tensor
            if operation.type not in PASSED_ON:
                break
        return None

    def _decoding(self) -> Decoding:
        size = self._size
        if not self._resize and self._tensor.shape.rank == 4:
            size = (self._tensor.shape[1], self._tensor.shape[2])
        is_single = not self._is_stacked
        return Decoding(self._tensor, tuple(self._steps), self._channels, size, self._resize, is_single)


def _places(place: _Place) -> Iterator[_Place]:
    """Yields a graph, the functions that it calls and the bodies of its loops."""
    yield place
    for operation in place.graph.get_operations():
        if operation.type in CALLS | LOOPS:
            body = _function(operation, "body" if operation.type in LOOPS else "f")
            yield from _places(_Place(body, operation, place))


def _function(operation: Any, attribute: str) -> Any:
    return operation.graph._get_function(operation.node_def.attr[attribute].func.name).graph


def _of_kind(graph: Any, *kinds: str) -> list[Any]:
    return [operation for operation in graph.get_operations() if operation.type in kinds]


def _origin(tensor: Any) -> Any:
    """Returns the tensor that is passed on as this one, also into a loop."""
    while tensor.op.type in PASSED_ON | {"Enter"} and len(tensor.op.inputs) == 1:
        (tensor,) = tensor.op.inputs
    return tensor


def _makes_batch(operation: Any) -> bool:
    """Whether an operation makes a batch of one image."""
    match operation.type:
        case "ExpandDims":
            return True
        case "StridedSlice":  # image[tf.newaxis]
            return bool(operation.get_attr("new_axis_mask") == 1 and operation.outputs[0].shape.rank == 4)
        case "Pack":
            return len(operation.inputs) == 1
    return False


def _is_encoded(text: Any) -> bool:
    """Whether a tensor is a text that is decoded as an image, in a loop perhaps."""
    if text.dtype != tf.string:
        return False
    kinds = {consumer.type for consumer in text.consumers()}
    if text.op.type == "Const":
        return bool(kinds & DECODERS)
    return bool(kinds)


def _is_read(text: Any) -> bool:
    """Whether a text comes from a list of texts, in a loop of TensorFlow 1."""
    while text.op.type != "TensorArrayReadV3":
        if not text.op.inputs:
            return False
        text = text.op.inputs[0]
    return True


def _index(tensor: Any, tensors: Any) -> int | None:
    return next((index for index, one in enumerate(tensors) if one is tensor), None)


def _described(operation: Any) -> str:
    options = [name for name in ("half_pixel_centers", "align_corners") if operation.get_attr(name)]
    return " with ".join([operation.type, *options[:1]])
