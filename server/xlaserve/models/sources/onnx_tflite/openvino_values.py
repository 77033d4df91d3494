"""Values of a model that OpenVINO has read, as they are translated, and its operations with the values they take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import tensorflow as tf

from xlaserve.engine.causes import telling_line

LAST: Final = (0, 3, 1, 2)
"""The order of an image's axes, batch, channels, height and width, in a tensor with its channels last."""

Order = tuple[int, ...]


class UntranslatableError(Exception):
    """A model has something that is not translated; the message says what."""


def cause(error: Exception) -> str:
    """Returns the last line of an error of OpenVINO, which tells the cause."""
    return telling_line(([*filter(str.strip, str(error).splitlines())] or ["it gives no reason"])[-1])


class Value(NamedTuple):
    """A value of the model, whose axis `i` is axis `order[i]` of the tensor. Weights are arrays, in order."""

    tensor: Any
    order: Order

    @property
    def is_known(self) -> bool:
        """Whether weights alone determine it."""
        return isinstance(self.tensor, np.ndarray)

    @property
    def rank(self) -> int:
        """The number of its axes."""
        return len(self.order)


class Operation(NamedTuple):
    """An operation with the values that it takes."""

    node: Any
    kind: str
    attributes: dict[str, Any]
    inputs: Sequence[Value]
    tensor: Callable[..., Any]
    """Returns the tensor of a value with its axes in the order that is given, by default as they are in the value."""

    def array(self, index: int) -> Any:
        """Returns an input as an array. Raises UntranslatableError where it depends on the image."""
        value = self.inputs[index]
        if value.is_known:
            return value.tensor
        known = tf.get_static_value(self.tensor(value))
        if known is None:
            raise UntranslatableError(f"{self.kind} with sizes that depend on the image")
        return known

    def numbers(self, index: int) -> list[int]:
        """Returns an input as whole numbers. Raises UntranslatableError where it depends on the image."""
        return [int(one) for one in np.atleast_1d(self.array(index))]

    def axes(self, index: int) -> list[int]:
        """Returns an input as axes of the first one, none of them negative."""
        return [axis % self.inputs[0].rank for axis in self.numbers(index)]

    def side(self, axis: int) -> int | None:
        """Returns the size of the first input along an axis, None where it is not known."""
        value = self.inputs[0]
        size: int | None = value.tensor.shape[value.order[axis]]
        return size


def in_order(rank: int) -> Order:
    """Returns the order of axes that are in order."""
    return tuple(range(rank))


def value(tensor: Any) -> Value:
    """Returns the value of a tensor whose axes are in order."""
    return Value(tensor, in_order(len(tensor.shape)))


def transposed(one: Value, order: Order | None = None) -> Any:
    """Returns a value's tensor or array with its axes in `order`."""
    order = order or in_order(one.rank)
    if order == one.order:
        return one.tensor
    places = [one.order[axis] for axis in np.argsort(order)]
    return (np if one.is_known else tf).transpose(one.tensor, places)
