"""Models whose graph decodes images: the decoding is cut off, and they are served as models of pixels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from numpy.typing import NDArray

from xlaserve.config import Bucket, BucketSettings, Fit, Mode, ModelSettings
from xlaserve.errors import ModelFailed
from xlaserve.models import catalog
from xlaserve.models.catalog import Model

HEIGHT, WIDTH = 8, 12
RANDOM = np.random.default_rng(0)
PIXELS = RANDOM.integers(0, 256, (2, HEIGHT, WIDTH, 3), np.uint8)
KERNEL = RANDOM.normal(0, 0.1, (3, 3, 3, 8)).astype(np.float32)
DENSE = RANDOM.normal(0, 0.3, (8, 5)).astype(np.float32)
IMAGES = tf.TensorSpec((HEIGHT, WIDTH, 3), tf.float32)


class Net(tf.Module):
    """Scores of images, encoded in several ways."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel, self.dense = tf.Variable(KERNEL), tf.Variable(DENSE)

    @tf.function(autograph=False)
    def of_pixels(self, images: tf.Tensor) -> dict[str, tf.Tensor]:
        features = tf.nn.relu(tf.nn.conv2d(images, self.kernel, 2, "SAME"))
        return {"scores": tf.nn.softmax(tf.reduce_mean(features, (1, 2)) @ self.dense)}

    def scaled(self, text: tf.Tensor) -> tf.Tensor:
        image = tf.io.decode_image(text, channels=3, expand_animations=False)
        image = tf.image.resize(tf.image.convert_image_dtype(image, tf.float32), (HEIGHT, WIDTH))
        return (image - [0.4, 0.5, 0.6]) * 2.0

    def mapped(self, texts: tf.Tensor) -> Any:
        return self.of_pixels(tf.map_fn(self.scaled, texts, fn_output_signature=IMAGES))

    def called(self, texts: tf.Tensor) -> Any:
        return self.of_pixels(tf.map_fn(tf.function(self.scaled), texts, fn_output_signature=IMAGES))

    def base64(self, texts: tf.Tensor) -> Any:
        return self.mapped(tf.io.decode_base64(texts))

    def from_one(self, texts: tf.Tensor) -> Any:
        return self.of_pixels(1.0 - tf.map_fn(lambda text: 1.0 - self.scaled(text), texts, fn_output_signature=IMAGES))

    def one(self, text: tf.Tensor) -> Any:
        return self.of_pixels(self.scaled(text)[tf.newaxis])

    def resized_together(self, texts: tf.Tensor) -> Any:
        levels = tf.TensorSpec((None, None, 3), tf.uint8)
        images = tf.map_fn(lambda text: tf.io.decode_jpeg(text, channels=3), texts, fn_output_signature=levels)
        return self.of_pixels(tf.image.resize(tf.cast(images, tf.float32) / 255.0, (HEIGHT, WIDTH)))

    def counted(self, texts: tf.Tensor) -> Any:
        return {**self.mapped(texts), "index": tf.range(tf.shape(texts)[0])}

    def cropped(self, texts: tf.Tensor) -> Any:
        return self.of_pixels(tf.map_fn(self.crop, texts, fn_output_signature=tf.float32))

    def crop(self, text: tf.Tensor) -> tf.Tensor:
        return tf.ensure_shape(tf.image.central_crop(self.scaled(text), 0.5), (HEIGHT // 2, WIDTH // 2, 3))

    def texts(self, texts: tf.Tensor) -> Any:
        return {"lengths": tf.strings.length(texts)}


def export(folder: Path, *functions: str, of_one: bool = False, **others: tf.TensorSpec) -> str:
    net = Net()
    spec = tf.TensorSpec([] if of_one else [None], tf.string, name="images")
    specs = dict.fromkeys(functions, spec) | others
    names = {name: name if index else "serving_default" for index, name in enumerate(specs)}
    signatures = {
        names[name]: tf.function(getattr(net, name)).get_concrete_function(one) for name, one in specs.items()
    }
    tf.saved_model.save(net, str(folder), signatures=signatures)
    return str(folder)


def settings(source: str, **fields: Any) -> ModelSettings:
    return ModelSettings(name="it", source=source, **({"buckets": (BucketSettings(2),)} | fields))


def scores(model: Model, mode: Mode = Mode.XLA, output: int = 0) -> NDArray[Any]:
    answers = model.program.compile(mode, Bucket(2, HEIGHT, WIDTH)).executable(PIXELS)
    return answers[output]


def wanted(source: str) -> NDArray[Any]:
    """TensorFlow's own answers to the same images as PNG files."""
    function = tf.saved_model.load(source).signatures["serving_default"]
    encoded = tf.stack([tf.io.encode_png(image) for image in PIXELS])
    if source.endswith("base64"):
        encoded = tf.io.encode_base64(encoded)
    rows = encoded if function.inputs[0].shape.rank else [*encoded]
    if isinstance(rows, list):
        return np.concatenate([function(row)["scores"].numpy() for row in rows])
    return np.asarray(function(rows)["scores"])


@pytest.mark.parametrize("name", ["mapped", "called", "base64", "from_one", "resized_together"])
@pytest.mark.parametrize("mode", [Mode.XLA, Mode.GRAPH])
def test_images_that_a_graph_decodes_in_a_loop_become_pixels(tmp_path: Path, name: str, mode: Mode) -> None:
    source = export(tmp_path / name, name)
    model = catalog.load(settings(source))
    assert model.size == (HEIGHT, WIDTH)
    assert model.image.channels == 3
    assert model.fit is Fit.RESIZE
    np.testing.assert_allclose(scores(model, mode), wanted(source), atol=1e-6)


def test_a_graph_that_decodes_one_image_takes_batches(tmp_path: Path) -> None:
    source = export(tmp_path / "one", "one", of_one=True)
    model = catalog.load(settings(source))
    assert model.batch is None
    np.testing.assert_allclose(scores(model), wanted(source), atol=1e-6)


def test_outputs_that_count_the_images_still_do(tmp_path: Path) -> None:
    model = catalog.load(settings(export(tmp_path / "counted", "counted"), task="tensors"))
    assert [output.name for output in model.task.outputs] == ["index", "scores"]
    np.testing.assert_array_equal(scores(model), [0, 1])


def test_images_keep_the_graph_s_fit_whatever_the_task(tmp_path: Path) -> None:
    source = export(tmp_path / "mapped", "mapped")
    assert catalog.load(settings(source)).preparation.fit is Fit.RESIZE
    assert catalog.load(settings(source, fit="pad")).fit is Fit.PAD


def test_text_that_is_not_decoded_is_refused_with_an_export(tmp_path: Path) -> None:
    with pytest.raises(ModelFailed, match=r"^source: expected pixels, got string \[None\] .*tf\.saved_model\.save"):
        catalog.load(settings(export(tmp_path / "texts", "texts")))


def test_images_of_which_parts_are_cut_out_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFailed, match="serving_default takes text; write function: of_pixels"):
        catalog.load(settings(export(tmp_path / "cropped", "cropped")))


def test_a_refusal_names_a_signature_that_takes_pixels(tmp_path: Path) -> None:
    source = export(tmp_path / "two", "cropped", of_pixels=tf.TensorSpec((None, HEIGHT, WIDTH, 3), tf.float32))
    with pytest.raises(ModelFailed, match="write signature: of_pixels or function: of_pixels"):
        catalog.load(settings(source))
    assert catalog.load(settings(source, signature="of_pixels")).size == (HEIGHT, WIDTH)


def frozen(file: Path, *, is_constant: bool = False) -> tuple[str, NDArray[Any]]:
    """Writes a graph of TensorFlow 1 that decodes; returns its path and its answers."""
    with tf.Graph().as_default() as graph:
        if is_constant:
            text = tf.constant(tf.io.encode_png(PIXELS[0]).numpy() if tf.executing_eagerly() else b"", name="contents")
            image = tf.cast(tf.io.decode_jpeg(text, channels=3), tf.float32)
            images = tf.compat.v1.image.resize_bilinear(image[tf.newaxis], (HEIGHT, WIDTH))
        else:
            text = tf.compat.v1.placeholder(tf.string, [None], name="images")
            images = tf.compat.v1.map_fn(decoded_in_tensorflow_1, tf.io.decode_base64(text), tf.float32)
            images.set_shape((None, HEIGHT, WIDTH, 3))
        features = tf.nn.relu(tf.nn.conv2d(images / 255.0, tf.constant(KERNEL), 2, "SAME"))
        answers = tf.nn.softmax(tf.reduce_mean(features, (1, 2)) @ tf.constant(DENSE), name="scores")
        file.write_bytes(graph.as_graph_def().SerializeToString())
        with tf.compat.v1.Session() as session:
            pngs = session.run([tf.io.encode_png(image) for image in PIXELS])
            if is_constant:
                return str(file), np.concatenate([session.run(answers, {text: one}) for one in pngs])
            return str(file), session.run(answers, {text: session.run(tf.io.encode_base64(tf.constant(pngs)))})


def decoded_in_tensorflow_1(text: tf.Tensor) -> tf.Tensor:
    image = tf.io.decode_jpeg(text, channels=3)
    return tf.squeeze(tf.compat.v1.image.resize_bilinear(image[tf.newaxis], (HEIGHT, WIDTH)), [0])


@pytest.mark.parametrize("is_constant", [False, True], ids=["of a batch", "of one image, a constant"])
def test_a_frozen_graph_that_decodes_becomes_one_of_pixels(tmp_path: Path, is_constant: bool) -> None:
    control_flow = tf.compat.v1.control_flow_v2_enabled()
    tf.compat.v1.disable_control_flow_v2()
    try:
        source, answers = frozen(tmp_path / "frozen.pb", is_constant=is_constant)
    finally:
        if control_flow:
            tf.compat.v1.enable_control_flow_v2()
    model = catalog.load(settings(source))
    assert model.size == (HEIGHT, WIDTH)
    np.testing.assert_allclose(scores(model), answers, atol=1e-6)
