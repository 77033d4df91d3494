"""Values of a StableHLO module as they are translated, the graph that they are made in, and the module's attributes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

import ml_dtypes
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from xlaserve.models.sources import stablehlo_weights

Order = tuple[int, ...]
Shape = tuple[int | None, ...]

DTYPES: Final = {
    "f64": np.float64,
    "i1": np.bool_,
    "i16": np.int16,
    "i32": np.int32,
    "i64": np.int64,
    "ui16": np.uint16,
    "ui32": np.uint32,
    "ui64": np.uint64,
    **stablehlo_weights.DTYPES,
}
"""Types of elements, as MLIR names them."""


class UntranslatableModuleError(Exception):
    """A module has something that is not translated; the message says what."""


class UnknownSizeError(UntranslatableModuleError):
    """A size is only known as the program runs."""


class Sizes(NamedTuple):
    """The shape of a value, which is only known as the program runs."""

    tensor: Any
    places: Order
    """The place of each axis in `tensor`, from which a size is read only where it is needed."""

    def of(self, axes: Sequence[int]) -> Sizes:
        """Returns the sizes of `axes`."""
        return Sizes(self.tensor, tuple(self.places[axis] for axis in axes))


@dataclass(frozen=True, eq=False)
class Value:
    """A value of StableHLO.

    `tensor` has a side of 1 where the value repeats what is there, and its axes in another order: the value's axis `i`
    is its `order[i]`.
    """

    tensor: Any
    """An array where weights alone determine it, else a tensor of the graph."""
    shape: Shape
    order: Order
    sizes: Sizes | None = None
    """The sizes of a value that repeats along a side of unknown size."""

    @property
    def is_known(self) -> bool:
        """Whether weights alone determine it."""
        return isinstance(self.tensor, np.ndarray)


class Graph(Protocol):
    """The graph in which operations are made."""

    def tensor(self, value: Value, order: Order | None = None, axes: Iterable[int] = ()) -> Any:
        """Returns a value's tensor, its axes in `order`, as large as the value along `axes`."""

    def whole(self, value: Value) -> tf.Tensor:
        """Returns a value as it is."""


Translate = Callable[[Graph, Any, Sequence[Value]], Value]
"""Returns the result of an operation for its operands. Raises UntranslatableModuleError."""


def identity(sides: Sequence[Any]) -> Order:
    """Returns the order of axes that are in order."""
    return tuple(range(len(sides)))


def inverse(order: Sequence[int]) -> Order:
    """Returns the order that undoes `order`."""
    return tuple(int(place) for place in np.argsort(order))


def known(numbers: Any) -> Value:
    """Returns the value of an array."""
    numbers = np.asarray(numbers)
    return Value(numbers, numbers.shape, identity(numbers.shape))


def side(value: Value, axis: int) -> int | None:
    """Returns the size of a value's tensor along one of the value's axes, None where it is not known."""
    size: int | None = value.tensor.shape[value.order[axis]]
    return size


def name_of(operation: Any) -> str:
    """Returns an operation's name, and that of the function where it is a call: chlo.erf for chlo.erf.impl_0."""
    callee = "callee" in operation.attributes and operation.attributes["callee"].value
    return str(callee.partition(".impl")[0] if callee else operation.name)


def shape(result: Any) -> Shape:
    """Returns the sides of an operation's result, None where one is not known."""
    kind = result.type
    return tuple(None if kind.is_dynamic_dim(axis) else kind.get_dim_size(axis) for axis in range(kind.rank))


def dtype(result: Any) -> tf.DType:
    """Returns the type of the elements of an operation's result."""
    return tf.as_dtype(_dtype(result.type))


def integers(operation: Any, name: str, default: Sequence[int] = ()) -> list[int]:
    """Returns a list of numbers that is an operation's attribute."""
    return [int(one) for one in operation.attributes[name]] if name in operation.attributes else list(default)


def array(attribute: Any) -> NDArray[Any]:
    """Returns the elements of a constant; one, with as many axes, where all are the same."""
    kind = attribute.type
    if attribute.is_splat:
        return np.full([1] * kind.rank, attribute.get_splat_value().value, _dtype(kind))
    if _dtype(kind) == ml_dtypes.bfloat16:
        return stablehlo_weights.value(attribute)
    return np.array(attribute).astype(_dtype(kind))


def _dtype(kind: Any) -> Any:
    name = str(kind.element_type)
    if name not in DTYPES:
        raise UntranslatableModuleError(f"numbers of type {name} are not translated")
    return DTYPES[name]
