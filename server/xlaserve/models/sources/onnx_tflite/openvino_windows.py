"""OpenVINO's operations on windows of images, convolutions, poolings and resizing, as TensorFlow's."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import tensorflow as tf

from xlaserve.models.sources.onnx_tflite.openvino_values import LAST, Operation, UntranslatableError, Value, value

IMAGES: Final = 4
"""Number of axes of images."""
ROUNDING: Final[Mapping[str, Callable[[Any], Any]]] = {
    "ceil": np.ceil,
    "floor": np.floor,
    "round_prefer_ceil": lambda places: np.floor(places + 0.5),
    "round_prefer_floor": lambda places: np.ceil(places - 0.5),
}
"""The rounding that finds the nearest pixel, by OpenVINO's name of the rule; `simple` is apart."""
Pads = list[tuple[int, int]]


def _image(operation: Operation) -> Any:
    """Returns the first input with its channels last. Raises UntranslatableError where it is no image."""
    one = operation.inputs[0]
    if one.rank != IMAGES:
        raise UntranslatableError(f"{operation.kind} of other than images")
    return operation.tensor(one, LAST)


def _pads(operation: Operation, windows: Sequence[int], strides: Sequence[int]) -> Pads:
    """Returns the padding of both sides, as the operation has it explicitly or by a rule."""
    own = operation.attributes
    match str(own["auto_pad"]).lower():
        case "valid":
            return [(0, 0)] * 2
        case "same_upper" | "same_lower" as rule:
            pads = []
            for axis, (window, stride) in enumerate(zip(windows, strides, strict=True)):
                if (side := operation.side(2 + axis)) is None:
                    raise UntranslatableError(f"{operation.kind} of images of any size, padded by {rule}")
                total = max((math.ceil(side / stride) - 1) * stride + window - side, 0)
                low, high = total // 2, total - total // 2
                pads.append((low, high) if rule == "same_upper" else (high, low))
            return pads
    return list(zip(map(int, own["pads_begin"]), map(int, own["pads_end"]), strict=True))


def _padded(images: Any, pads: Pads, fill: float = 0.0) -> Any:
    if min(map(min, pads)) < 0:
        raise UntranslatableError("negative padding")
    return tf.pad(images, [(0, 0), *pads, (0, 0)], constant_values=fill) if any(map(any, pads)) else images


def _window(operation: Operation, sides: Sequence[int]) -> tuple[list[int], list[int], Pads]:
    """Returns strides, dilations and padding of a kernel of `sides`."""
    strides, dilations = (list(map(int, operation.attributes[name])) for name in ("strides", "dilations"))
    windows = [1 + (side - 1) * dilation for side, dilation in zip(sides, dilations, strict=True)]
    return strides, dilations, _pads(operation, windows, strides)


def _convolution(operation: Operation) -> list[Value]:
    images, kernel = _image(operation), operation.inputs[1]
    strides, dilations, pads = _window(operation, [int(side) for side in kernel.tensor.shape[2:]])
    weights = operation.tensor(value(operation.array(1).transpose(2, 3, 1, 0)))
    return [Value(tf.nn.conv2d(_padded(images, pads), weights, strides, "VALID", dilations=dilations), LAST)]


def _grouped(operation: Operation) -> list[Value]:
    images, kernel = _image(operation), operation.array(1)
    groups, filters, width, *sides = kernel.shape
    strides, dilations, pads = _window(operation, sides)
    images = _padded(images, pads)
    if width == 1 and strides[0] == strides[1] and (max(dilations) == 1 or max(strides) == 1):
        weights = operation.tensor(value(kernel.transpose(3, 4, 0, 1, 2)[..., 0]))
        return [Value(tf.nn.depthwise_conv2d(images, weights, [1, *strides, 1], "VALID", dilations=dilations), LAST)]
    weights = operation.tensor(value(kernel.reshape(groups * filters, width, *sides).transpose(2, 3, 1, 0)))
    return [Value(tf.nn.conv2d(images, weights, strides, "VALID", dilations=dilations), LAST)]


def _transposed(operation: Operation) -> list[Value]:
    images, kernel = _image(operation), operation.array(1)
    own = operation.attributes
    strides, dilations = (list(map(int, own[name])) for name in ("strides", "dilations"))
    if max(dilations) > 1 or len(operation.inputs) > 2:
        raise UntranslatableError(f"{operation.kind} of this form")
    sides = kernel.shape[2:]
    extra = [int(one) for one in own["output_padding"]]
    if str(own["auto_pad"]).lower() not in ("explicit", "valid"):
        raise UntranslatableError(f"{operation.kind} of this form")
    pads = _pads(operation, sides, strides)
    weights = operation.tensor(value(kernel.transpose(2, 3, 1, 0)))
    shape = tf.shape(images)
    whole = [(shape[1 + axis] - 1) * strides[axis] + sides[axis] for axis in range(2)]
    large = tf.nn.conv2d_transpose(images, weights, [shape[0], *whole, kernel.shape[1]], strides, "VALID")
    # The padding of the result is cut off what comes of all positions; what is added at the ends may lie beyond that.
    large = _padded(large, [(0, one) for one in extra])
    (top, bottom), (left, right) = pads
    height, width = (whole[axis] + extra[axis] for axis in range(2))
    return [Value(large[:, top : height - bottom, left : width - right], LAST)]


def _pooled(operation: Operation, compute: Callable[[Any, list[int], list[int], Pads], Any]) -> list[Value]:
    images, own = _image(operation), operation.attributes
    kernel, strides = (list(map(int, own[name])) for name in ("kernel", "strides"))
    if max(own.get("dilations", [1])) > 1:
        raise UntranslatableError(f"{operation.kind} with dilations")
    pads = _pads(operation, kernel, strides)
    if "ceil" in str(own["rounding_type"]).lower():
        for axis, (low, high) in enumerate(pads):
            if (side := operation.side(2 + axis)) is None:
                raise UntranslatableError(f"{operation.kind} of images of any size, rounded up")
            pads[axis] = (low, high + -(side + low + high - kernel[axis]) % strides[axis])
    return [Value(compute(images, kernel, strides, pads), LAST)]


def _max_pool(operation: Operation) -> list[Value]:
    return _pooled(
        operation,
        lambda images, kernel, strides, pads: tf.nn.max_pool2d(
            _padded(images, pads, images.dtype.min), kernel, strides, "VALID"
        ),
    )


def _average_pool(operation: Operation) -> list[Value]:
    def compute(images: Any, kernel: list[int], strides: list[int], pads: Pads) -> Any:
        means = tf.nn.avg_pool2d(_padded(images, pads), kernel, strides, "VALID")
        if not any(map(any, pads)) or not operation.attributes["exclude-pad"]:
            return means
        return means / tf.nn.avg_pool2d(_padded(tf.ones_like(images), pads), kernel, strides, "VALID")

    return _pooled(operation, compute)


def _resized(operation: Operation) -> list[Value]:
    own, one = operation.attributes, operation.inputs[0]
    target = operation.node.output(0).get_partial_shape()
    axes = _resized_axes(operation)
    old, new = [operation.side(axis) for axis in axes], [target[axis] for axis in axes]
    if one.rank != IMAGES or None in old or any(side.is_dynamic for side in new):
        raise UntranslatableError(f"{operation.kind} of images of any size")
    if any(map(any, (own["pads_begin"], own["pads_end"]))) or own["antialias"]:
        raise UntranslatableError(f"{operation.kind} with padding or antialiasing")
    images = operation.tensor(one, one.order)
    how, mode, nearest = (str(own[name]).lower() for name in ("coordinate_transformation_mode", "mode", "nearest_mode"))
    for axis, side, to in zip(axes, old, new, strict=True):
        assert side is not None
        place = one.order[axis]
        images = _resized_along(images, place, side, to.get_length(), how=how, mode=mode, nearest=nearest)
    return [Value(images, one.order)]


def _resized_axes(operation: Operation) -> list[int]:
    """Returns the axes that are resized: the last input, by default all but batch and channels."""
    has_scales = operation.node.get_type_info().version_id == "opset4"  # beside the sizes
    if len(operation.inputs) > (3 if has_scales else 2):
        return operation.axes(len(operation.inputs) - 1)
    return [*range(2, operation.inputs[0].rank)]


def _resized_along(images: Any, axis: int, side: int, to: int, *, how: str, mode: str, nearest: str) -> Any:
    """Resizes along one axis: what images are resized by is separable."""
    if side == to:
        return images
    scale, index = side / to, np.arange(to)
    match how:
        case "half_pixel" | "pytorch_half_pixel":
            places = (index + 0.5) * scale - 0.5 if to > 1 or how == "half_pixel" else index * 0.0
        case "tf_half_pixel_for_nn":
            places = (index + 0.5) * scale
        case "asymmetric":
            places = index * scale
        case "align_corners":
            places = index * ((side - 1) / (to - 1) if to > 1 else 0.0)
        case _:
            raise UntranslatableError(f"Interpolate by {how}")
    if mode == "nearest":
        rounded = ROUNDING.get(nearest, np.floor if to > side else np.ceil)(places)
        return tf.gather(images, np.clip(rounded, 0, side - 1).astype(np.int32), axis=axis)
    if "linear" not in mode:
        raise UntranslatableError(f"Interpolate in the mode {mode}")
    places = np.clip(places, 0, side - 1)
    low = np.floor(places).astype(np.int32)
    shares = (places - low).astype(np.float32).reshape([-1 if one == axis else 1 for one in range(IMAGES)])
    first = tf.gather(images, low, axis=axis)
    return first + (tf.gather(images, np.minimum(low + 1, side - 1), axis=axis) - first) * shares


TABLE: Final[Mapping[str, Callable[[Operation], Sequence[Value]]]] = {
    "AvgPool": _average_pool,
    "Convolution": _convolution,
    "ConvolutionBackpropData": _transposed,
    "GroupConvolution": _grouped,
    "Interpolate": _resized,
    "MaxPool": _max_pool,
}
