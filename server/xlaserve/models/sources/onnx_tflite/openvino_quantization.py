"""Quantized networks: pixels from 0 to 255 in and numbers out, in place of levels of 8 bits."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from xlaserve.programs.openvino.openvino_program import load

SIGNED: Final = "i8"
LEVELS: Final = frozenset({"i8", "u8"})
"""Types of levels, by OpenVINO's names."""
QUANTIZATION: Final = "FakeQuantize"
BLACK: Final = -128.0
"""The signed level of pixels of 0: the lowest one, as images are quantized over the whole of their range."""


def is_quantized(model: Any) -> bool:
    """Returns whether a model rounds numbers to levels."""
    return any(node.get_type_name() == QUANTIZATION for node in model.get_ops())


def take_pixels(model: Any) -> None:
    """Makes a model take uint8 pixels for images of signed levels."""
    openvino = load()
    for parameter in model.get_parameters():
        rank = parameter.get_partial_shape().rank
        is_image = rank.is_dynamic or rank.get_length() > len("NC")
        if not is_image or parameter.get_element_type().get_type_name() != SIGNED:
            continue
        users = [*parameter.output(0).get_target_inputs()]
        parameter.set_element_type(openvino.Type.u8)
        moved = openvino.opset15.add(openvino.opset15.convert(parameter, "f32"), np.float32(BLACK))
        levels = openvino.opset15.convert(moved, SIGNED)
        for user in users:
            user.replace_source_output(levels.output(0))
    model.validate_nodes_and_infer_types()


def give_numbers(model: Any) -> None:
    """Makes a model give the numbers that its levels stand for, where an output is quantized last of all."""
    for output in model.outputs:
        end = output.get_node().input(0)
        last = end.get_source_output().get_node()
        if last.get_type_name() != "Convert" or last.get_element_type().get_type_name() not in LEVELS:
            continue
        quantization = last.input(0).get_source_output().get_node()
        if quantization.get_type_name() == QUANTIZATION:
            numbers = quantization.input(0).get_source_output()
            numbers.set_names(output.get_names())
            end.replace_source_output(numbers)
    model.validate_nodes_and_infer_types()
