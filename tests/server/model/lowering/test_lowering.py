from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from xlaserve.config import Bucket, BucketSettings, Lowering, Mode, ModelSettings
from xlaserve.model import catalog, lowering
from xlaserve.model.networks.keras_runtime import keras

TOLERANCE = 1e-5
"""The largest difference that is allowed, as a share of the largest output."""
IMAGES = np.random.default_rng(0).normal(size=(2, 12, 12, 3)).astype(np.float32)


def lower(model: Any) -> lowering.Lowered:
    lowered = lowering.lower(model, list(Lowering))
    assert lowered is not None
    return lowered


def test_every_lowering_has_a_row_and_is_named_where_users_look() -> None:
    assert set(lowering.LOWERINGS) == set(Lowering)
    help_text = ModelSettings.model_fields["disable_lowerings"].description or ""
    assert [name for name in Lowering if f"`{name}`" not in help_text] == []


def difference(got: Any, expected: Any) -> float:
    return float(np.abs(got - expected).max() / np.abs(expected).max())


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


def test_weights_are_shared() -> None:
    pixels = keras.Input((12, 12, 3))
    model = keras.Model(pixels, depthwise()(pixels))
    lowered = lower(model).model
    model.set_weights([2 * weight for weight in model.get_weights()])
    assert [variable.path for variable in lowered.variables] == [variable.path for variable in model.variables]
    assert difference(lowered(IMAGES), model(IMAGES)) < TOLERANCE


def test_models_within_models_and_layers_called_twice_are_lowered() -> None:
    shared = depthwise(name="shared")
    inner_pixels = keras.Input((12, 12, 3))
    inner = keras.Model(inner_pixels, shared(keras.layers.ReLU()(shared(inner_pixels))))
    stack = keras.Sequential([keras.Input((12, 12, 3)), depthwise(), keras.layers.Conv2D(3, 1)])
    pixels = keras.Input((12, 12, 3))
    model = keras.Model(pixels, keras.ops.concatenate([inner(pixels), stack(inner(pixels)), pixels], axis=-1))
    lowered = lower(model)
    assert lowered.counts[Lowering.DEPTHWISE] == 2
    assert difference(lowered.model(IMAGES), model(IMAGES)) < TOLERANCE


def test_several_inputs_and_outputs_keep_their_structure() -> None:
    pixels = {side: keras.Input((12, 12, 3), name=side) for side in ("left", "right")}
    layer = depthwise()
    model = keras.Model(pixels, {"a": layer(pixels["left"]), "b": [layer(pixels["right"])]})
    images = {"left": IMAGES, "right": 2 * IMAGES}
    got, expected = lower(model).model(images), model(images)
    assert difference(got["a"], expected["a"]) < TOLERANCE
    assert difference(got["b"][0], expected["b"][0]) < TOLERANCE


class Block(keras.layers.Layer):
    """Holds layers in every way that a layer can."""

    def __init__(self) -> None:
        super().__init__(name="block")
        self.convolution = depthwise()
        self.several = [depthwise(), {"inner": keras.Sequential([depthwise(), keras.layers.ReLU()])}]
        self.normalization = keras.layers.BatchNormalization()
        self.doubling: Any = None
        self.unused = depthwise()

    def build(self, shape: Any) -> None:
        pixels = keras.Input(shape[1:])
        self.doubling = Doubling(pixels, depthwise()(pixels))

    def call(self, inputs: Any, training: bool = False) -> Any:
        outputs = self.several[1]["inner"](self.several[0](self.convolution(inputs)))
        return self.doubling(self.normalization(outputs, training=training))


def test_what_layers_hold_is_lowered_but_for_models_with_a_call_of_their_own() -> None:
    pixels = keras.Input((12, 12, 3))
    block = Block()
    model = keras.Model(pixels, block(block(depthwise()(pixels))))
    lowered = lower(model)
    assert lowered.counts == {Lowering.DEPTHWISE: 4, Lowering.NORMALIZATION: 1}
    assert isinstance(block.convolution, keras.layers.DepthwiseConv2D)
    assert {id(variable) for variable in lowered.model.variables} == {id(variable) for variable in model.variables}
    model.set_weights([2 * weight for weight in model.get_weights()])
    assert difference(lower(model).model(IMAGES), model(IMAGES)) < TOLERANCE


class Inquisitive(keras.layers.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = depthwise()

    def call(self, inputs: Any) -> Any:
        return self.convolution(inputs) * self.convolution.depth_multiplier


def test_a_layer_that_needs_what_it_holds_keeps_it(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    pixels = keras.Input((12, 12, 3))
    model = keras.Model(pixels, Inquisitive()(depthwise()(pixels)))
    lowered = lower(model)
    assert lowered.counts == {Lowering.DEPTHWISE: 1}
    assert "layers within layers are not lowered" in caplog.text
    assert "depth_multiplier" in caplog.text
    assert difference(lowered.model(IMAGES), model(IMAGES)) < TOLERANCE


class Doubling(keras.Model):
    def call(self, inputs: Any, training: Any = None, mask: Any = None) -> Any:
        return 2 * super().call(inputs, training=training)


@pytest.mark.parametrize("is_nested", [False, True])
def test_a_model_with_a_call_of_its_own_is_left_alone(is_nested: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    pixels = keras.Input((12, 12, 3))
    model = Doubling(pixels, depthwise()(pixels))
    if is_nested:
        outer = keras.Input((12, 12, 3))
        model = keras.Model(outer, model(depthwise()(outer)), name="outer")
    assert lowering.lower(model, list(Lowering)) is None
    assert f"Doubling is a class of its own: {model.name} is not lowered" in caplog.text


def test_a_model_without_such_layers_is_none() -> None:
    pixels = keras.Input((12, 12, 3))
    assert lowering.lower(keras.Model(pixels, keras.layers.ReLU()(pixels)), list(Lowering)) is None


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("MobileNet", {"alpha": 0.25}),
        ("MobileNetV2", {"alpha": 0.35}),
        ("MobileNetV3Small", {"alpha": 0.75, "minimalistic": True}),
        ("MobileNetV3Large", {"alpha": 0.75}),
        ("EfficientNetB0", {}),
        ("EfficientNetV2B0", {}),
        ("Xception", {"include_top": False, "pooling": "max"}),
        ("NASNetMobile", {}),
        ("ConvNeXtTiny", {}),
        ("ResNet50", {}),
    ],
)
def test_whole_models_give_the_same(name: str, options: dict[str, Any]) -> None:
    side = 72 if name == "Xception" else 64
    keras.utils.set_random_seed(3)
    heads = {} if "include_top" in options else {"classifier_activation": None}
    scaling = 1.0 if name.startswith(("EfficientNet", "MobileNetV3", "ConvNeXt")) else 1 / 128
    model = getattr(keras.applications, name)(weights=None, input_shape=(side, side, 3), **heads, **options)
    settle(model, scaling * textures((2, 3, 5, 8, 16, 64), side))
    images = scaling * textures((4, 32), side, seed=1)
    expected, got = model(images, training=False), lower(model).model(images, training=False)
    assert difference(expected[0], expected[1]) > 0.01
    assert difference(got, expected) < TOLERANCE


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
    assert "depthwise 13" in model.lowerings
    assert "depthwise" in model.lowering_names
    pixels = np.random.default_rng(0).integers(0, 256, (1, 32, 32, 3), np.uint8)
    xla, graph = (
        model.program.compile(mode, Bucket(1, 32, 32)).executable(pixels)[0] for mode in (Mode.XLA, Mode.GRAPH)
    )
    # Two backends with their own order of operations: what a lowering itself may differ by is tested above.
    np.testing.assert_allclose(xla, graph, atol=1e-4)


@pytest.mark.parametrize("name", Lowering)
def test_each_lowering_is_switched_off_by_its_name(name: Lowering) -> None:
    assert name not in catalog.load(settings(disable_lowerings=(name,))).lowerings


@pytest.mark.parametrize("fields", [{"modes": (Mode.GRAPH,)}, {"disable_lowerings": tuple(Lowering)}])
def test_nothing_is_lowered_where_nothing_is_asked_for(fields: dict[str, Any]) -> None:
    assert catalog.load(settings(**fields)).lowerings == ""
