"""Graphs of TensorFlow without TensorFlow: types, shapes, and the operations that give a tensor."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

from xlaserve.inspection.model_file.description import Shape
from xlaserve_proto import model_files_pb2 as pb
from xlaserve_proto import tensorflow_messages_pb2 as tensorflow

ACTIVATIONS: Final = {"Softmax": "softmax", "Sigmoid": "sigmoid", "Tanh": "tanh", "Relu": "relu", "Relu6": "relu6"}
LINEAR: Final = ("BiasAdd", "MatMul", "Conv2D", "_FusedMatMul", "_FusedConv2D")
"""Operations whose numbers have gone through no activation."""
PASSING: Final = ("Identity", "Reshape", "Squeeze", "ExpandDims", "Cast", "StopGradient", "Transpose")
"""Operations that change no number."""
CALLS: Final = ("PartitionedCall", "StatefulPartitionedCall")
NOTED: Final = ("DecodeJpeg", "DecodePng", "DecodeImage", "DecodeBase64", "ResizeBilinear", "NonMaxSuppressionV3")
"""Operations that matter for serving, and beginnings of the names of their variants."""
_MOST_STEPS: Final = 1000


def shape(declared: tensorflow.TensorShapeProto) -> Shape:
    """Returns a shape; -1 stands for a side that is open."""
    if declared.unknown_rank:
        return None
    return tuple(None if dim.size < 0 else dim.size for dim in declared.dim)


def dtype(number: int) -> str:
    """Returns the name of a type: `float32`."""
    try:
        name = tensorflow.DataType.Name(tensorflow.DataType.ValueType(number)).removeprefix("DT_").lower()
    except ValueError:
        return f"type {number}"
    return {"float": "float32", "double": "float64", "half": "float16"}.get(name, name)


def constants(graph: pb.Graph) -> int:
    """Returns how many numbers the constants of a graph and its functions have, scalars left out."""
    declared = (node.attr["value"].tensor.tensor_shape.dim for node in _nodes(graph) if node.op == "Const")
    return sum(math.prod(dim.size for dim in dims) for dims in declared if dims)


def noted(graph: pb.Graph) -> list[str]:
    """Returns the names of operations that matter for serving, in their order."""
    return [node.op for node in _nodes(graph) if node.op.startswith(NOTED)]


def activation(graph: pb.Graph, tensor: str) -> str:
    """Returns the function that a tensor of a graph, such as `dense/BiasAdd:0`, has gone through last: `softmax`,
    `linear`. Empty where another operation gives it."""
    functions = {one.signature.name: one for one in graph.library.function}
    nodes: Mapping[str, pb.Node] = {node.name: node for node in graph.node}
    for _ in range(_MOST_STEPS):
        name, *place = tensor.lstrip("^").split(":")
        node = nodes.get(name)
        if node is None:
            return ""
        if node.op in ACTIVATIONS or node.op in LINEAR:
            return ACTIVATIONS.get(node.op, "linear")
        if node.op in CALLS and (function := functions.get(node.attr["f"].func.name)) is not None:
            tensor = _returned(function, int(place[-1]) if place and place[-1].isdecimal() else 0)
            nodes = {one.name: one for one in function.node_def}
        elif node.op in PASSING and node.input:
            tensor = node.input[0]
        elif node.op in ("Add", "AddV2") and node.input:
            return "linear"
        else:
            return ""
    return ""


def _nodes(graph: pb.Graph) -> list[pb.Node]:
    return [*graph.node, *(node for function in graph.library.function for node in function.node_def)]


def _returned(function: pb.Function, index: int) -> str:
    names: Sequence[str] = [argument.name for argument in function.signature.output_arg]
    return function.ret[names[index]] if index < len(names) else ""
