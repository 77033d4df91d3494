"""Depthwise convolutions as sums, against TensorFlow's, on random shapes."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.server.models.lowering.tracing import (
    PADDINGS,
    SIDES,
    check,
    lowered,
    noise,
)

from xlaserve.config import Lowering
from xlaserve.models.networks.keras_runtime import keras

pytestmark = pytest.mark.usefixtures("without_barriers")


@settings(max_examples=12)
@given(
    kernel=st.tuples(st.integers(1, 5), st.integers(2, 5)),
    strides=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    extra=st.tuples(SIDES, SIDES),
    channels=st.tuples(st.integers(2, 5), st.integers(1, 3)),
    padding=st.sampled_from(["SAME", "VALID", [[0, 0], [1, 2], [0, 3], [0, 0]]]),
)
@pytest.mark.parametrize("is_grouped", [False, True])
def test_depthwise_convolutions(
    is_grouped: bool,
    kernel: tuple[int, int],
    strides: tuple[int, int],
    extra: tuple[int, int],
    **options: Any,
) -> None:
    (channels, multiplier), padding = options["channels"], options["padding"]
    images = noise(2, kernel[0] + extra[0], kernel[1] + extra[1], channels)
    if is_grouped:
        weights = tf.Variable(noise(*kernel, 1, channels * multiplier))
        check(Lowering.DEPTHWISE, lambda values: tf.nn.conv2d(values, weights, strides, padding), images)
    else:
        weights = tf.Variable(noise(*kernel, channels, multiplier))
        stride = [1, strides[0], strides[0], 1]  # TensorFlow's kernel takes equal ones only
        check(Lowering.DEPTHWISE, lambda values: tf.nn.depthwise_conv2d(values, weights, stride, padding), images)


@settings(max_examples=10)
@given(
    dilations=st.tuples(st.integers(1, 3), st.integers(2, 3)),
    extra=st.tuples(SIDES, SIDES),
    padding=PADDINGS,
    multiplier=st.integers(1, 2),
)
def test_dilated_depthwise_convolutions(
    dilations: tuple[int, int], extra: tuple[int, int], padding: str, multiplier: int
) -> None:
    layer = keras.layers.DepthwiseConv2D(
        3, padding=padding, dilation_rate=dilations, depth_multiplier=multiplier, bias_initializer="random_normal"
    )
    check(
        Lowering.DEPTHWISE, layer, noise(2, *(2 * by + 1 + more for by, more in zip(dilations, extra, strict=True)), 3)
    )


@settings(max_examples=10)
@given(
    channels=st.integers(2, 40),
    strides=st.integers(1, 2),
    padding=PADDINGS,
    multiplier=st.integers(1, 2),
    dilation=st.integers(1, 2),
)
def test_separable_convolutions(channels: int, strides: int, dilation: int, multiplier: int, padding: str) -> None:
    layer = keras.layers.SeparableConv2D(
        7,
        3,
        strides if dilation == 1 else 1,
        padding,
        dilation_rate=dilation,
        depth_multiplier=multiplier,
        bias_initializer="random_normal",
    )
    check(Lowering.DEPTHWISE, layer, noise(2, 8, 9, channels))


def test_few_channels_before_a_pointwise_convolution_are_filled_up() -> None:
    layer, images = keras.layers.SeparableConv2D(7, 3), noise(1, 6, 6, 20)
    layer.build(images.shape)
    graph = lowered(layer, images, [Lowering.DEPTHWISE]).forward.graph  # type: ignore[attr-defined]
    (product,) = (each for each in graph.get_operations() if each.type == "Conv2D")
    assert product.inputs[0].shape[-1] == 32


@settings(max_examples=6)
@given(
    channels=st.sampled_from([126, 160, 290]),
    size=st.tuples(st.integers(7, 12), st.integers(7, 12)),
    strides=st.integers(1, 2),
    padding=PADDINGS,
    multiplier=st.integers(1, 2),
)
def test_large_depthwise_kernels_are_summed_in_slices(
    channels: int, size: tuple[int, int], strides: int, padding: str, multiplier: int
) -> None:
    layer = keras.layers.DepthwiseConv2D(7, strides, padding, depth_multiplier=multiplier)
    check(Lowering.DEPTHWISE, layer, noise(1, *size, channels))
