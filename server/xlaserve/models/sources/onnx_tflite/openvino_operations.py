"""OpenVINO's operations as TensorFlow's, but for those of windows and sizes, which have modules of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import tensorflow as tf

from xlaserve.models.sources.onnx_tflite import openvino_shapes, openvino_windows
from xlaserve.models.sources.onnx_tflite.openvino_values import Operation, UntranslatableError, Value, in_order, value

Translate = Callable[[Operation], Sequence[Value]]
"""Returns the results of an operation. Raises UntranslatableError."""
GELU: Final = {"ERF": False, "TANH": True}


def _elementwise(compute: Callable[..., Any]) -> Translate:
    """Returns the translation of an operation on each element, which broadcasts."""

    def translate(operation: Operation) -> list[Value]:
        order = _common(operation.inputs)
        tensors = [_aligned(operation, one, order) for one in operation.inputs]
        return [Value(compute(*tensors), order)]

    return translate


def _common(values: Sequence[Value]) -> tuple[int, ...]:
    """Returns the order of axes in which values are combined: the order of the value of most axes that is no weight."""
    rank = max(one.rank for one in values)
    orders = [one.order for one in values if one.rank == rank and not one.is_known]
    unordered = in_order(rank)
    return next((order for order in orders if order != unordered), unordered)


def _aligned(operation: Operation, one: Value, order: tuple[int, ...]) -> Any:
    if one.rank in (0, len(order)):
        return operation.tensor(one, order if one.rank else None)
    missing = len(order) - one.rank
    if one.is_known:
        return operation.tensor(value(one.tensor.reshape((1,) * missing + one.tensor.shape)), order)
    tensor = operation.tensor(one)
    for _ in range(missing):
        tensor = tf.expand_dims(tensor, 0)
    return operation.tensor(value(tensor), order)


def _unary(compute: Callable[[Any, dict[str, Any]], Any]) -> Translate:
    """Returns the translation of an operation on each element of one value, with attributes."""

    def translate(operation: Operation) -> list[Value]:
        one = operation.inputs[0]
        return [Value(compute(operation.tensor(one, one.order), operation.attributes), one.order)]

    return translate


def _with_scalars(compute: Callable[..., Any]) -> Translate:
    """Returns the translation of an operation on each element of one value, whose other inputs are single numbers."""

    def translate(operation: Operation) -> list[Value]:
        one, *others = operation.inputs
        scalars = [np.reshape(operation.array(index), ()) for index in range(1, len(others) + 1)]
        return [Value(compute(operation.tensor(one, one.order), *scalars), one.order)]

    return translate


def _along(compute: Callable[[Any, int], Any]) -> Translate:
    """Returns the translation of an operation along the axis that is its attribute."""

    def translate(operation: Operation) -> list[Value]:
        one = operation.inputs[0]
        axis = one.order[int(operation.attributes["axis"]) % one.rank]
        return [Value(compute(operation.tensor(one, one.order), axis), one.order)]

    return translate


def _reduction(compute: Callable[..., Any]) -> Translate:
    def translate(operation: Operation) -> list[Value]:
        one, axes = operation.inputs[0], operation.axes(1)
        if operation.attributes["keep_dims"]:
            places = [one.order[axis] for axis in axes]
            return [Value(compute(operation.tensor(one, one.order), places, keepdims=True), one.order)]
        return [value(compute(operation.tensor(one), axes))]

    return translate


def _prelu(operation: Operation) -> list[Value]:
    one, slope = operation.inputs
    if slope.rank == 1 and slope.tensor.shape[0] != 1:  # of each channel
        slope = value(operation.array(1).reshape((-1,) + (1,) * (one.rank - 2)))
    steep = _aligned(operation, slope, one.order)
    tensor = operation.tensor(one, one.order)
    return [Value(tf.where(tensor < 0, tensor * steep, tensor), one.order)]


def _quantized(operation: Operation) -> list[Value]:
    """The nearest of `levels` numbers from a lowest to a highest one, which are then mapped to another range."""
    one = operation.inputs[0]
    low, high, to_low, to_high = (_aligned(operation, each, one.order) for each in operation.inputs[1:])
    steps = float(operation.attributes["levels"] - 1)
    tensor = tf.clip_by_value(operation.tensor(one, one.order), tf.minimum(low, high), tf.maximum(low, high))
    level = tf.round((tensor - low) / (high - low) * steps)
    return [Value(level / steps * (to_high - to_low) + to_low, one.order)]


def _division(one: Any, other: Any) -> Any:
    return one / other if one.dtype.is_floating else tf.math.floordiv(one, other)


def _convert(operation: Operation) -> list[Value]:
    one = operation.inputs[0]
    kind = operation.node.get_element_type()
    to = tf.float32 if kind.get_type_name() in ("f16", "bf16") else tf.as_dtype(kind.to_dtype())
    return [Value(tf.cast(operation.tensor(one, one.order), to), one.order)]


def _product(operation: Operation) -> list[Value]:
    one, other = (operation.tensor(each) for each in operation.inputs)
    transposed = operation.attributes
    return [value(tf.matmul(one, other, transposed["transpose_a"], transposed["transpose_b"]))]


def _normalization(operation: Operation) -> list[Value]:
    one, *parts = operation.inputs
    gamma, beta, mean, variance = (operation.array(index) for index in range(1, len(parts) + 1))
    scale = gamma / np.sqrt(variance + operation.attributes["epsilon"])
    channels = [1] * one.rank
    channels[one.order[1]] = -1
    tensor = operation.tensor(one, one.order)
    return [Value(tensor * scale.reshape(channels) + (beta - mean * scale).reshape(channels), one.order)]


def _mvn(operation: Operation) -> list[Value]:
    one = operation.inputs[0]
    places = [one.order[axis] for axis in operation.axes(1)]
    tensor = operation.tensor(one, one.order)
    mean = tf.reduce_mean(tensor, places, keepdims=True)
    centred = tensor - mean
    if not operation.attributes["normalize_variance"]:
        return [Value(centred, one.order)]
    variance, eps = tf.reduce_mean(tf.square(centred), places, keepdims=True), operation.attributes["eps"]
    is_inside = str(operation.attributes["eps_mode"]).lower() == "inside_sqrt"
    return [Value(centred / (tf.sqrt(variance + eps) if is_inside else tf.sqrt(variance) + eps), one.order)]


def _normalize_l2(operation: Operation) -> list[Value]:
    one = operation.inputs[0]
    places = [one.order[axis] for axis in operation.axes(1)]
    tensor, eps = operation.tensor(one, one.order), operation.attributes["eps"]
    squares = tf.reduce_sum(tf.square(tensor), places, keepdims=True)
    is_added = str(operation.attributes["eps_mode"]).lower() == "add"
    return [Value(tensor / tf.sqrt(squares + eps if is_added else tf.maximum(squares, eps)), one.order)]


def _top_k(operation: Operation) -> list[Value]:
    one = operation.inputs[0]
    axis = int(operation.attributes["axis"]) % one.rank
    (count,) = operation.numbers(1)
    order = tuple(place for place in range(one.rank) if place != axis)
    places = np.argsort((*order, axis))  # the axis last
    tensor = tf.transpose(operation.tensor(one), (*order, axis))
    is_most = str(operation.attributes["mode"]).lower() == "max"
    if str(operation.attributes["sort"]).lower() == "index":
        raise UntranslatableError("the operation TopK, sorted by indices")
    values, indices = tf.math.top_k(tensor if is_most else -tensor, count)
    back = tuple(int(place) for place in places)
    to = tf.as_dtype(operation.node.output(1).get_element_type().to_dtype())
    return [Value(values if is_most else -values, back), Value(tf.cast(indices, to), back)]


def _reverse_sequence(operation: Operation) -> list[Value]:
    batch, along = (int(operation.attributes[name]) for name in ("batch_axis", "seq_axis"))
    tensor = operation.tensor(operation.inputs[0])
    lengths = operation.tensor(operation.inputs[1])
    return [value(tf.reverse_sequence(tensor, tf.cast(lengths, tf.int32), along, batch))]


def _einsum(operation: Operation) -> list[Value]:
    tensors = [operation.tensor(one) for one in operation.inputs]
    return [value(tf.einsum(operation.attributes["equation"], *tensors))]


TABLE: Final[Mapping[str, Translate]] = {
    **{
        name: _unary(lambda tensor, _, compute=compute: compute(tensor))  # type: ignore[misc]
        for name, compute in {
            "Abs": tf.abs,
            "Ceiling": tf.math.ceil,
            "Cos": tf.cos,
            "Erf": tf.math.erf,
            "Exp": tf.exp,
            "Floor": tf.floor,
            "HSwish": lambda x: x * tf.nn.relu6(x + 3.0) / 6.0,
            "HSigmoid": lambda x: tf.nn.relu6(x + 3.0) / 6.0,
            "Identity": tf.identity,
            "Log": tf.math.log,
            "LogicalNot": tf.logical_not,
            "Mish": lambda x: x * tf.tanh(tf.nn.softplus(x)),
            "Negative": tf.negative,
            "Relu": tf.nn.relu,
            "Sigmoid": tf.sigmoid,
            "Sign": tf.sign,
            "Sin": tf.sin,
            "SoftPlus": tf.nn.softplus,
            "SoftSign": tf.nn.softsign,
            "Sqrt": tf.sqrt,
            "Tanh": tf.tanh,
        }.items()
    },
    **{
        name: _elementwise(compute)
        for name, compute in {
            "Add": tf.add,
            "Divide": _division,
            "Equal": tf.equal,
            "FloorMod": tf.math.floormod,
            "Greater": tf.greater,
            "GreaterEqual": tf.greater_equal,
            "Less": tf.less,
            "LessEqual": tf.less_equal,
            "LogicalAnd": tf.logical_and,
            "LogicalOr": tf.logical_or,
            "LogicalXor": tf.math.logical_xor,
            "Maximum": tf.maximum,
            "Minimum": tf.minimum,
            "Mod": tf.math.floormod,
            "Multiply": tf.multiply,
            "NotEqual": tf.not_equal,
            "Power": tf.pow,
            "Select": tf.where,
            "SquaredDifference": tf.math.squared_difference,
            "Subtract": tf.subtract,
        }.items()
    },
    **{
        name: _reduction(compute)
        for name, compute in {
            "ReduceL1": lambda x, axes, keepdims=False: tf.reduce_sum(tf.abs(x), axes, keepdims),
            "ReduceL2": lambda x, axes, keepdims=False: tf.sqrt(tf.reduce_sum(tf.square(x), axes, keepdims)),
            "ReduceMax": tf.reduce_max,
            "ReduceMean": tf.reduce_mean,
            "ReduceMin": tf.reduce_min,
            "ReduceProd": tf.reduce_prod,
            "ReduceSum": tf.reduce_sum,
        }.items()
    },
    "BatchNormInference": _normalization,
    "Clamp": _unary(lambda x, own: tf.clip_by_value(x, tf.cast(own["min"], x.dtype), tf.cast(own["max"], x.dtype))),
    "Convert": _convert,
    "Einsum": _einsum,
    "Elu": _unary(lambda x, own: tf.where(x < 0, own["alpha"] * tf.math.expm1(tf.minimum(x, 0.0)), x)),
    "FakeQuantize": _quantized,
    "Gelu": _unary(lambda x, own: tf.nn.gelu(x, approximate=GELU[str(own["approximation_mode"]).upper()])),
    "HardSigmoid": _with_scalars(lambda x, alpha, beta: tf.clip_by_value(x * alpha + beta, 0.0, 1.0)),
    "LogSoftmax": _along(tf.nn.log_softmax),
    "MVN": _mvn,
    "MatMul": _product,
    "NormalizeL2": _normalize_l2,
    "PRelu": _prelu,
    "ReverseSequence": _reverse_sequence,
    "Selu": _with_scalars(
        lambda x, alpha, scale: scale * tf.where(x < 0, alpha * tf.math.expm1(tf.minimum(x, 0.0)), x)
    ),
    "Softmax": _along(tf.nn.softmax),
    "Swish": _with_scalars(lambda x, beta=1.0: x * tf.sigmoid(beta * x)),
    "TopK": _top_k,
    **openvino_shapes.TABLE,
    **openvino_windows.TABLE,
}
"""Translations by the names of OpenVINO's operations."""
