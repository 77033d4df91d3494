"""Descriptions of ONNX files."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Final

from xlaserve.config import onnx_weights
from xlaserve.inspection.model_file import keras, packages
from xlaserve.inspection.model_file.description import Description, Tensor
from xlaserve.inspection.model_file.messages import parsed, unfit
from xlaserve_proto import model_files_pb2 as pb

TYPES: Final = {
    **{1: "float32", 2: "uint8", 3: "int8", 4: "uint16", 5: "int16", 6: "int32", 7: "int64", 8: "string", 9: "bool"},
    **{10: "float16", 11: "float64", 12: "uint32", 13: "uint64", 16: "bfloat16"},
}
"""ONNX's numbers of types."""
ACTIVATIONS: Final = {"Softmax": "softmax", "Sigmoid": "sigmoid", "Tanh": "tanh", "Relu": "relu", "LogSoftmax": ""}
LINEAR: Final = ("Gemm", "MatMul", "Conv")
PASSING: Final = ("Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "Identity", "Cast")
"""Operations that change no number."""
NOTED: Final = ("Resize", "NonMaxSuppression", "Upsample")


def describe(path: Path, file: Path) -> Description:
    """Describes an ONNX file. Raises ModelFailed."""
    model = parsed(pb.OnnxModel(), file, "an ONNX model")
    graph = model.graph
    if not graph.output:
        raise unfit(file, "an ONNX model")
    stored = {one.name for one in graph.initializer}
    versions = [str(one.version) for one in model.opset_import if not one.domain]
    return Description(
        path=path,
        format="ONNX" + "".join(f", operator set {version}" for version in versions),
        written_by=f"{model.producer_name} {model.producer_version}".strip(),
        inputs=tuple(_tensor(one) for one in graph.input if one.name not in stored),
        outputs=tuple(_tensor(one, _activation(graph, one.name)) for one in graph.output),
        layers=keras.once(one.op_type for one in graph.node if one.op_type in NOTED),
        parameters=sum(math.prod(one.dims) for one in graph.initializer),
        size_bytes=sum(each.stat().st_size for each in {file, *onnx_weights.files(file)}),
        notes=(packages.read_by("openvino"),),
    )


def _tensor(value: pb.OnnxValue, activation: str = "") -> Tensor:
    tensor = value.type.tensor_type
    sides = (dim.dim_value if dim.WhichOneof("value") == "dim_value" else None for dim in tensor.shape.dim)
    shape = tuple(sides) if tensor.HasField("shape") else None
    return Tensor(value.name, shape, TYPES.get(tensor.elem_type, f"type {tensor.elem_type}"), activation)


def _activation(graph: pb.OnnxGraph, tensor: str) -> str:
    by_output = {output: node for node in graph.node for output in node.output}
    while (node := by_output.pop(tensor, None)) is not None:
        if node.op_type in LINEAR:
            return "linear"
        if node.op_type not in PASSING or not node.input:
            return ACTIVATIONS.get(node.op_type, "")
        tensor = node.input[0]
    return ""
