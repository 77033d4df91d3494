from __future__ import annotations

import inspect

import numpy as np
import pytest
import tensorflow as tf

from xlaserve.models.networks import preprocess
from xlaserve.models.networks.keras_runtime import keras
from xlaserve.models.sources import applications

FAMILIES = sorted(
    name for name, value in vars(keras.applications).items() if inspect.ismodule(value) and name != "imagenet_utils"
)
APPLICATIONS = sorted(name for name, value in vars(keras.applications).items() if inspect.isfunction(value))
PIXELS = np.random.default_rng(0).integers(0, 256, (2, 9, 7, 3), np.uint8)


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
