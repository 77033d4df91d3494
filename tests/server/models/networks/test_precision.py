from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image
from scripts.digits_data import digit_images

from xlaserve.config import Bucket, BucketSettings, Lowering, Mode, ModelSettings, Precision
from xlaserve.errors import ModelFailed
from xlaserve.models import catalog
from xlaserve.models.networks import precision
from xlaserve.models.networks.keras_runtime import keras
from xlaserve.programs.tf.function import stablehlo

PIXELS = np.random.default_rng(0).integers(0, 256, (4, 6, 5, 3), np.uint8)
HALVES = pytest.mark.parametrize("half", [Precision.BFLOAT16, Precision.FLOAT16])


def settings(source: str = "builtin:digits", **fields: Any) -> ModelSettings:
    return ModelSettings(name="it", source=source, **({"buckets": (BucketSettings(4),)} | fields))


@HALVES
@pytest.mark.parametrize("mode", [Mode.XLA, Mode.GRAPH, Mode.EAGER])
def test_outputs_are_float32_and_close_to_those_of_float32(
    keras_file: Callable[..., str], tiny_model: Callable[..., Any], mode: Mode, half: Precision
) -> None:
    model = tiny_model()
    narrow = catalog.load(settings(keras_file(model), precision=half))
    (scores,) = narrow.program.compile(mode, Bucket(4, 6, 5)).executable(PIXELS)
    wanted = np.asarray(model(PIXELS.astype(np.float32)))
    assert scores.dtype == np.float32
    difference = np.abs(scores - wanted).max() / np.abs(wanted).max()
    # XLA on a CPU would compute in float32 in any case.
    assert difference < 1e-6 if mode is Mode.XLA else 1e-6 < difference < 0.02


@pytest.mark.parametrize("policy", ["float32", "mixed_float16", "mixed_bfloat16"])
@pytest.mark.parametrize("is_saved_model", [False, True])
def test_a_model_saved_in_mixed_precision_is_known_to_be_narrow(
    tmp_path: Path, keras_file: Callable[..., str], policy: str, is_saved_model: bool
) -> None:
    pixels = keras.Input((6, 5, 3))
    values = keras.layers.Conv2D(4, 3, dtype=policy)(pixels)
    model = keras.Model(pixels, keras.layers.GlobalAveragePooling2D(dtype=policy)(values))
    source = str(tmp_path / "saved") if is_saved_model else keras_file(model)
    if is_saved_model:
        model.export(source, verbose=False)
    assert catalog.load(settings(source, task="embedding")).is_narrow is (policy != "float32")


@HALVES
def test_the_reference_computes_in_float32_and_leaves_the_model_as_it_was(
    keras_file: Callable[..., str], tiny_model: Callable[..., Any], half: Precision
) -> None:
    model = tiny_model()
    narrow = catalog.load(settings(keras_file(model), precision=half))
    executable = narrow.program.compile(Mode.EAGER, Bucket(4, 6, 5)).executable
    (before,) = executable(PIXELS)
    assert narrow.reference is not None
    (reference,) = narrow.reference(PIXELS)
    np.testing.assert_allclose(reference, model(PIXELS.astype(np.float32)), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(executable(PIXELS)[0], before)


def test_scaling_and_outputs_are_float32_and_nested_layers_are_narrow(tiny_model: Callable[..., Any]) -> None:
    inner = tiny_model()
    pixels = keras.Input((6, 5, 3))
    model = keras.Model(pixels, keras.layers.Dense(2, activation="softmax")(inner(pixels)))
    precision.narrow(model, Precision.BFLOAT16)
    computes = {type(layer).__name__: layer.compute_dtype for layer in inner.layers}
    assert computes["Rescaling"] == "float32"
    assert computes["Conv2D"] == "bfloat16"
    assert model.layers[-1].compute_dtype == "float32"
    assert {variable.dtype for variable in model.variables} == {"float32"}


@pytest.mark.parametrize("mode", [Mode.XLA, Mode.GRAPH])
def test_digits_in_bfloat16_are_read_as_those_in_float32_are(mode: Mode) -> None:
    scans = digit_images("held_out", side=32)
    bucket = Bucket(len(scans), 32, 32)
    pixels = np.stack([np.asarray(Image.open(io.BytesIO(scan.png)).convert("RGB")) for scan in scans])
    answers = []
    for how in (Precision.FLOAT32, Precision.BFLOAT16):
        model = catalog.load(settings(precision=how))
        (scores,) = model.program.compile(mode, bucket).executable(pixels)
        answers.append(scores.argmax(axis=1))
    truth = np.array([scan.label for scan in scans])
    assert np.mean(answers[0] == answers[1]) >= 0.99
    assert np.mean(answers[1] == truth) >= 0.97


def test_lowered_layers_compute_in_the_models_precision_too(keras_file: Callable[..., str]) -> None:
    pixels = keras.Input((8, 8, 3))
    x = keras.layers.Conv2D(16, 3, padding="same")(pixels)
    for _ in range(4):
        x = keras.layers.DepthwiseConv2D(3, padding="same")(x)
        x = keras.layers.BatchNormalization()(keras.layers.Conv2D(16, 3, padding="same")(x))
    source = keras_file(keras.Model(pixels, keras.layers.Dense(4)(keras.layers.GlobalAveragePooling2D()(x))))
    kwargs: dict[str, Any] = {"modes": (Mode.XLA,), "precision": Precision.BFLOAT16}
    model = catalog.load(settings(source, **kwargs, disable_lowerings=(Lowering.FLOAT32,)))
    assert "depthwise 4" in model.lowerings
    images = np.random.default_rng(0).integers(0, 256, (4, 8, 8, 3), np.uint8)
    executable = model.program.compile(Mode.XLA, Bucket(4, 8, 8)).executable
    products = re.findall(r"\.(?:convolution|dot_general)\b.*", stablehlo(executable))
    assert len(products) >= 4
    assert [line for line in products if "f32>" in line] == []
    assert np.isfinite(executable(images)[0]).all()


def test_what_computes_in_types_of_its_own_takes_no_precision(tmp_path: Path) -> None:
    module = tf.Module()
    module.sums = tf.function(
        lambda pixels: {"sums": tf.reduce_sum(pixels, axis=(1, 2))}, input_signature=[tf.TensorSpec((None, 6, 5, 3))]
    )
    tf.saved_model.save(module, str(tmp_path / "sums"), signatures=module.sums)
    for source, name in (("builtin:noop", "builtin:noop"), (str(tmp_path / "sums"), "sums")):
        with pytest.raises(ModelFailed, match=f"precision: {name} takes none, expected no precision, got bfloat16"):
            catalog.load(settings(source, precision=Precision.BFLOAT16))
