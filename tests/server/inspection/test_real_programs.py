"""What XLA really prints, of a network that is small enough to be counted by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import tensorflow as tf

from xlaserve.inspection import cost, hlo
from xlaserve.models.networks.keras_runtime import keras

BATCH = 2
DENSE = 2 * BATCH * (4 * 4 * 8) * 10
POINTWISE = 2 * BATCH * 4 * 4 * 6 * 8
DEPTHWISE = 2 * BATCH * 6 * (9 * 4 * 4)
"""3x3 on 8x8 pixels with stride 2 and Keras's padding on two sides: 4x4 windows, less what lies on the padding."""
DEPTHWISE_ON_PADDING = 2 * BATCH * 6 * (2 * 4 * 3 - 1)
STEM = 2 * BATCH * 8 * 8 * (3 * 3 * 3) * 6
"""3x3 on 10x10 pixels without padding."""
FLOPS = DENSE + POINTWISE + DEPTHWISE - DEPTHWISE_ON_PADDING + STEM


@pytest.fixture(scope="module")
def program() -> Callable[[str], str]:
    """Gives each stage of a network of one layer of each kind."""
    network = keras.Sequential(
        [
            keras.layers.Input((10, 10, 3)),
            keras.layers.Conv2D(6, 3, use_bias=False, name="stem"),
            keras.layers.DepthwiseConv2D(3, strides=2, padding="same", use_bias=False, name="depthwise"),
            keras.layers.Conv2D(8, 1, use_bias=False, name="pointwise"),
            keras.layers.Flatten(),
            keras.layers.Dense(10, use_bias=False, name="dense"),
        ],
        name="counted",
    )
    function = tf.function(lambda pixels: network(pixels, training=False), jit_compile=True, autograph=False)
    lower = function.experimental_get_compiler_ir(tf.TensorSpec((BATCH, 10, 10, 3), tf.float32))
    return lambda stage: lower(stage=stage)


@pytest.mark.parametrize("stage", ["hlo", "optimized_hlo"])
def test_flops_are_those_counted_by_hand(stage: str, program: Callable[[str], str]) -> None:
    costed = cost.instructions(hlo.parse(program(stage)))
    assert sum(price.flops for _, price in costed) == FLOPS


def test_instructions_name_their_layers(program: Callable[[str], str]) -> None:
    layers = {instruction.layer for instruction, _ in cost.instructions(hlo.parse(program("optimized_hlo")))}
    for name in ("stem", "depthwise", "pointwise", "dense"):
        assert any(name in layer for layer in layers), layers


def test_no_instruction_of_a_real_program_has_a_negative_cost(program: Callable[[str], str]) -> None:
    for instruction, price in cost.instructions(hlo.parse(program("optimized_hlo"))):
        assert price.flops >= 0
        assert price.bytes > 0, instruction.name
