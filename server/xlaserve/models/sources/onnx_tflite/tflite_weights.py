"""Weights of 8 bits in TFLite files whose other numbers are floats (dynamic range quantization)."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Final

from xlaserve.models.sources.onnx_tflite import tflite_tables
from xlaserve.models.sources.onnx_tflite.tflite_tables import (
    CODE,
    OLD_CODE,
    OPCODE,
    OPERATOR_CODES,
    OPERATORS,
    SUBGRAPHS,
    TAKEN,
    TENSORS,
    TYPE,
    Table,
)

WEIGHTED: Final = frozenset({3, 4, 9})
"""CONV_2D, DEPTHWISE_CONV_2D and FULLY_CONNECTED, which take an input, weights and a bias."""
FLOAT32: Final = 0
LEVELS: Final = frozenset({3, 9})
"""The types uint8 and int8."""
NOTE: Final = (
    "its weights are of 8 bits and its other numbers floats: TensorFlow Lite rounds what each layer takes to 8 bits as"
    " well, the server does not; scores differ by some thousandths, now and then by a hundredth or two"
)


def are_of_dynamic_range(file: Path) -> bool:
    """Returns whether any layer of a file multiplies floats by weights of 8 bits; False for what is no TFLite file.

    Raises OSError.
    """
    data = file.read_bytes()
    if data[4:8] != tflite_tables.MAGIC:
        return False
    try:
        return in_model(tflite_tables.root(data))
    except (struct.error, IndexError, ValueError):
        return False


def in_model(model: Table) -> bool:
    """Returns the same of a model's table. Raises struct.error or IndexError where the file ends too early."""
    codes = [max(one.number(CODE, "i"), one.number(OLD_CODE, "b")) for one in model.tables(OPERATOR_CODES)]
    return any(
        _takes_floats_and_levels(one, [tensor.number(TYPE, "b") for tensor in graph.tables(TENSORS)])
        for graph in model.tables(SUBGRAPHS)
        for one in graph.tables(OPERATORS)
        if codes[one.number(OPCODE, "I")] in WEIGHTED
    )


def _takes_floats_and_levels(operator: Table, types: list[int]) -> bool:
    given, weights, *_ = operator.numbers(TAKEN)
    return types[given] == FLOAT32 and types[weights] in LEVELS
