"""Each substitute against the operation that it takes the place of, on random shapes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.server.models.lowering.tracing import (
    PADDINGS,
    SIDES,
    TOLERANCE,
    check,
    difference,
    lowered,
    noise,
    trace,
)

from xlaserve.config import Lowering
from xlaserve.models import lowering
from xlaserve.models.lowering.windows import total
from xlaserve.models.networks.keras_runtime import keras

pytestmark = pytest.mark.usefixtures("without_barriers")


@settings(max_examples=10)
@given(
    kernel=st.tuples(st.integers(1, 3), st.integers(2, 3)),
    strides=st.integers(1, 3),
    extra=st.tuples(SIDES, SIDES),
    channels=st.integers(1, 3),
    padding=PADDINGS,
)
def test_stems(kernel: tuple[int, int], strides: int, extra: tuple[int, int], channels: int, padding: str) -> None:
    layer = keras.layers.Conv2D(8, kernel, strides, padding, bias_initializer="random_normal", activation="silu")
    check(Lowering.STEM, layer, noise(2, kernel[0] + extra[0], kernel[1] + extra[1], channels))


@pytest.mark.parametrize("strides", [1, 2])
def test_pointwise_convolutions_of_few_channels(strides: int) -> None:
    check(Lowering.STEM, keras.layers.Conv2D(24, 1, strides, activation="relu6"), noise(2, 5, 6, 16))
    assert not lowered(keras.layers.Conv2D(24, 1, strides), noise(2, 5, 6, 17), [Lowering.STEM]).text


@pytest.mark.parametrize("interpolation", ["bilinear", "nearest"])
@pytest.mark.parametrize(("size", "is_sum"), [((5, 4), False), ((4, 4), True), ((3, 4), True)])
def test_what_is_enlarged_is_no_sum(size: tuple[int, int], is_sum: bool, interpolation: str) -> None:
    layer, resize = keras.layers.Conv2D(4, 1), keras.layers.Resizing(*size, interpolation)
    made = lowered(lambda images: resize(tf.nn.relu(layer(images))), noise(1, 4, 4, 16), [Lowering.STEM])
    assert bool(made.text) == is_sum


@pytest.mark.parametrize("activate", [tf.nn.relu, lambda values: values * tf.nn.relu6(values + 3)])
def test_what_follows_is_searched_at_any_length_even_if_read_twice(activate: Any) -> None:
    layer = keras.layers.Conv2D(4, 1)

    def call(images: tf.Tensor) -> tf.Tensor:
        values = layer(images)
        for _ in range(600):
            values = activate(values)
        return values

    assert lowered(call, noise(1, 4, 4, 16), [Lowering.STEM]).text == "stem 1"


@pytest.mark.parametrize("count", range(1, 10))
def test_sums_have_each_term_once(count: int) -> None:
    assert total(tf.constant(2**power) for power in range(count)) == 2**count - 1


@settings(max_examples=10)
@given(
    strides=st.tuples(st.integers(1, 3), st.integers(2, 3)),
    size=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    padding=PADDINGS,
)
def test_pointwise_convolutions_with_strides(strides: tuple[int, int], size: tuple[int, int], padding: str) -> None:
    layer = keras.layers.Conv2D(5, 1, strides, padding, bias_initializer="random_normal")
    check(Lowering.POINTWISE, layer, noise(2, *size, 3))


@settings(max_examples=10)
@given(
    kernel_size=st.sampled_from([1, 3, (3, 2)]),
    strides=st.integers(1, 3),
    size=st.tuples(st.integers(3, 9), st.integers(3, 9)),
    groups=st.sampled_from([(2, 9), (4, 2), (6, 4), (6, 5), (12, 3)]),
    multiplier=st.integers(1, 3),
    padding=PADDINGS,
)
def test_convolutions_with_groups(
    size: tuple[int, int], groups: tuple[int, int], multiplier: int, **options: Any
) -> None:
    count, width = groups
    layer = keras.layers.Conv2D(count * multiplier, groups=count, bias_initializer="random_normal", **options)
    check(Lowering.GROUPED, layer, noise(2, *size, count * width))


@settings(max_examples=30)
@given(
    size=st.tuples(st.integers(1, 4), st.integers(1, 2)),
    kernel=st.tuples(st.integers(3, 5), st.integers(3, 5)),
    strides=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    dilation=st.integers(1, 2),
    padding=st.sampled_from(["SAME", [[0, 0], [4, 5], [6, 4], [0, 0]]]),
    before=st.sampled_from([None, [[0, 0], [4, 4], [7, 2], [0, 0]]]),
)
def test_convolutions_of_small_images(
    size: tuple[int, int], kernel: tuple[int, int], dilation: int, before: Any, padding: Any, **options: Any
) -> None:
    weights = tf.Variable(noise(*kernel, 5, 6))

    def convolve(images: tf.Tensor) -> tf.Tensor:
        padded = images if before is None else tf.pad(images, before)
        return tf.nn.conv2d(padded, weights, **options, padding=padding, dilations=dilation)

    check(Lowering.SMALL, convolve, noise(2, *size, 5))


@pytest.mark.parametrize(
    ("size", "options", "expected"),
    [
        ((1, 1), {"padding": "same"}, (1, 1)),
        ((2, 3), {"padding": "same"}, (3, 3)),
        ((2, 2), {"padding": "same", "strides": 2}, (2, 2)),
        ((1, 9), {"padding": "same"}, (1, 3)),
        ((8, 8), {"padding": "same", "dilation_rate": 8}, (1, 1)),
        ((3, 3), {"padding": "same"}, None),
        ((3, 3), {"padding": "valid"}, None),
    ],
)
def test_of_a_kernel_is_kept_what_meets_the_images(size: tuple[int, int], options: Any, expected: Any) -> None:
    layer, images = keras.layers.Conv2D(6, 3, **options), noise(1, *size, 5)
    made = lowered(layer, images, [Lowering.SMALL])
    assert bool(made.text) == (expected is not None)
    if expected:
        graph = made.forward.graph  # type: ignore[attr-defined]
        (product,) = (each for each in graph.get_operations() if each.type == "Conv2D")
        assert product.inputs[1].shape[:2] == expected


@pytest.mark.parametrize(
    "pad",
    [
        lambda images: tf.pad(images, [[0, 0], [1, 1], [1, 1], [0, 0]], constant_values=1),
        lambda images: tf.pad(images, [[0, 0], [1, 1], [1, 1], [0, 1]]),
        lambda images: tf.pad(images, [[0, 0], [1, 1], [1, 1], [0, 0]], "SYMMETRIC"),
    ],
)
def test_images_padded_by_more_than_zeros_are_not_small(pad: Any) -> None:
    images = noise(1, 2, 2, 5)
    weights = tf.Variable(noise(3, 3, pad(images).shape[-1], 6))
    assert not lowered(lambda values: tf.nn.conv2d(pad(values), weights, 1, "VALID"), images, [Lowering.SMALL]).text


@settings(max_examples=8)
@given(
    size=st.tuples(st.integers(3, 12), st.integers(9, 19)),
    channels=st.integers(32, 40),
    filters=st.integers(32, 40),
    padding=st.sampled_from(["SAME", "VALID", [[0, 0], [1, 2], [0, 3], [0, 0]]]),
)
def test_winograd(size: tuple[int, int], channels: int, filters: int, padding: Any) -> None:
    weights = tf.Variable(noise(3, 3, channels, filters))
    check(Lowering.WINOGRAD, lambda images: tf.nn.conv2d(images, weights, 1, padding), noise(2, *size, channels))


@settings(max_examples=12)
@given(
    kind=st.sampled_from([keras.layers.MaxPooling2D, keras.layers.AveragePooling2D]),
    window=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    strides=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    extra=st.tuples(SIDES, SIDES),
    padding=PADDINGS,
)
def test_pooling(kind: Any, window: tuple[int, int], extra: tuple[int, int], **options: Any) -> None:
    check(Lowering.POOLING, kind(window, **options), noise(2, window[0] + extra[0], window[1] + extra[1], 3) - 2)


@settings(max_examples=12)
@given(size=st.tuples(st.integers(1, 20), st.integers(1, 20)), keepdims=st.booleans())
def test_pooling_of_all_pixels(size: tuple[int, int], keepdims: bool) -> None:
    check(Lowering.POOLING, keras.layers.GlobalAveragePooling2D(keepdims=keepdims), noise(2, *size, 3) - 2)


@pytest.mark.parametrize("precision", [tf.float16, tf.bfloat16])
def test_pooling_of_all_pixels_adds_more_than_half_precision_can(precision: tf.DType) -> None:
    images = 100 + noise(1, 64, 64, 2)

    def mean(values: tf.Tensor) -> tf.Tensor:
        return tf.reduce_mean(tf.cast(values, precision), [1, 2])

    (got,) = lowered(mean, images, [Lowering.POOLING]).forward(tf.constant(images))
    assert got.dtype == precision
    wide = tf.cast(tf.cast(images, precision), tf.float32)
    np.testing.assert_array_equal(got, tf.cast(tf.reduce_mean(wide, [1, 2]), precision))


@settings(max_examples=12)
@given(size=st.tuples(st.integers(1, 9), st.integers(1, 9)), target=st.tuples(st.integers(1, 20), st.integers(1, 20)))
def test_resizing(size: tuple[int, int], target: tuple[int, int]) -> None:
    check(Lowering.RESIZE, keras.layers.Resizing(*target), noise(2, *size, 3))


def test_resizing_to_the_size_of_another_tensor() -> None:
    def resize(images: tf.Tensor) -> tf.Tensor:
        half = tf.nn.max_pool2d(images, 2, 2, "SAME")
        return tf.image.resize(half, tf.shape(images)[1:3])

    check(Lowering.RESIZE, resize, noise(2, 7, 8, 3))


@settings(max_examples=10)
@given(
    scale=st.booleans(), center=st.booleans(), axis=st.sampled_from([-1, 1, 3]), epsilon=st.sampled_from([1e-3, 1e-5])
)
def test_batch_normalization_of_keras(**options: Any) -> None:
    layer = keras.layers.BatchNormalization(
        **options,
        moving_mean_initializer="random_normal",
        moving_variance_initializer=keras.initializers.RandomUniform(0.1, 3),
        beta_initializer="random_normal",
        gamma_initializer="random_normal",
    )
    check(Lowering.NORMALIZATION, layer, noise(2, 4, 5, 6))


@pytest.mark.parametrize("data_format", ["NHWC", "NCHW"])
def test_batch_normalization_as_one_operation(data_format: str) -> None:
    images = noise(2, 4, 5, 6)
    numbers = [tf.Variable(values) for values in np.abs(noise(4, images.shape[1 if data_format == "NCHW" else 3]))]

    def normalize(values: tf.Tensor, data_format: str = data_format) -> tf.Tensor:
        return tf.compat.v1.nn.fused_batch_norm(values, *numbers, is_training=False, data_format=data_format)[0]

    def expected(values: tf.Tensor) -> tf.Tensor:  # channels first do not run on a CPU
        if data_format == "NHWC":
            return normalize(values)
        return tf.transpose(normalize(tf.transpose(values, [0, 2, 3, 1]), "NHWC"), [0, 3, 1, 2])

    made = lowered(normalize, images, [Lowering.NORMALIZATION])
    assert made.text == "normalization 1"
    assert difference(made.forward(tf.constant(images))[0], expected(images)) <= TOLERANCE


@settings(max_examples=10)
@given(scale=st.booleans(), center=st.booleans(), axis=st.sampled_from([-1, 1, [2, 3]]))
def test_layer_normalization(**options: Any) -> None:
    layer = keras.layers.LayerNormalization(
        **options, beta_initializer="random_normal", gamma_initializer="random_normal"
    )
    check(Lowering.NORMALIZATION, layer, noise(2, 4, 5, 6))


@pytest.mark.parametrize(
    ("name", "make", "size"),
    [
        (Lowering.DEPTHWISE, lambda **options: keras.layers.DepthwiseConv2D(3, padding="same", **options), (6, 7, 5)),
        (Lowering.DEPTHWISE, lambda **options: keras.layers.SeparableConv2D(3, 3, **options), (6, 7, 5)),
        (Lowering.GROUPED, lambda **options: keras.layers.Conv2D(6, 3, groups=3, **options), (6, 7, 12)),
        (Lowering.STEM, lambda **options: keras.layers.Conv2D(6, 3, padding="same", strides=2, **options), (6, 7, 3)),
        (Lowering.POINTWISE, lambda **options: keras.layers.Conv2D(6, 1, strides=2, **options), (6, 7, 20)),
        (Lowering.SMALL, lambda **options: keras.layers.Conv2D(6, 3, padding="same", **options), (1, 2, 20)),
        (Lowering.WINOGRAD, lambda **options: keras.layers.Conv2D(32, 3, **options), (9, 12, 32)),
        (Lowering.POOLING, lambda **options: keras.layers.MaxPooling2D(3, 2, **options), (6, 7, 5)),
        (Lowering.POOLING, lambda **options: keras.layers.AveragePooling2D(3, 2, "same", **options), (6, 7, 5)),
    ],
)
def test_channels_first(name: Lowering, make: Any, size: tuple[int, int, int]) -> None:
    images = noise(2, *size)
    keras.utils.set_random_seed(1)
    last, first = make(), make(data_format="channels_first")
    expected, own = last(images), np.moveaxis(images, -1, 1)
    first.build(own.shape)
    first.set_weights(last.get_weights())
    made = lowered(first, own, [name])
    assert made.text == f"{name} 1"
    assert difference(made.forward(tf.constant(own))[0], np.moveaxis(expected, -1, 1)) <= TOLERANCE


@pytest.mark.parametrize(
    ("layer", "names"),
    [
        (keras.layers.Conv2D(32, 1), []),
        (keras.layers.Conv2D(32, 3, strides=2), []),
        (keras.layers.Conv2D(32, 3, dilation_rate=2), []),
        (keras.layers.Conv2D(32, 3, groups=2), ["grouped"]),
        (keras.layers.Conv2D(32, 3, dtype="bfloat16"), []),
        (keras.layers.Conv2D(15, 3), []),
        (keras.layers.Conv2DTranspose(4, 3), []),
        (keras.layers.MaxPooling2D(6), []),
        (keras.layers.ReLU(), []),
        (keras.layers.LayerNormalization(), ["normalization"]),
        (keras.layers.UpSampling2D(2), []),
        (keras.layers.UpSampling2D(2, interpolation="bilinear"), ["resize"]),
        (keras.layers.UpSampling2D(2, interpolation="bilinear", dtype="bfloat16"), []),
        (keras.layers.Resizing(4, 4, interpolation="bicubic"), []),
        (keras.layers.Resizing(4, 4, antialias=True), []),
        (keras.layers.Rescaling(1 / 127.5, -1), []),
    ],
    ids=lambda each: getattr(each, "name", ""),
)
def test_other_operations_stay(layer: Any, names: list[str]) -> None:
    others = [name for name in Lowering if name is not Lowering.FLOAT32]  # with which all is float32
    text = lowered(layer, noise(1, 20, 20, 32), others).text
    assert [each.partition(" ")[0] for each in text.split(", ") if each] == names


def test_images_of_any_size_stay() -> None:
    weights = tf.Variable(noise(3, 3, 4, 1))
    function = trace(lambda images: tf.nn.depthwise_conv2d(images, weights, [1] * 4, "SAME"), (None, None, None, 4))
    assert lowering.lower(function, list(Lowering)).forward is function
