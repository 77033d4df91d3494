"""The factor by which a network multiplies the levels of pixels before its first layer, read from its graph."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Final

import numpy as np
import tensorflow as tf

from xlaserve.config import Bucket, Mode
from xlaserve.engine.program import Program
from xlaserve.models.lowering.replay import GraphTensor, Node, replay
from xlaserve.programs.tf.frozen_graph import own_inputs
from xlaserve.programs.tf.tensorflow_program import TensorFlowProgram

PASSING: Final = frozenset(
    {
        *("Cast", "Identity", "EnsureShape", "Reshape", "Squeeze", "ExpandDims", "Transpose", "ReverseV2"),
        *("StridedSlice", "Split", "Unpack", "Pack", "ConcatV2", "Pad", "PadV2", "MirrorPad", "GatherV2"),
        *("ResizeBilinear", "ResizeNearestNeighbor", "ClipByValue", "Minimum", "Maximum", "Add", "AddV2", "Sub"),
    }
)
"""Operations that leave the distance of two levels as it is."""
ASIDE: Final = frozenset({"Shape", "ShapeN", "Size", "Rank"})
NORMALIZES: Final = frozenset({"FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3"})


def of_program(program: Program, bucket: Bucket) -> float | None:
    """Returns `pixel_scale` of a program's function for the size of `bucket`; None for programs of other kinds."""
    return pixel_scale(program.lowered(Mode.GRAPH, bucket).forward) if isinstance(program, TensorFlowProgram) else None


def pixel_scale(function: Any) -> float | None:
    """Returns the mean factor for the levels of a concrete function of pixels; None where it can't be read."""
    reader = _Reader()
    inputs = own_inputs(function)
    if len(inputs) != 1:
        return None
    (spec,) = inputs
    read = tf.function(lambda pixels: replay(function, reader.read, [pixels]), autograph=False)
    with suppress(Exception):  # a graph may hold anything
        read.get_concrete_function(tf.TensorSpec(spec.shape, spec.dtype))
    return reader.scale


class _ReadError(Exception):
    """The factor is known: the rest of the graph need not be built again."""


class _Reader:
    """Follows the pixels through a graph, operation by operation."""

    def __init__(self) -> None:
        self.scale: float | None = None
        """The factor at the first operation that does more than scaling."""
        self._scales: dict[Node, float] = {}

    def read(self, node: Node) -> None:
        """Notes what an operation does to pixels; replaces none."""
        pixels = [value for value in node.inputs if self._of(value) is not None]
        if not pixels or node.kind in ASIDE:
            return
        before = self._of(pixels[0])
        factor = self._factor(node, pixels) if len(pixels) == 1 else 1.0 if node.kind in PASSING else None
        assert before is not None
        if factor is None:
            self.scale = before
            raise _ReadError
        self._scales[node] = before * factor

    def _of(self, value: GraphTensor) -> float | None:
        """Returns the factor of a tensor of pixels; None for other tensors."""
        if value.node is None:
            return None if value.is_of_weights else 1.0
        return self._scales.get(value.node)

    def _factor(self, node: Node, pixels: list[GraphTensor]) -> float | None:
        """Returns the factor of one operation; None where it does more than scaling."""
        if node.kind in PASSING:
            return 1.0
        others = [value for value in node.inputs if value not in pixels]
        if node.kind == "Mul" and (factor := _mean(others[0])) is not None:
            return factor
        if node.kind in ("Div", "RealDiv") and node.inputs[0] in pixels and (factor := _mean(others[0])):
            return 1 / factor
        if node.kind in NORMALIZES and not node.attribute("is_training"):
            scale, _, _, variance = (value.known for value in node.inputs[1:])
            if scale is not None and variance is not None:
                return float(np.mean(np.abs(scale) / np.sqrt(variance + node.attribute("epsilon"))))
        return None


def _mean(value: GraphTensor) -> float | None:
    numbers = value.known
    return None if numbers is None else float(np.mean(np.abs(numbers)))
