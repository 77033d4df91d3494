from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tests.server.models.lowering.tracing import TOLERANCE, compiled, difference, lowered, noise, program

from xlaserve.config import Bucket, BucketSettings, Lowering, Mode, ModelSettings
from xlaserve.models import catalog, lowering
from xlaserve.models.lowering import materialize
from xlaserve.models.networks.keras_runtime import keras
from xlaserve.models.sources import keras_models
from xlaserve.programs.tf.tensorflow_program import TensorFlowProgram


def test_every_lowering_has_a_row_and_is_named_where_users_look() -> None:
    assert {*lowering.SUBSTITUTES, Lowering.MICRO_BATCHES} == set(Lowering)
    help_text = ModelSettings.model_fields["disable_lowerings"].description or ""
    assert [name for name in Lowering if f"`{name}`" not in help_text] == []


def textures(grains: Iterable[int], side: int, seed: int = 0) -> Any:
    """Returns an image of noise for each number of grains a side, `[n, side, side, 3]` from -128 to 127."""
    noise = np.random.default_rng(seed)
    images = [tf.image.resize(noise.uniform(-128, 127, (grain, grain, 3)), (side, side)) for grain in grains]
    return np.stack(images).astype(np.float32)


def settle(model: Any, images: Any) -> None:
    """Gives batch normalization scales and offsets such as training leaves, and the statistics of `images`.

    Without offsets, a network with random weights is chaotic: it blows any rounding up a hundredfold.
    """
    noise = np.random.default_rng(0)
    for layer in model.layers:
        if isinstance(layer, keras.layers.BatchNormalization):
            layer.momentum = 0.0
            layer.beta.assign(noise.uniform(0, 2, layer.beta.shape))
            if layer.scale:
                layer.gamma.assign(noise.uniform(0.5, 1.5, layer.gamma.shape))
    model(images, training=True)


def depthwise(**options: Any) -> Any:
    return keras.layers.DepthwiseConv2D(3, padding="same", **options)


def test_xla_computes_the_same() -> None:
    images = noise(2, 9, 8, 5)
    layer = depthwise(strides=2)
    assert difference(compiled(lowered(layer, images), images), layer(images)) < TOLERANCE


def test_half_precision_stays_half_precision() -> None:
    images = noise(1, 6, 6, 4)
    layer = depthwise(dtype="bfloat16")
    got = compiled(lowered(lambda values: layer(tf.cast(values, tf.bfloat16)), images), images)
    assert got.dtype == tf.bfloat16
    assert difference(got, layer(images)) < 0.02


def test_slices_are_summed_for_any_number_of_images() -> None:
    layer = keras.layers.DepthwiseConv2D(7, padding="same")
    images = noise(3, 8, 8, 160)
    made = lowered(layer, images)
    for several in (images[:1], images):
        assert difference(compiled(made, several), layer(several)) < TOLERANCE
        text = program(made, several)
        assert " while(" in text
        assert "[2,28,28" not in text  # padded for slices of an unknown size


def test_what_is_read_in_slices_is_computed_once() -> None:
    layer, images = depthwise(), noise(1, 9, 9, 4)
    layer.build(images.shape)
    made = lowered(lambda values: layer(tf.nn.relu(values)), images)
    assert program(made, images).count(" maximum(") == 1


def test_what_layer_normalization_reads_is_computed_once() -> None:
    convolution, layer = keras.layers.DepthwiseConv2D(3), keras.layers.LayerNormalization()
    images = noise(1, 9, 9, 64)
    convolution.build(images.shape)
    layer.build((None, 7, 7, 64))

    def products(*names: Lowering) -> int:
        made = lowered(lambda values: layer(convolution(values)), images, names)
        return program(made, images).count(" multiply(")

    assert products(Lowering.DEPTHWISE, Lowering.NORMALIZATION) < products(Lowering.DEPTHWISE) - 9


@pytest.mark.parametrize("is_padded_before", [False, True])
@pytest.mark.parametrize(("name", "width"), [(Lowering.SMALL, 24), (Lowering.GROUPED, 6)])
def test_xla_turns_no_small_image_around(name: Lowering, width: int, is_padded_before: bool) -> None:
    weights, images = tf.Variable(noise(3, 3, width, 24)), noise(2, 2, 3, 24)

    def convolve(values: tf.Tensor) -> tf.Tensor:
        if is_padded_before:
            return tf.nn.conv2d(tf.pad(values, [[0, 0], [1, 1], [1, 1], [0, 0]]), weights, 1, "VALID")
        return tf.nn.conv2d(values, weights, 1, "SAME")

    made = lowered(convolve, images, [name])
    assert made.text == f"{name} 1"
    assert " reverse(" not in program(made, images)
    assert difference(compiled(made, images), convolve(tf.constant(images))) < TOLERANCE
    if name is Lowering.SMALL:
        assert " reverse(" in program(lowered(convolve, images, []), images)  # or it is not needed any more


class Doubling(keras.Model):
    def call(self, inputs: Any, training: Any = None, mask: Any = None) -> Any:
        return 2 * super().call(inputs, training=training)


def test_a_keras_model_with_a_call_of_its_own_is_lowered() -> None:
    pixels = keras.Input((12, 12, 3))
    model = Doubling(pixels, keras.layers.GlobalMaxPooling2D()(depthwise()(depthwise()(pixels))))
    network = keras_models.network(model, settings(), preprocessing="none", weights="random")
    program: Any = network.program
    assert program.lowerings(Bucket(1, 12, 12)) == "depthwise 2"
    images = np.random.default_rng(0).integers(0, 256, (1, 12, 12, 3), np.uint8)
    got, *_ = program.compile(Mode.XLA, Bucket(1, 12, 12)).executable(images)
    assert difference(got, model(tf.cast(images, tf.float32))) < TOLERANCE


def pooled(images: tf.Tensor) -> tf.Tensor:
    return tf.nn.max_pool2d(images, 2, 2, "VALID")


def resized(images: tf.Tensor) -> tf.Tensor:
    return tf.image.resize(images, (16, 16))


def averaged(images: tf.Tensor) -> tf.Tensor:
    return tf.reduce_mean(images, axis=(1, 2), keepdims=True)


def small(images: tf.Tensor) -> tf.Tensor:
    return tf.nn.conv2d(images[:, :2, :2], tf.ones((3, 3, 3, 4)), 1, "SAME")


def stem(images: tf.Tensor) -> tf.Tensor:
    return tf.nn.conv2d(images, tf.ones((3, 3, 3, 8)), 2, "SAME")


def separate(images: tf.Tensor) -> tf.Tensor:
    return tf.nn.depthwise_conv2d(images, tf.ones((3, 3, 3, 1)), (1, 1, 1, 1), "SAME")


@pytest.mark.parametrize(
    ("compute", "name"),
    [
        (pooled, Lowering.POOLING),
        (averaged, Lowering.POOLING),
        (resized, Lowering.RESIZE),
        (small, Lowering.SMALL),
        (stem, Lowering.STEM),
        (separate, Lowering.DEPTHWISE),
    ],
)
def test_what_takes_rows_of_an_unknown_number_serves_without_lowerings(
    compute: Callable[[tf.Tensor], tf.Tensor], name: Lowering
) -> None:
    def forward(pixels: tf.Tensor) -> tuple[tf.Tensor, ...]:
        values = tf.cast(pixels, tf.float32)
        kept = tf.boolean_mask(values, tf.reduce_max(values, axis=(1, 2, 3)) >= 0)
        return (tf.reduce_max(compute(kept), axis=(1, 2)),)

    program = TensorFlowProgram(forward, lambda function: lowering.lower(function, [name]))
    bucket = Bucket(3, 8, 8)
    assert program.lowerings(bucket) == f"{name} 1"
    images = np.random.default_rng(0).integers(0, 256, (*bucket, 3), np.uint8)
    compilation = program.compile(Mode.XLA, bucket)
    (wanted,) = forward(tf.constant(images))
    np.testing.assert_allclose(compilation.executable(images)[0], wanted, rtol=1e-5)
    (warning,) = compilation.warnings
    assert warning.startswith(f"XLA runs 8x8 without lowerings, as a program failed with {name}: Asked to propagate")
    assert program.lowerings(bucket) == ""


def test_a_program_takes_no_weights_but_those_that_it_reads() -> None:
    images = noise(1, 12, 12, 32)
    layers = [keras.layers.Conv2D(32, 3, use_bias=False), keras.layers.BatchNormalization(), depthwise()]
    stack = keras.Sequential([keras.Input(images.shape[1:]), *layers])
    made = lowered(stack, images)
    assert made.text == "depthwise 1, winograd 1, normalization 1"
    function: Any = made.forward
    assert len(function.captured_inputs) == 7  # six are Winograd's parts of a kernel; 32 numbers are a constant


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("MobileNet", {"alpha": 0.25}),
        ("MobileNetV2", {"alpha": 0.35}),
        ("MobileNetV3Small", {"alpha": 0.75, "minimalistic": True}),
        pytest.param("EfficientNetV2B0", {}, marks=pytest.mark.slow),
        pytest.param("Xception", {"include_top": False, "pooling": "max"}, marks=pytest.mark.slow),
        *(
            pytest.param(name, {}, marks=pytest.mark.slow)
            for name in ("MobileNetV3Large", "EfficientNetB0", "NASNetMobile", "ConvNeXtTiny", "ResNet50")
        ),
    ],
)
def test_whole_models_give_the_same(name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(materialize, "xla_optimization_barrier", lambda values: values)  # nothing to compile
    side = 72 if name == "Xception" else 64
    keras.utils.set_random_seed(3)
    heads = {} if "include_top" in options else {"classifier_activation": None}
    scaling = 1.0 if name.startswith(("EfficientNet", "MobileNetV3", "ConvNeXt")) else 1 / 128
    model = getattr(keras.applications, name)(weights=None, input_shape=(side, side, 3), **heads, **options)
    settle(model, scaling * textures((2, 3, 5, 8, 16, 64), side))
    images = scaling * textures((4, 32), side, seed=1)
    expected = model(images, training=False)
    made = lowered(lambda values: model(values, training=False), images)
    assert difference(expected[0], expected[1]) > 0.01
    assert difference(made.forward(tf.constant(images))[0], expected) < TOLERANCE


def settings(**fields: Any) -> ModelSettings:
    return ModelSettings(
        name="it",
        source="keras.applications:MobileNet",
        weights="random",
        input_size=(32, 32),
        buckets=(BucketSettings(1),),
        **fields,
    )


def test_a_loaded_model_says_what_was_lowered_and_runs_it_in_xla_alone() -> None:
    model = catalog.load(settings(modes=(Mode.XLA, Mode.GRAPH)))
    assert model.lowerings == "depthwise 13, stem 1, normalization 27, pooling 1"
    assert "depthwise" in model.lowering_names
    pixels = np.random.default_rng(0).integers(0, 256, (1, 32, 32, 3), np.uint8)
    xla, graph = (
        model.program.compile(mode, Bucket(1, 32, 32)).executable(pixels)[0] for mode in (Mode.XLA, Mode.GRAPH)
    )
    # Two backends with their own order of operations: what a lowering itself may differ by is tested above.
    np.testing.assert_allclose(xla, graph, atol=1e-4)


def mixed() -> Any:
    """Returns a Keras model in which most lowerings replace something."""
    layers = [
        keras.layers.Conv2D(32, 3, strides=2, padding="same"),  # stem
        keras.layers.BatchNormalization(),
        depthwise(),
        keras.layers.Conv2D(32, 3, padding="same", groups=8),
        keras.layers.Conv2D(32, 3, padding="same"),  # winograd
        keras.layers.Conv2D(32, 1, strides=4),  # pointwise
        keras.layers.Conv2D(8, 3, padding="same"),  # small
        keras.layers.Resizing(5, 6),
        keras.layers.GlobalAveragePooling2D(),
    ]
    return keras.Sequential([keras.Input((16, 16, 3)), *layers])


MIXED = set(Lowering) - {Lowering.FLOAT32, Lowering.MICRO_BATCHES}
"""The lowerings that replace something in `mixed`."""


def named(network: Any) -> set[str]:
    """Returns the names of the lowerings of a network's program."""
    return {part.split()[0] for part in network.program.lowerings(Bucket(1, 16, 16)).split(", ") if part}


def test_each_lowering_is_switched_off_by_its_name() -> None:
    model = mixed()
    for name in MIXED:
        off = keras_models.network(model, settings(disable_lowerings=(name,)), preprocessing="none", weights="random")
        assert named(off) == MIXED - {name}


@pytest.mark.parametrize("fields", [{"modes": (Mode.GRAPH,)}, {"disable_lowerings": tuple(Lowering)}])
def test_nothing_is_lowered_where_nothing_is_asked_for(fields: dict[str, Any]) -> None:
    network = keras_models.network(mixed(), settings(**fields), preprocessing="none", weights="random")
    assert named(network) == set()


def test_a_saved_model_is_lowered_as_the_keras_model_would_be(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    keras.utils.set_random_seed(3)
    keras_model = mixed()
    settle(keras_model, textures((2, 3, 5, 8, 16, 64), 16) / 128)
    keras_model.export(tmp_path / "it", verbose=False)
    fields: Any = {"name": "it", "source": str(tmp_path / "it"), "buckets": (BucketSettings(2),)}
    fields |= {"preprocess": "tf"}
    model = catalog.load(ModelSettings(**fields))
    bucket = Bucket(2, 16, 16)
    assert {part.split()[0] for part in model.lowerings.split(", ")} == MIXED
    assert f"model it: lowered for XLA on a CPU: {model.lowerings}" in caplog.text
    as_it_is = catalog.load(ModelSettings(**fields, disable_lowerings=tuple(Lowering)))
    assert not as_it_is.lowerings
    pixels = textures((4, 32), 16, seed=1).astype(np.int32).clip(-128, 127).astype(np.uint8) + np.uint8(128)
    got, expected = (each.program.compile(Mode.XLA, bucket).executable(pixels)[0] for each in (model, as_it_is))
    assert difference(expected[0], expected[1]) > 0.01
    assert difference(got, expected) < TOLERANCE
