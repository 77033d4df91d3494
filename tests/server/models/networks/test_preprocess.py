from __future__ import annotations

import inspect
import math
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from numpy.typing import NDArray
from pydantic import ValidationError

from xlaserve.config import ScalingSettings
from xlaserve.models.networks import preprocess
from xlaserve.models.networks.keras_runtime import keras
from xlaserve.models.sources import applications

FAMILIES = sorted(
    name for name, value in vars(keras.applications).items() if inspect.ismodule(value) and name != "imagenet_utils"
)
APPLICATIONS = sorted(name for name, value in vars(keras.applications).items() if inspect.isfunction(value))
PIXELS = np.random.default_rng(0).integers(0, 256, (2, 9, 7, 3), np.uint8)
LEVELS = PIXELS.astype(np.float64)
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def scaled(how: preprocess.Preprocess, jit: bool | None) -> NDArray[np.float32]:
    def run(pixels: tf.Tensor) -> tf.Tensor:
        return preprocess.apply(pixels, how)

    run = run if jit is None else tf.function(run, jit_compile=jit)
    return np.asarray(run(tf.constant(PIXELS)))


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_is_prepared_as_keras_defines_it(family: str) -> None:
    expected = getattr(keras.applications, family).preprocess_input(PIXELS.astype(np.float32))
    prepared = preprocess.apply(tf.constant(PIXELS), preprocess.FAMILIES[family])
    assert prepared.dtype == tf.float32
    np.testing.assert_allclose(prepared.numpy(), expected, atol=1e-5)


@pytest.mark.parametrize("name", APPLICATIONS)
def test_each_application_is_of_a_family_that_is_known(name: str) -> None:
    assert applications.family_preprocess(applications.find_application(name)) in set(preprocess.FAMILIES.values())


def test_unit_scales_to_one() -> None:
    prepared = preprocess.apply(tf.constant(PIXELS), "unit").numpy()
    np.testing.assert_allclose(prepared, PIXELS / 255, atol=1e-6)


@pytest.mark.parametrize("mode", [None, False, True])  # operation by operation, as a graph, by XLA
@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ({"mean": 127, "deviation": 128}, (LEVELS - 127) / 128),
        ({"divisor": 127.5, "mean": 1}, LEVELS / 127.5 - 1),
        ({"mean": 255, "deviation": -1}, 255 - LEVELS),
        ({"divisor": 255, "mean": 1, "deviation": -1}, 1 - LEVELS / 255),
        ({"divisor": 255, "mean": MEAN, "deviation": DEVIATION}, (LEVELS / 255 - MEAN) / DEVIATION),
        ({"mean": [1, 2, 3]}, LEVELS - [1, 2, 3]),
        ({"divisor": 255, "deviation": [1, 2, 3]}, LEVELS / 255 / [1, 2, 3]),
    ],
)
def test_numbers_scale_as_their_formula_says(how: dict[str, Any], expected: NDArray[Any], mode: bool | None) -> None:
    scaling = ScalingSettings.model_validate(how)
    prepared = scaled(scaling, mode)
    assert prepared.dtype == np.float32
    np.testing.assert_allclose(prepared, expected, rtol=1e-6, atol=1e-6)
    assert scaling.factor == pytest.approx(np.ptp(expected) / np.ptp(LEVELS), rel=0.7)


def test_imagenets_numbers_are_torch() -> None:
    scaling = ScalingSettings(divisor=255, mean=MEAN, deviation=DEVIATION)
    np.testing.assert_array_equal(scaled(scaling, None), scaled("torch", None))


@pytest.mark.parametrize("mode", [None, False, True])
def test_standardize_is_tensorflows_for_each_image(mode: bool | None) -> None:
    expected = tf.image.per_image_standardization(LEVELS.astype(np.float32)).numpy()
    prepared = scaled("standardize", mode)
    np.testing.assert_allclose(prepared, expected, rtol=0, atol=1e-6)
    np.testing.assert_allclose(prepared.mean(axis=(1, 2, 3)), 0, atol=1e-5)
    np.testing.assert_allclose(prepared.std(axis=(1, 2, 3)), 1, atol=1e-5)


def test_an_image_of_one_colour_is_standardized_to_zeros() -> None:
    prepared = preprocess.apply(tf.fill((1, 4, 4, 3), tf.constant(7, tf.uint8)), "standardize")
    np.testing.assert_array_equal(prepared, np.zeros((1, 4, 4, 3)))


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"mean": []},
        {"mean": [1, 2, 3], "deviation": [1, 2]},
        {"deviation": 0},
        {"deviation": [1, 0, 1]},
        {"divisor": 0},
        {"divisor": True},
        {"mean": math.nan},
        {"scale": 255},
    ],
)
def test_numbers_that_scale_nothing_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        ScalingSettings.model_validate(wrong)
