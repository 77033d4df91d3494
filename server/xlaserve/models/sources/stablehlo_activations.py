"""Activations that TensorFlow's kernels and OpenVINO's compute as one, and StableHLO has as several operations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from xlaserve.models.sources.stablehlo_values import Value


class Activation(NamedTuple):
    """An activation, and the value that it is computed from."""

    compute: Callable[[Any], Any]
    argument: Value


def of(operation: Any, values: Mapping[Any, Value]) -> Activation | None:
    """Returns the activation that ends in `operation`, of one of the `values` so far."""
    match operation.name:
        case "stablehlo.maximum":
            found = _other(operation.operands, 0, values), tf.nn.relu
        case "stablehlo.minimum":
            clipped = _other(operation.operands, 6, values)
            found = _other(_operands(clipped, "stablehlo.maximum"), 0, values), tf.nn.relu6
        case "stablehlo.clamp":
            low, argument, high = operation.operands
            is_relu6 = _is_all(values[low], 0) and _is_all(values[high], 6)
            found = argument if is_relu6 else None, tf.nn.relu6
        case "stablehlo.divide":  # 1 / (1 + exp(-x)), which JAX makes of its logistic function
            total = _other(operation.operands, 1, values, is_first=True)
            exponential = _other(_operands(total, "stablehlo.add"), 1, values)
            negated = _argument(exponential, "stablehlo.exponential")
            found = _argument(negated, "stablehlo.negate"), tf.sigmoid
        case _:
            return None
    argument, compute = found
    value = values.get(argument)
    return None if value is None or value.is_known or not value.tensor.dtype.is_floating else Activation(compute, value)


def _other(operands: Sequence[Any], number: float, values: Mapping[Any, Value], *, is_first: bool = False) -> Any:
    """Returns the operand beside one that is `number` everywhere, or None."""
    for one, other in zip(operands, list(operands)[::-1], strict=True):
        if one in values and _is_all(values[one], number):
            return other
        if is_first:
            break
    return None


def _operands(value: Any, name: str) -> list[Any]:
    """Returns the operands of the operation called `name` that gives `value`; none where another does."""
    producer: Any = None if value is None else value.owner  # a block, where it is an argument
    return list(producer.operands) if getattr(producer, "name", None) == name else []


def _argument(value: Any, name: str) -> Any:
    """Returns the only operand of the operation called `name` that gives `value`, or None."""
    return next(iter(_operands(value, name)), None)


def _is_all(value: Value, number: float) -> bool:
    return value.is_known and value.tensor.size == 1 and bool(value.tensor.item() == number)
