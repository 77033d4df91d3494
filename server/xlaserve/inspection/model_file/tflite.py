"""Descriptions of TFLite files, which are FlatBuffers: tables whose fields are found by their numbers."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from xlaserve.inspection.model_file import keras, packages
from xlaserve.inspection.model_file.description import Description, Shape, Tensor
from xlaserve.inspection.model_file.image_input import SIGNED
from xlaserve.models.sources import file_content
from xlaserve.models.sources.onnx_tflite import tflite_tables, tflite_weights
from xlaserve.models.sources.onnx_tflite.tflite_tables import (
    BUFFER,
    BUFFERS,
    CODE,
    CUSTOM_CODE,
    DATA,
    DESCRIPTION,
    GIVEN,
    INPUTS,
    NAME,
    OLD_CODE,
    OPCODE,
    OPERATOR_CODES,
    OPERATORS,
    OUTPUTS,
    SHAPE,
    SHAPE_SIGNATURE,
    SUBGRAPHS,
    TAKEN,
    TENSORS,
    TYPE,
    Table,
)

TYPES: Final = {
    **{0: "float32", 1: "float16", 2: "int32", 3: "uint8", 4: "int64", 5: "string", 6: "bool", 7: "int16"},
    **{9: "int8", 10: "float64", 12: "uint64", 15: "uint32", 16: "uint16"},
}
"""TFLite's numbers of types."""
ACTIVATIONS: Final = {25: "softmax", 14: "sigmoid", 28: "tanh", 19: "relu"}
"""Activations by the numbers of their operators."""
LINEAR: Final = (9, 3, 4)
"""Operators whose numbers have gone through no activation: FULLY_CONNECTED, CONV_2D, DEPTHWISE_CONV_2D."""
PASSING: Final = (22, 43, 6, 114)
"""Operators that change no number: RESHAPE, SQUEEZE, DEQUANTIZE, QUANTIZE."""


def describe(path: Path, file: Path) -> Description:
    """Describes a TFLite file. Raises ModelFailed."""
    data = file.read_bytes()
    try:
        return _described(path, data)
    except (struct.error, IndexError, ValueError) as error:
        raise file_content.cut_off(file) from error


def _described(path: Path, data: bytes) -> Description:
    model = tflite_tables.root(data)
    graph = model.tables(SUBGRAPHS)[0]
    tensors, buffers = graph.tables(TENSORS), model.tables(BUFFERS)
    codes = [max(one.number(CODE, "i"), one.number(OLD_CODE, "b")) for one in model.tables(OPERATOR_CODES)]
    custom = keras.once(filter(None, (one.text(CUSTOM_CODE) for one in model.tables(OPERATOR_CODES))))
    activations = {index: _activation(graph, codes, index) for index in graph.numbers(OUTPUTS)}
    inputs = tuple(_tensor(tensors[index]) for index in graph.numbers(INPUTS))
    is_signed = any(one.dtype == SIGNED for one in inputs)
    notes = [packages.read_by("openvino")]
    if is_signed:
        notes.append("pixels from 0 to 255 become its levels -128 to 127")
    if tflite_weights.in_model(model):
        notes.append(tflite_weights.NOTE)
    stored = {index for index, one in enumerate(buffers) if one.length(DATA)}
    return Description(
        path=path,
        format="TFLite",
        written_by=model.text(DESCRIPTION),
        inputs=inputs,
        outputs=tuple(_tensor(tensors[index], activations[index]) for index in graph.numbers(OUTPUTS)),
        layers=custom,
        family=tflite_tables.DETECTION if tflite_tables.DETECTION in custom else "",
        parameters=sum(math.prod(one.numbers(SHAPE)) for one in tensors if one.number(BUFFER, "I") in stored),
        size_bytes=len(data),
        notes=tuple(notes),
    )


def _tensor(table: Table, activation: str = "") -> Tensor:
    sides: Iterator[int] = iter(table.numbers(SHAPE_SIGNATURE) or table.numbers(SHAPE))
    shape: Shape = tuple(None if side < 0 else side for side in sides)
    number = table.number(TYPE, "b")
    return Tensor(table.text(NAME), shape, TYPES.get(number, f"type {number}"), activation)


def _activation(graph: Table, codes: list[int], tensor: int) -> str:
    given = {output: one for one in graph.tables(OPERATORS) for output in one.numbers(GIVEN)}
    while (operator := given.pop(tensor, None)) is not None:
        code = codes[operator.number(OPCODE, "I")]
        if code in LINEAR:
            return "linear"
        if code not in PASSING:
            return ACTIVATIONS.get(code, "")
        tensor = operator.numbers(TAKEN)[0]
    return ""
