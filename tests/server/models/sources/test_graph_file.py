from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from xlaserve.config import Bucket, BucketSettings, Color, Layout, Mode, ModelSettings
from xlaserve.errors import ModelFailed
from xlaserve.inspection.model_file import formats
from xlaserve.models import catalog

v1 = tf.compat.v1
PIXELS = np.random.default_rng(0).integers(0, 256, (3, 6, 5, 3), np.uint8)
SUMS = PIXELS.sum(axis=(1, 2)) * 0.5

Build = Callable[[Any], Any]


def settings(source: Path, **fields: Any) -> ModelSettings:
    return ModelSettings(name="it", source=str(source), **({"buckets": (BucketSettings(3),)} | fields))


def write(file: Path, build: Build, batch: int | None = None) -> Path:
    """Writes a graph of an image input, which `build` continues."""
    with v1.Graph().as_default() as graph:
        build(v1.placeholder(tf.float32, (batch, 6, 5, 3), name="photo"))
    file.write_bytes(graph.as_graph_def().SerializeToString())
    return file


def sums(photo: Any) -> Any:
    unused = v1.placeholder(tf.float32, (), name="rate")
    tf.multiply(unused, 2.0, name="unused")
    return tf.multiply(tf.reduce_sum(photo, axis=(1, 2)), 0.5, name="head/sums")


def run(model: ModelSettings, mode: Mode = Mode.GRAPH) -> Any:
    (scores,) = catalog.load(model).program.compile(mode, Bucket(3, 6, 5)).executable(PIXELS)
    return scores


def reason(model: ModelSettings) -> str:
    with pytest.raises(ModelFailed) as failure:
        catalog.load(model)
    return str(failure.value)


@pytest.mark.parametrize("mode", [Mode.XLA, Mode.GRAPH, Mode.EAGER, Mode.OPENVINO])
def test_a_frozen_graph_runs_from_its_placeholder_to_what_nothing_reads(tmp_path: Path, mode: Mode) -> None:
    np.testing.assert_allclose(run(settings(write(tmp_path / "sums.pb", sums)), mode), SUMS, rtol=1e-4)


@pytest.mark.parametrize(("has_variables", "says"), [(True, "weights, of which there are 2;"), (False, "binary form")])
def test_a_graph_as_text_is_refused_with_its_next_step(tmp_path: Path, has_variables: bool, says: str) -> None:
    with v1.Graph().as_default() as graph:
        photo = v1.placeholder(tf.float32, (None, 6, 5, 3), name="photo")
        if has_variables:
            v1.get_variable("kernel", (3,), use_resource=True)
            v1.get_variable("bias", (3,), use_resource=False)
        sums(photo)
    (tmp_path / "net.pb").write_text(str(graph.as_graph_def()))
    said = reason(settings(tmp_path / "net.pb"))
    assert says in said
    with pytest.raises(ModelFailed) as failure:
        formats.describe(tmp_path / "net.pb")
    assert str(failure.value) == said


def test_the_line_for_a_graph_as_text_makes_one_that_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with v1.Graph().as_default() as graph:
        sums(v1.placeholder(tf.float32, (None, 6, 5, 3), name="photo"))
    source = tmp_path / "net.pb"
    source.write_text(str(graph.as_graph_def()))
    monkeypatch.chdir(tmp_path)
    exec(reason(settings(source)).partition("binary form: ")[2], {"tf": tf})
    np.testing.assert_allclose(run(settings(source)), SUMS, rtol=1e-4)


def test_a_batch_that_the_placeholder_fixes_is_freed(tmp_path: Path) -> None:
    source = write(tmp_path / "one.pb", lambda photo: tf.reduce_sum(tf.reshape(photo, (1, 30, 3)), axis=1) * 0.5, 1)
    np.testing.assert_allclose(run(settings(source), Mode.XLA), SUMS, rtol=1e-4)


def test_switches_of_training_are_set_for_inference(tmp_path: Path) -> None:
    def build(photo: Any) -> None:
        training = v1.placeholder(tf.bool, (), name="model/phase_train")
        kept = v1.placeholder(tf.float32, (), name="keep_prob")
        tf.identity(sums(photo) * kept * (1.0 - tf.cast(training, tf.float32)), name="scores")

    np.testing.assert_allclose(run(settings(write(tmp_path / "old.pb", build)), Mode.XLA), SUMS, rtol=1e-4)


def test_a_graph_that_reads_its_own_data_is_served_from_the_images_of_that(tmp_path: Path) -> None:
    with v1.Graph().as_default() as graph:
        data = tf.data.Dataset.from_tensors((tf.zeros((2, 90)), tf.zeros(2, tf.int32)))
        values, _ = v1.data.make_one_shot_iterator(data).get_next()
        sums(tf.reshape(values, (-1, 6, 5, 3), name="images"))
    source = tmp_path / "estimator.pb"
    source.write_bytes(graph.as_graph_def().SerializeToString())
    assert reason(settings(source)).endswith("write input_tensor: images:0")
    assert formats.describe(source).settings == (("input_tensor", "images:0"),)
    np.testing.assert_allclose(run(settings(source, input_tensor="images:0"), Mode.XLA), SUMS, rtol=1e-4)


def test_tensors_are_taken_by_their_names(tmp_path: Path) -> None:
    def build(photo: Any) -> None:
        mask = v1.placeholder(tf.float32, (None, 6, 5, 3), name="mask")
        tf.identity(sums(photo), name="scores")
        tf.reduce_max(mask, axis=(1, 2), name="most")

    source = write(tmp_path / "two.pb", build)
    assert "one of photo:0: float32 (None, 6, 5, 3); mask:0: float32 (None, 6, 5, 3)" in reason(settings(source))
    chosen = settings(source, input_tensor="mask", output_names={"scores": "most:0"})
    np.testing.assert_allclose(run(chosen), PIXELS.max(axis=(1, 2)))
    both = settings(source, input_tensor="photo", output_names={"scores": "most:0"})
    assert "but it also takes mask:0: float32 (None, 6, 5, 3)" in reason(both)
    assert "input_tensor: expected the name of a tensor of the graph" in reason(settings(source, input_tensor="other"))


@pytest.mark.parametrize("mode", [Mode.XLA, Mode.GRAPH, Mode.EAGER, Mode.OPENVINO])
def test_a_graph_of_several_inputs_takes_those_that_are_listed(tmp_path: Path, mode: Mode) -> None:
    def build(photo: Any) -> None:
        other = v1.placeholder(tf.float32, (None, 6, 5, 3), name="model/other")
        factor = v1.placeholder(tf.float32, (None, 3), name="factor")
        tf.identity(sums(photo - 2.0 * other) * factor, name="scores")

    source = write(tmp_path / "three.pb", build)
    left = settings(source, input_tensor=["photo", "factor"])
    assert reason(left).partition(";")[2].startswith(" write input_tensor: [photo:0, factor:0, model/other:0]")
    model = catalog.load(settings(source, input_tensor=["factor", "photo", "model/other"], task="tensors"))
    assert model.names == ("photo", "factor", "other")
    factors = np.arange(9, dtype=np.float32).reshape(3, 3)
    (scores,) = model.program.compile(mode, Bucket(3, 6, 5)).executable(PIXELS, factors, PIXELS[::-1])
    np.testing.assert_allclose(scores, (SUMS - 2 * SUMS[::-1]) * factors, rtol=1e-4, atol=1e-2)


MATRIX = np.random.default_rng(1).uniform(-1, 1, (90, 2)).astype(np.float32)
SHAPELESS: dict[str, tuple[Build, Any, dict[str, Any]]] = {
    "images": (sums, SUMS, {}),
    "channels-first": (
        lambda photo: tf.reduce_sum(tf.ensure_shape(photo, (None, 3, 6, 5)), axis=(2, 3)) * 0.5,
        SUMS,
        {"layout": Layout.CHANNELS_FIRST},
    ),
    "flattened": (lambda photo: tf.matmul(photo, MATRIX), PIXELS.reshape(3, 90) @ MATRIX, {}),
    "grey": (lambda photo: sums(tf.reshape(photo, (-1, 6, 5, 1))), SUMS[:, :1], {}),
    "grey-flattened": (lambda photo: tf.matmul(photo, MATRIX[:30]), PIXELS[..., 0].reshape(3, 30) @ MATRIX[:30], {}),
    "rgba": (sums, np.pad(SUMS, ((0, 0), (0, 1))), {"color": Color.RGBA}),
}


@pytest.mark.parametrize("case", SHAPELESS)
def test_an_input_without_a_shape_gets_that_of_the_settings(tmp_path: Path, case: str) -> None:
    build, expected, fields = SHAPELESS[case]
    source = write(tmp_path / "old.pb", lambda _: build(v1.placeholder(tf.float32, name="shapeless")))
    model = catalog.load(settings(source, input_tensor="shapeless", task="embedding", input_size=(6, 5), **fields))
    pixels = np.pad(PIXELS, ((0, 0), (0, 0), (0, 0), (0, 1)))[..., : model.image.channels]
    (scores,) = model.program.compile(Mode.XLA, Bucket(3, 6, 5)).executable(pixels)
    np.testing.assert_allclose(scores, expected, rtol=1e-4, atol=1e-2)


def test_an_input_without_a_shape_needs_a_size_that_the_graph_takes(tmp_path: Path) -> None:
    source = write(tmp_path / "old.pb", lambda _: tf.matmul(v1.placeholder(tf.float32, name="shapeless"), MATRIX))
    of_input: dict[str, Any] = {"input_tensor": "shapeless"}
    said = reason(settings(source, **of_input))
    assert said.startswith("input_size: expected height and width ")
    assert "write input_size: [224, 224]" in said
    assert "got 9x9 in rgb or grey: Dimensions must be equal" in reason(settings(source, input_size=(9, 9), **of_input))
    source = write(tmp_path / "rows.pb", lambda _: tf.reshape(v1.placeholder(tf.float32, name="shapeless"), (-1, 7)))
    said = reason(settings(source, input_size=(7, 3), color=Color.GREY, **of_input))
    assert "got 7x3 in grey: its output Reshape:0 has 3 rows for one image" in said


def test_several_inputs_are_placeholders(tmp_path: Path) -> None:
    source = write(tmp_path / "computed.pb", lambda photo: tf.identity(sums(photo), name="scores"))
    said = reason(settings(source, input_tensor=["photo", "head/sums"]))
    assert said.startswith("input_tensor: expected several placeholders, got head/sums:0")


@pytest.mark.parametrize("is_resource", [False, True])
def test_a_graph_with_variables_is_refused_with_how_to_freeze_it(tmp_path: Path, is_resource: bool) -> None:
    def build(photo: Any) -> None:
        weights = v1.get_variable("weights", (3,), use_resource=is_resource)
        tf.multiply(tf.reduce_sum(photo, axis=(1, 2)), weights, name="scores")

    said = reason(settings(write(tmp_path / "trained.pb", build)))
    assert "expected a frozen graph" in said
    assert "weights is a variable" in said


def test_what_is_no_frozen_graph_is_refused_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "other.pb").write_bytes(b"no graph")
    assert "expected a frozen graph, got other.pb of 8 bytes" in reason(settings(tmp_path / "other.pb"))
    tf.saved_model.save(tf.Module(), str(tmp_path / "saved"))
    said = reason(settings(tmp_path / "saved" / "saved_model.pb"))
    assert said.endswith("source: saved/")
