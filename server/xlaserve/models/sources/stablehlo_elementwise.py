"""StableHLO's operations on each element, as TensorFlow's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import tensorflow as tf
from jax.extend.mlir.dialects import stablehlo

from xlaserve.models.sources.stablehlo_values import (
    Graph,
    Translate,
    Value,
    dtype,
    shape,
)

COMPARISONS: Final[Mapping[str, Callable[..., Any]]] = {
    "EQ": tf.equal,
    "NE": tf.not_equal,
    "GE": tf.greater_equal,
    "GT": tf.greater,
    "LE": tf.less_equal,
    "LT": tf.less,
}


def elementwise(compute: Callable[..., Any]) -> Translate:
    """Returns the translation of an elementwise operation; TensorFlow broadcasts operands that are to be repeated."""

    def translate(graph: Graph, operation: Any, operands: Sequence[Value]) -> Value:
        sides = shape(operation.results[0])
        full = [one for one in operands if len(one.shape) == len(sides)]
        order = next((one.order for one in full if not one.is_known), full[0].order)
        tensors = [graph.tensor(one, order if len(one.shape) == len(sides) else None) for one in operands]
        sizes = next((one.sizes for one in full if one.sizes is not None), None)
        return Value(compute(*tensors), sides, order, sizes)

    return translate


def by_type(of_numbers: Callable[..., Any], of_booleans: Callable[..., Any]) -> Translate:
    """Returns the translation of an operation that is another one for booleans than for numbers."""
    return elementwise(lambda *tensors: of_booleans(*tensors) if tensors[0].dtype == tf.bool else of_numbers(*tensors))


def divide(first: Any, second: Any) -> Any:
    """Returns the quotient of tensors; of whole numbers rounded towards 0."""
    return first / second if first.dtype.is_floating else tf.truncatediv(first, second)


def compare(graph: Graph, operation: Any, operands: Sequence[Value]) -> Value:
    """Translates a comparison, by its direction."""
    direction = stablehlo.ComparisonDirectionAttr(operation.attributes["comparison_direction"]).value
    return elementwise(COMPARISONS[direction])(graph, operation, operands)


def convert(graph: Graph, operation: Any, operands: Sequence[Value]) -> Value:
    """Translates a conversion to the type of the result."""
    to = dtype(operation.results[0])
    return elementwise(lambda tensor: _cast(tensor, to))(graph, operation, operands)


def _cast(tensor: Any, to: tf.DType) -> Any:
    """Converts as XLA does: whole numbers are clipped to the limits of their type, and NaN becomes 0."""
    cast = tf.cast(tensor, to)
    if not (tensor.dtype.is_floating and to.is_integer):
        return cast
    low, high = (tf.constant(limit, to) for limit in (to.min, to.max))
    is_low, is_high = tensor <= tf.cast(low, tensor.dtype), tensor >= tf.cast(high, tensor.dtype)
    return tf.where(is_low, low, tf.where(is_high, high, tf.where(tf.math.is_nan(tensor), tf.zeros_like(cast), cast)))
