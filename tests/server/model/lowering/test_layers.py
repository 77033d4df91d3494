from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.required import required

from xlaserve.config import Lowering
from xlaserve.model import lowering
from xlaserve.model.lowering.windows import total
from xlaserve.model.networks.keras_runtime import keras

TOLERANCE = 1e-5
"""The largest difference that is allowed, as a share of the largest output."""
PADDINGS = st.sampled_from(["same", "valid"])
FORMATS = st.sampled_from(["channels_last", "channels_first"])
ACTIVATIONS = st.sampled_from([None, "relu", "silu"])


def noise(*shape: int) -> NDArray[np.float32]:
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


def check(name: Lowering, layer: Any, images: NDArray[np.float32]) -> None:
    """Compares a layer with its replacement, on images given channels last."""
    is_channels_first = getattr(layer, "data_format", None) == "channels_first"
    own_images = np.moveaxis(images, -1, 1) if is_channels_first else images
    layer.build(own_images.shape)
    replacement = lowering.LOWERINGS[name](layer)
    assert replacement is not None
    got = replacement(own_images)
    if is_channels_first:
        # Not computed channels first: pooling does not run so on a CPU, and Keras adds a bias along the rows where they
        # are as long as it.
        layer.data_format = "channels_last"
        expected = np.moveaxis(layer.call(tf.constant(images)), -1, 1)
    else:
        expected = layer(images)
    assert got.shape == expected.shape
    assert np.abs(got - expected).max() <= TOLERANCE * np.abs(expected).max()


@settings(max_examples=15)
@given(
    kernel=st.tuples(st.integers(1, 3), st.integers(2, 3)),
    strides=st.integers(1, 3),
    extra=st.tuples(st.integers(0, 6), st.integers(0, 6)),
    channels=st.integers(1, 3),
    padding=PADDINGS,
    data_format=FORMATS,
    activation=ACTIVATIONS,
)
def test_stems(kernel: tuple[int, int], strides: int, extra: tuple[int, int], channels: int, **options: Any) -> None:
    layer = keras.layers.Conv2D(8, kernel, strides=strides, bias_initializer="random_normal", **options)
    check(Lowering.STEM, layer, noise(2, kernel[0] + extra[0], kernel[1] + extra[1], channels))


@pytest.mark.parametrize("strides", [1, 2])
def test_pointwise_convolutions_of_few_channels(strides: int) -> None:
    check(Lowering.STEM, keras.layers.Conv2D(24, 1, strides, activation="relu6"), noise(2, 5, 6, 16))
    layer = keras.layers.Conv2D(24, 1)
    layer.build((None, 5, 6, 17))
    assert lowering.LOWERINGS[Lowering.STEM](layer) is None


@pytest.mark.parametrize("count", range(1, 10))
def test_sums_have_each_term_once(count: int) -> None:
    assert total(tf.constant(2**power) for power in range(count)) == 2**count - 1


@settings(max_examples=15)
@given(
    strides=st.tuples(st.integers(1, 3), st.integers(2, 3)),
    size=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    padding=PADDINGS,
    data_format=FORMATS,
    activation=ACTIVATIONS,
    use_bias=st.booleans(),
)
def test_pointwise_convolutions_with_strides(strides: tuple[int, int], size: tuple[int, int], **options: Any) -> None:
    layer = keras.layers.Conv2D(5, 1, strides, bias_initializer="random_normal", **options)
    check(Lowering.POINTWISE, layer, noise(2, *size, 3))


@settings(max_examples=15)
@given(
    kernel=st.sampled_from([1, 3, (3, 2)]),
    strides=st.integers(1, 3),
    size=st.tuples(st.integers(3, 9), st.integers(3, 9)),
    groups=st.sampled_from([(2, 9), (4, 2), (6, 4), (6, 5), (12, 3)]),
    multiplier=st.integers(1, 3),
    padding=PADDINGS,
    data_format=FORMATS,
    activation=ACTIVATIONS,
    use_bias=st.booleans(),
)
def test_convolutions_with_groups(
    kernel: Any, size: tuple[int, int], groups: tuple[int, int], multiplier: int, **options: Any
) -> None:
    count, width = groups
    layer = keras.layers.Conv2D(count * multiplier, kernel, groups=count, bias_initializer="random_normal", **options)
    check(Lowering.GROUPED, layer, noise(2, *size, count * width))


@settings(max_examples=6)
@given(
    channels=st.sampled_from([126, 160, 290]),
    size=st.tuples(st.integers(7, 12), st.integers(7, 12)),
    strides=st.integers(1, 2),
    padding=PADDINGS,
    multiplier=st.integers(1, 2),
)
def test_large_depthwise_kernels_are_summed_in_slices(
    channels: int, size: tuple[int, int], multiplier: int, **options: Any
) -> None:
    layer = keras.layers.DepthwiseConv2D(7, depth_multiplier=multiplier, **options)
    check(Lowering.DEPTHWISE, layer, noise(1, *size, channels))


def test_slices_are_summed_for_any_number_of_images() -> None:
    layer = keras.layers.DepthwiseConv2D(7, padding="same")
    layer.build((None, 8, 8, 160))
    replacement = lowering.LOWERINGS[Lowering.DEPTHWISE](layer)
    spec = tf.TensorSpec((None, 8, 8, 160))
    any_batch = tf.function(replacement, autograph=False).get_concrete_function(spec)
    compiled = tf.function(any_batch, jit_compile=True, autograph=False)
    for batch in (1, 3):
        images = noise(batch, 8, 8, 160)
        expected = layer(images)
        assert np.abs(compiled(images) - expected).max() <= TOLERANCE * np.abs(expected).max()
        program = compiled.experimental_get_compiler_ir(images)(stage="optimized_hlo")
        assert " while(" in program
        assert "[2,28,28" not in program  # padded for slices of an unknown size


@settings(max_examples=8)
@given(
    size=st.tuples(st.integers(3, 12), st.integers(7, 19)),
    channels=st.integers(32, 40),
    filters=st.integers(16, 40),
    padding=PADDINGS,
    data_format=FORMATS,
    activation=ACTIVATIONS,
    use_bias=st.booleans(),
)
def test_winograd(size: tuple[int, int], channels: int, filters: int, **options: Any) -> None:
    layer = keras.layers.Conv2D(filters, 3, bias_initializer="random_normal", **options)
    check(Lowering.WINOGRAD, layer, noise(2, *size, channels))


@settings(max_examples=20)
@given(
    kind=st.sampled_from([keras.layers.MaxPooling2D, keras.layers.AveragePooling2D]),
    window=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    strides=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    extra=st.tuples(st.integers(0, 6), st.integers(0, 6)),
    padding=PADDINGS,
)
def test_pooling(kind: Any, window: tuple[int, int], extra: tuple[int, int], **options: Any) -> None:
    check(Lowering.POOLING, kind(window, **options), noise(2, window[0] + extra[0], window[1] + extra[1], 3) - 2)


@settings(max_examples=20)
@given(size=st.tuples(st.integers(1, 20), st.integers(1, 20)), keepdims=st.booleans())
def test_pooling_of_all_pixels(size: tuple[int, int], keepdims: bool) -> None:
    check(Lowering.POOLING, keras.layers.GlobalAveragePooling2D(keepdims=keepdims), noise(2, *size, 3) - 2)


@settings(max_examples=20)
@given(size=st.tuples(st.integers(1, 9), st.integers(1, 9)), target=st.tuples(st.integers(1, 20), st.integers(1, 20)))
def test_resizing(size: tuple[int, int], target: tuple[int, int]) -> None:
    check(Lowering.RESIZE, keras.layers.Resizing(*target), noise(2, *size, 3))


@pytest.mark.parametrize("factors", [2, (4, 3)])
def test_upsampling(factors: Any) -> None:
    check(Lowering.RESIZE, keras.layers.UpSampling2D(factors, interpolation="bilinear"), noise(2, 5, 7, 3))


@pytest.mark.parametrize(
    "layer",
    [
        keras.layers.UpSampling2D(2),
        keras.layers.Resizing(4, 4, interpolation="bicubic"),
        keras.layers.Resizing(4, 4, antialias=True),
        keras.layers.Resizing(4, 4, crop_to_aspect_ratio=True),
        keras.layers.Resizing(4, 4, pad_to_aspect_ratio=True),
        keras.layers.Resizing(4, 4, data_format="channels_first"),
        keras.layers.UpSampling2D(2, interpolation="bilinear", dtype="mixed_bfloat16"),
    ],
)
def test_other_resizing_stays(layer: Any) -> None:
    assert lowering.LOWERINGS[Lowering.RESIZE](layer) is None


@pytest.mark.parametrize("precision", ["mixed_float16", "mixed_bfloat16"])
def test_pooling_of_all_pixels_adds_more_than_half_precision_can(precision: str) -> None:
    layer = keras.layers.GlobalAveragePooling2D(dtype=precision)
    images = np.full((1, 64, 64, 2), 100, np.float32) + noise(1, 64, 64, 2)
    replacement = lowering.LOWERINGS[Lowering.POOLING](layer)
    assert replacement is not None
    got, expected = replacement(images), layer(images)
    assert got.dtype == expected.dtype
    np.testing.assert_array_equal(tf.cast(got, tf.float32), tf.cast(expected, tf.float32))


def test_what_is_read_in_slices_is_computed_once() -> None:
    layer = keras.layers.DepthwiseConv2D(3, padding="same")
    images = noise(1, 9, 9, 4)
    layer.build(images.shape)
    replacement = required(lowering.LOWERINGS[Lowering.DEPTHWISE](layer))
    compiled = tf.function(lambda inputs: replacement(tf.nn.relu(inputs)), jit_compile=True, autograph=False)
    program = compiled.experimental_get_compiler_ir(images)(stage="optimized_hlo")
    assert program.count(" maximum(") == 1


@settings(max_examples=10)
@given(
    scale=st.booleans(), center=st.booleans(), axis=st.sampled_from([-1, 1, 3]), epsilon=st.sampled_from([1e-3, 1e-5])
)
def test_normalization(**options: Any) -> None:
    layer = keras.layers.BatchNormalization(
        **options,
        moving_mean_initializer="random_normal",
        moving_variance_initializer=keras.initializers.RandomUniform(0.1, 3),
        beta_initializer="random_normal",
        gamma_initializer="random_normal",
    )
    check(Lowering.NORMALIZATION, layer, noise(2, 4, 5, 6))


@settings(max_examples=10)
@given(
    scale=st.booleans(),
    center=st.booleans(),
    axis=st.sampled_from([-1, 1, [2, 3]]),
)
def test_layer_normalization(**options: Any) -> None:
    layer = keras.layers.LayerNormalization(
        **options, beta_initializer="random_normal", gamma_initializer="random_normal"
    )
    check(Lowering.NORMALIZATION, layer, noise(2, 4, 5, 6))


def test_what_layer_normalization_reads_is_computed_once() -> None:
    convolution, layer = keras.layers.DepthwiseConv2D(3), keras.layers.LayerNormalization()
    images = noise(1, 9, 9, 64)
    convolution.build(images.shape)
    layer.build((None, 7, 7, 64))
    lowered = required(lowering.LOWERINGS[Lowering.DEPTHWISE](convolution))

    def products(normalize: Any) -> int:
        compiled = tf.function(lambda inputs: normalize(lowered(inputs)), jit_compile=True, autograph=False)
        program: str = compiled.experimental_get_compiler_ir(images)(stage="optimized_hlo")
        return program.count(" multiply(")

    assert products(lowering.LOWERINGS[Lowering.NORMALIZATION](layer)) < products(layer) - 9


@pytest.mark.parametrize(
    ("layer", "names"),
    [
        (keras.layers.Conv2D(32, 1), []),
        (keras.layers.Conv2D(32, 3, strides=2), []),
        (keras.layers.Conv2D(32, 3, dilation_rate=2), []),
        (keras.layers.Conv2D(32, 3, groups=2), [Lowering.GROUPED]),
        (keras.layers.Conv2D(32, 3, dtype="mixed_bfloat16"), []),
        (keras.layers.Conv2D(15, 3), []),
        (keras.layers.MaxPooling2D(6), []),
        (keras.layers.GroupNormalization(8), []),
        (keras.layers.LayerNormalization(), [Lowering.NORMALIZATION]),
    ],
    ids=lambda layer: getattr(layer, "name", ""),
)
def test_other_layers_stay(layer: Any, names: list[Lowering]) -> None:
    layer.build((None, 20, 20, 32))
    assert [name for name, replace in lowering.LOWERINGS.items() if replace(layer) is not None] == names
