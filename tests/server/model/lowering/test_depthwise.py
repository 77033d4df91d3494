from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from xlaserve.config import Lowering
from xlaserve.model import lowering
from xlaserve.model.networks.keras_runtime import keras

TOLERANCE = 1e-5
"""The largest difference that is allowed, as a share of the largest output."""


@st.composite
def convolutions(draw: st.DrawFn) -> tuple[Callable[[], Any], NDArray[np.float32]]:
    """Returns what makes a layer of one of the kinds that are replaced, and images for it."""
    kernel = draw(st.tuples(st.integers(1, 5), st.integers(1, 5)))
    strides = draw(st.sampled_from([1, 2, 3]))  # Keras takes equal ones only
    dilations = draw(st.tuples(st.integers(1, 3), st.integers(1, 3)))
    size = [
        (positions - 1) * dilation + draw(st.integers(1, 7))
        for positions, dilation in zip(kernel, dilations, strict=True)
    ]
    channels, multiplier = draw(st.integers(2, 5)), draw(st.integers(1, 3))
    data_format = draw(st.sampled_from(["channels_last", "channels_first"]))
    options: dict[str, Any] = {
        "strides": strides,
        "dilation_rate": dilations,
        "padding": draw(st.sampled_from(["same", "valid"])),
        "data_format": data_format,
        "use_bias": draw(st.booleans()),
        "bias_initializer": "random_normal",
        "activation": draw(st.sampled_from([None, "relu", "hard_silu"])),
    }
    kind = draw(st.sampled_from(["depthwise", "separable", "grouped"]))
    if kind == "depthwise":
        make = partial(keras.layers.DepthwiseConv2D, kernel, depth_multiplier=multiplier, **options)
    elif kind == "separable":
        make = partial(keras.layers.SeparableConv2D, 3, kernel, depth_multiplier=multiplier, **options)
    else:
        if strides > 1:  # Keras takes either
            options["dilation_rate"] = 1
        make = partial(keras.layers.Conv2D, channels * multiplier, kernel, groups=channels, **options)
    shape = (*size, channels) if data_format == "channels_last" else (channels, *size)
    images = np.random.default_rng(draw(st.integers(0, 99))).normal(size=(draw(st.integers(1, 2)), *shape))
    return make, images.astype(np.float32)


def difference(got: Any, expected: Any) -> float:
    return float(np.abs(got - expected).max() / max(np.abs(expected).max(), 1e-30))


@settings(max_examples=40)
@given(convolutions())
def test_any_convolution_of_single_channels_gives_the_same(
    example: tuple[Callable[[], Any], NDArray[np.float32]],
) -> None:
    make, images = example
    layer = make()
    expected = layer(images)
    replacement = lowering.LOWERINGS[Lowering.DEPTHWISE](layer)
    assert replacement is not None
    got = replacement(images)
    assert got.shape == expected.shape == replacement.compute_output_shape(images.shape)
    assert difference(got, expected) < TOLERANCE


def test_xla_and_eager_agree() -> None:
    layer = keras.layers.DepthwiseConv2D(3, strides=2, padding="same")
    images = np.random.default_rng(0).normal(size=(2, 9, 8, 5)).astype(np.float32)
    expected = layer(images)
    replacement = lowering.LOWERINGS[Lowering.DEPTHWISE](layer)
    assert difference(tf.function(replacement, jit_compile=True, autograph=False)(images), expected) < TOLERANCE


def test_half_precision_stays_half_precision() -> None:
    layer = keras.layers.DepthwiseConv2D(3, padding="same", dtype="mixed_bfloat16")
    images = np.random.default_rng(0).normal(size=(1, 6, 6, 4)).astype(np.float32)
    expected = tf.cast(layer(images), tf.float32)
    replacement = lowering.LOWERINGS[Lowering.DEPTHWISE](layer)
    assert replacement is not None
    got = replacement(images)
    assert got.dtype == tf.bfloat16
    assert difference(tf.cast(got, tf.float32), expected) < 0.02


@pytest.mark.parametrize(
    "layer",
    [
        keras.layers.Conv2D(4, 3),
        keras.layers.Conv2D(4, 3, groups=2),
        keras.layers.Conv2DTranspose(4, 3),
        keras.layers.DepthwiseConv1D(3),
        keras.layers.ReLU(),
    ],
    ids=lambda layer: layer.name,
)
def test_other_layers_stay(layer: Any) -> None:
    layer.build((None, 8, 4) if isinstance(layer, keras.layers.DepthwiseConv1D) else (None, 8, 8, 4))
    assert lowering.LOWERINGS[Lowering.DEPTHWISE](layer) is None
