"""StableHLO's operations on windows of images, convolutions and poolings, as TensorFlow's, channels last."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, Final

import numpy as np
import tensorflow as tf
from jax.extend.mlir.dialects import stablehlo

from xlaserve.models.lowering.windows import same
from xlaserve.models.sources.stablehlo_values import (
    Graph,
    UntranslatableModuleError,
    Value,
    dtype,
    integers,
    inverse,
    shape,
)

IMAGES: Final = 4
"""Axes of images."""


def convolution(graph: Graph, operation: Any, operands: Sequence[Value]) -> Value:
    """Translates a convolution of images, with groups and dilated perhaps, or transposed."""
    sides, to = shape(operation.results[0]), dtype(operation.results[0])
    if len(sides) != IMAGES:
        raise UntranslatableModuleError("a convolution of other than images is not translated")
    attributes = operation.attributes
    reversals = attributes["window_reversal"] if "window_reversal" in attributes else ()  # noqa: SIM401 - no mapping
    if int(attributes["batch_group_count"]) != 1 or any(map(bool, reversals)):
        raise UntranslatableModuleError("a convolution of this form is not translated")
    axes = stablehlo.ConvDimensionNumbers(attributes["dimension_numbers"])
    of_images = [axes.input_batch_dimension, *axes.input_spatial_dimensions, axes.input_feature_dimension]
    of_kernel = [
        *axes.kernel_spatial_dimensions,
        axes.kernel_input_feature_dimension,
        axes.kernel_output_feature_dimension,
    ]
    pixels, weights = (
        tf.cast(graph.tensor(operand, inverse(places), range(IMAGES)), to)
        for operand, places in zip(operands, (of_images, of_kernel), strict=True)
    )
    strides = integers(operation, "window_strides", [1, 1])
    dilations = integers(operation, "rhs_dilation", [1, 1])
    pads = _pairs(operation, 2)
    rows, columns, width, filters = weights.shape
    order = inverse([axes.output_batch_dimension, *axes.output_spatial_dimensions, axes.output_feature_dimension])
    if (spread := integers(operation, "lhs_dilation", [1, 1])) != [1, 1]:
        if {*strides, *dilations} != {1} or width != pixels.shape[-1]:
            raise UntranslatableModuleError("a transposed convolution of this form is not translated")
        return Value(_transposed(pixels, weights, spread, pads), sides, order)
    padding: Any = "SAME"
    wanted = [
        same(size, 1 + (positions - 1) * dilation, stride)
        for size, positions, dilation, stride in zip(
            pixels.shape[1:3], (rows, columns), dilations, strides, strict=True
        )
    ]
    if pads != wanted:
        pixels, padding = _padded(pixels, pads, 0), "VALID"
    channels = pixels.shape[-1]
    if 1 == width < channels and strides[0] == strides[1] and (max(dilations) == 1 or strides == [1, 1]):
        weights = tf.reshape(weights, [rows, columns, channels, filters // channels])
        result = tf.nn.depthwise_conv2d(pixels, weights, [1, *strides, 1], padding, dilations=dilations)
    else:
        result = tf.nn.conv2d(pixels, weights, strides, padding, dilations=dilations)
    return Value(result, sides, order)


def _transposed(pixels: Any, weights: Any, spread: Sequence[int], pads: Sequence[tuple[int, int]]) -> Any:
    """Convolves `pixels` that are `spread`, with zeros between them, padded by `pads`."""
    *shape_of_kernel, _, filters = weights.shape
    sizes = [
        (size - 1) * step + positions
        for size, step, positions in zip(pixels.shape[1:3], spread, shape_of_kernel, strict=True)
    ]
    kernel = tf.transpose(weights[::-1, ::-1], [0, 1, 3, 2])
    whole = tf.nn.conv2d_transpose(pixels, kernel, [tf.shape(pixels)[0], *sizes, filters], spread, "VALID")
    # Which is what comes of padding by all of the kernel but one position.
    crops = [[positions - 1 - pad for pad in side] for positions, side in zip(shape_of_kernel, pads, strict=True)]
    if min(map(min, crops)) < 0:
        raise UntranslatableModuleError("a transposed convolution with more padding than its kernel is not translated")
    rows, columns = (slice(low, size - high) for size, (low, high) in zip(sizes, crops, strict=True))
    return whole[:, rows, columns]


def pooling(graph: Graph, operation: Any, operands: Sequence[Value]) -> Value:
    """Translates the maximum, or the sum, of windows of images."""
    images, *starts = operands
    rank = len(images.shape)
    window = integers(operation, "window_dimensions")
    strides = integers(operation, "window_strides", [1] * rank)
    dilations = {*integers(operation, "base_dilations", [1]), *integers(operation, "window_dilations", [1])}
    pads = _pairs(operation, rank)
    of_windows = [axis for axis in range(rank) if (window[axis], strides[axis], pads[axis]) != (1, 1, (0, 0))]
    kind = of_region(operation)
    if rank != IMAGES or len(starts) != 1 or len(of_windows) > 2 or dilations != {1}:
        raise UntranslatableModuleError("a reduction of windows of other than images is not translated")
    others = [axis for axis in range(rank) if axis not in of_windows]
    # Rows and columns in the middle, and the channels, whose number is known, last.
    first = next((axis for axis in others if images.shape[axis] is None), others[0])
    middle = [*of_windows, *(axis for axis in others if axis != first)]
    places = [first, *middle]
    order = inverse(places)
    tensor = graph.tensor(images, order, of_windows)
    rows, columns = middle[:2]
    sizes, steps = [window[rows], window[columns]], [strides[rows], strides[columns]]
    start = starts[0].tensor.item() if starts[0].is_known else None
    if kind == "stablehlo.maximum" and tensor.dtype.is_floating and start is not None:
        pooled = tf.nn.max_pool2d(_padded(tensor, [pads[rows], pads[columns]], tensor.dtype.min), sizes, steps, "VALID")
        pooled = tf.maximum(pooled, start) if start > -np.inf else pooled
    elif kind == "stablehlo.add" and tensor.dtype.is_floating and start == 0:
        padded = _padded(tensor, [pads[rows], pads[columns]], 0)
        pooled = tf.nn.avg_pool2d(padded, sizes, steps, "VALID") * tf.cast(prod(sizes), tensor.dtype)
    else:
        raise UntranslatableModuleError(f"{kind} of windows, from {start}, is not translated")
    return Value(pooled, shape(operation.results[0]), order, images.sizes)


def of_region(operation: Any) -> str:
    """Returns the only operation that combines two elements in a reduction."""
    (region,) = operation.regions
    (block,) = region.blocks
    combining, *others = block.operations
    if len(others) != 1 or set(combining.operands) != set(block.arguments):
        raise UntranslatableModuleError("a reduction by several operations is not translated")
    return str(combining.name)


def _pairs(operation: Any, sides: int) -> list[tuple[int, int]]:
    if "padding" not in operation.attributes:
        return [(0, 0)] * sides
    return [(int(low), int(high)) for low, high in np.array(operation.attributes["padding"])]


def _padded(images: Any, pads: Sequence[tuple[int, int]], fill: float) -> Any:
    if min(map(min, pads)) < 0:
        raise UntranslatableModuleError("negative padding is not translated")
    if not any(map(any, pads)):
        return images
    return tf.pad(images, [(0, 0), *pads, (0, 0)], constant_values=fill)
