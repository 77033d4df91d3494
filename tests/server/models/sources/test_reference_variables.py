"""SavedModels of TensorFlow 1 whose variables are reference variables, which XLA can't compile as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from numpy.typing import NDArray

from xlaserve.config import Bucket, BucketSettings, Mode, ModelSettings
from xlaserve.models import catalog

v1 = tf.compat.v1
HEIGHT, WIDTH = 6, 8
PIXELS = np.random.default_rng(0).integers(0, 256, (2, HEIGHT, WIDTH, 3), np.uint8)


@pytest.fixture
def tensorflow_1() -> Any:
    """Loops as TensorFlow 1 writes them."""
    control_flow = v1.control_flow_v2_enabled()
    v1.disable_control_flow_v2()
    yield
    if control_flow:
        v1.enable_control_flow_v2()


def decoded(text: tf.Tensor) -> tf.Tensor:
    image = tf.io.decode_jpeg(text, channels=3)
    return tf.squeeze(v1.image.resize_bilinear(image[tf.newaxis], (HEIGHT, WIDTH)), [0])


def export_of_two(folder: Path, ages: NDArray[np.float32]) -> NDArray[Any]:
    """Writes a SavedModel of an image and numbers; returns its answers to PIXELS and `ages`."""
    with tf.Graph().as_default(), v1.Session() as session:
        photo = v1.placeholder(tf.float32, [None, HEIGHT, WIDTH, 3], name="photo")
        age = v1.placeholder(tf.float32, [None, 2], name="age")
        initial = v1.random_normal_initializer(stddev=0.1, seed=0)
        weights = v1.get_variable("weights", (5, 4), initializer=initial, use_resource=False)
        scores = tf.nn.softmax(tf.concat([tf.reduce_mean(photo / 255.0, (1, 2)), age], 1) @ weights)
        session.run(v1.global_variables_initializer())
        v1.saved_model.simple_save(session, str(folder), {"photo": photo, "age": age}, {"scores": scores})
        return np.asarray(session.run(scores, {photo: PIXELS, age: ages}))


def export(folder: Path, *, is_encoded: bool) -> NDArray[Any]:
    """Writes a SavedModel; returns its answers to PIXELS."""
    with tf.Graph().as_default(), v1.Session() as session:
        if is_encoded:
            image = v1.placeholder(tf.string, [None], name="files")
            images = tf.map_fn(decoded, tf.io.decode_base64(image), fn_output_signature=tf.float32)
            images.set_shape((None, HEIGHT, WIDTH, 3))
        else:
            image = images = v1.placeholder(tf.float32, [None, HEIGHT, WIDTH, 3], name="photo")
        initial = v1.random_normal_initializer(stddev=0.1, seed=0)
        weights = v1.get_variable("weights", (3, 4), initializer=initial, use_resource=False)
        scores = tf.nn.softmax(tf.reduce_mean(images / 255.0, (1, 2)) @ weights)
        session.run(v1.global_variables_initializer())
        v1.saved_model.simple_save(session, str(folder), {"image": image}, {"scores": scores})
        files = session.run(tf.io.encode_base64(tf.stack([tf.io.encode_png(one) for one in PIXELS])))
        return np.asarray(session.run(scores, {image: files if is_encoded else PIXELS}))


@pytest.mark.usefixtures("tensorflow_1")
@pytest.mark.parametrize("is_encoded", [False, True], ids=["of pixels", "of encoded images"])
@pytest.mark.parametrize("mode", [Mode.XLA, Mode.GRAPH])
def test_reference_variables_become_variables_that_xla_compiles(tmp_path: Path, is_encoded: bool, mode: Mode) -> None:
    wanted = export(tmp_path / "old", is_encoded=is_encoded)
    settings = ModelSettings(name="it", source=str(tmp_path / "old"), buckets=(BucketSettings(2),))
    model = catalog.load(settings)
    (scores,) = model.program.compile(mode, Bucket(2, HEIGHT, WIDTH)).executable(PIXELS)
    np.testing.assert_allclose(scores, wanted, atol=1e-6)


@pytest.mark.parametrize("mode", [Mode.XLA, Mode.GRAPH])
def test_functions_with_reference_variables_keep_several_inputs(tmp_path: Path, mode: Mode) -> None:
    ages = np.array([[1, 2], [3, -4]], np.float32)
    wanted = export_of_two(tmp_path / "old", ages)
    model = catalog.load(ModelSettings(name="it", source=str(tmp_path / "old"), buckets=(BucketSettings(2),)))
    assert [(one.name, one.is_image) for one in model.inputs] == [("photo", True), ("age", False)]
    (scores,) = model.program.compile(mode, Bucket(2, HEIGHT, WIDTH)).executable(PIXELS, ages)
    np.testing.assert_allclose(scores, wanted, atol=1e-6)
