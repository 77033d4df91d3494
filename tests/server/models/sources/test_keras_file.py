from __future__ import annotations

import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from xlaserve.config import Bucket, BucketSettings, Mode, ModelSettings
from xlaserve.engine.program import Outputs
from xlaserve.errors import ModelFailed
from xlaserve.models import catalog
from xlaserve.models.networks.keras_runtime import keras
from xlaserve.models.task import Classification, Detection, Embedding, Segmentation

SIDE = 8
PIXELS = np.random.default_rng(0).integers(0, 256, (2, SIDE, SIDE, 3), np.uint8)
CUSTOM = """
from xlaserve.models.networks.keras_runtime import keras

class Brighten(keras.layers.Layer):
    def call(self, inputs):
        return inputs + 1

@keras.saving.register_keras_serializable()
class Dim(keras.layers.Layer):
    def call(self, inputs):
        return inputs - 1

@keras.saving.register_keras_serializable(package="theirs")
class Double(keras.layers.Layer):
    def call(self, inputs):
        return inputs * 2

class Means(keras.Model):
    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.brighten = Brighten()

    def call(self, inputs):
        return {"means": keras.ops.mean(self.brighten(inputs), axis=(1, 2))}
"""

ARCHITECTURE = """
from xlaserve.models.networks.keras_runtime import keras

SIDE = dict

def build(filters=4):
    pixels = keras.Input((8, 8, 3))
    x = keras.layers.Conv2D(filters, 3)(pixels)
    return keras.Model(pixels, keras.layers.Dense(2)(keras.layers.GlobalAveragePooling2D()(x)))

def other():
    return build(5)
"""

SaveKeras = Callable[..., str]


@pytest.fixture
def custom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module of classes that Keras doesn't know."""
    (tmp_path / "their_layers.py").write_text(CUSTOM)
    monkeypatch.syspath_prepend(tmp_path)
    import their_layers  # type: ignore[import-not-found]

    yield their_layers
    del sys.modules["their_layers"]


def settings(source: str, **fields: Any) -> ModelSettings:
    return ModelSettings(name="it", source=source, **({"buckets": (BucketSettings(2),)} | fields))


def run(model: catalog.Model, mode: Mode = Mode.GRAPH) -> Outputs:
    return model.program.compile(mode, Bucket(2, SIDE, SIDE)).executable(PIXELS)


def reason(model: ModelSettings) -> str:
    with pytest.raises(ModelFailed) as failure:
        catalog.load(model)
    assert "\n" not in str(failure.value)
    return str(failure.value)


SUBCLASS = f"""
import keras

class Own(keras.Model):
    def __init__(self):
        super().__init__()
        self.mean = keras.layers.GlobalAveragePooling2D()
        self.last = keras.layers.Dense(4)

    def call(self, pixels):
        return self.last(self.mean(pixels))

def build():
    model = Own()
    model(keras.ops.zeros((1, {SIDE}, {SIDE}, 3)))
    return model
"""


def test_custom_objects_are_those_that_the_settings_name(keras_file: SaveKeras, custom: Any) -> None:
    pixels = keras.Input((SIDE, SIDE, 3))
    layers = custom.Brighten()(pixels)
    source = keras_file(keras.Model(pixels, keras.layers.GlobalAveragePooling2D()(layers)))
    named = {"Brighten": "their_layers:Brighten"}
    (scores,) = run(catalog.load(settings(source, custom_objects=named)))
    np.testing.assert_allclose(scores, PIXELS.mean(axis=(1, 2)) + 1, rtol=1e-5)
    assert reason(settings(source)) == (
        "custom_objects: expected package.module:Brighten for Brighten, which Keras doesn't know, got nothing; write"
        " custom_objects: {Brighten: my_package.my_module:Brighten}"
    )
    for path, expected in (
        ("their_layers", "expected package.module:attribute, got their_layers"),
        ("their_layers:Darken", "their_layers:Darken can't be imported: "),
        ("none.such:Brighten", "none.such:Brighten can't be imported: No module named 'none'; start the server with"),
    ):
        failure = reason(settings(source, custom_objects={"Brighten": path}))
        assert failure.startswith(f"custom_objects.Brighten: {expected}")


def test_custom_objects_that_were_registered_go_by_their_plain_names(
    keras_file: SaveKeras, custom: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pixels = keras.Input((SIDE, SIDE, 3))
    layers = custom.Double()(custom.Dim()(pixels))
    source = keras_file(keras.Model(pixels, keras.layers.GlobalAveragePooling2D()(layers)))
    for registered in ("Custom>Dim", "theirs>Double"):  # as in a process that has not imported them
        monkeypatch.delitem(keras.saving.get_custom_objects(), registered, raising=False)
    monkeypatch.setattr("keras.src.saving.object_registration.GLOBAL_CUSTOM_OBJECTS", {})
    names = {name: f"their_layers:{name}" for name in ("Dim", "Double")}
    (scores,) = run(catalog.load(settings(source, custom_objects=names)))
    np.testing.assert_allclose(scores, (PIXELS.mean(axis=(1, 2)) - 1) * 2, rtol=1e-5)


def test_the_reason_is_keras_innermost_error(keras_file: SaveKeras, tiny_model: Any) -> None:
    source = keras_file(tiny_model())
    with zipfile.ZipFile(source) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
    config = contents["config.json"].replace(b'"activation":', b'"value_range": 1, "activation":', 1)
    assert config != contents["config.json"]
    with zipfile.ZipFile(source, "w") as archive:
        for name, content in {**contents, "config.json": config}.items():
            archive.writestr(name, content)
    said = reason(ModelSettings(name="it", source=source))
    assert said.startswith("source: flowers.keras can't be loaded: ")
    assert "value_range" in said
    assert len(said) < 300


def test_a_model_with_a_call_of_its_own_runs(keras_file: SaveKeras, custom: Any) -> None:
    model = custom.Means()
    model(np.zeros((1, SIDE, SIDE, 3), np.float32))
    source = keras_file(model)
    loaded = catalog.load(settings(source, custom_objects={"Means": "their_layers:Means"}, task="embedding"))
    assert loaded.task == Embedding(3)
    np.testing.assert_allclose(run(loaded)[0], PIXELS.mean(axis=(1, 2)) + 1, rtol=1e-5)


def test_a_model_whose_constructor_takes_nothing_is_made_by_a_function(
    keras_file: SaveKeras, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "their_subclass.py").write_text(SUBCLASS)
    monkeypatch.syspath_prepend(tmp_path)
    import their_subclass  # type: ignore[import-not-found]

    model = their_subclass.build()
    source = keras_file(model)
    said = reason(settings(source, custom_objects={"Own": "their_subclass:Own"}))
    assert said.startswith("source: Keras can't make Own ") and said.endswith(
        "architecture: my_package.my_module:build"
    )
    (scores,) = run(catalog.load(settings(source, architecture="their_subclass:build", input_size=(SIDE, SIDE))))
    np.testing.assert_allclose(scores, model(PIXELS.astype(np.float32)).numpy(), rtol=1e-4)


@pytest.mark.parametrize(("name", "function"), [("corner", "corner"), ("lambda", "lambda_"), ("a-b", "a_b")])
def test_a_file_that_holds_code_runs_only_where_safe_mode_is_off(
    keras_file: SaveKeras, name: str, function: str
) -> None:
    pixels = keras.Input((SIDE, SIDE, 3))
    model = keras.Model(pixels, keras.layers.Lambda(lambda x: x[:, 0, 0] * 2, name=name)(pixels))
    source = keras_file(model)
    said = reason(settings(source))
    assert said.startswith(
        f"safe_mode: flowers.keras holds Python code in the Lambda layer {name} (whose code uses 0, 2); "
    )
    assert f"custom_objects: {{{name}: my_package.my_module:{function}}}" in said
    assert "safe_mode: false" in said
    (scores,) = run(catalog.load(settings(source, safe_mode=False)))
    np.testing.assert_allclose(scores, PIXELS[:, 0, 0] * 2.0)


def test_a_function_of_the_settings_replaces_the_code_of_a_lambda_layer(
    keras_file: SaveKeras, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pixels = keras.Input((SIDE, SIDE, 3))
    source = keras_file(keras.Model(pixels, keras.layers.Lambda(lambda x: x[:, 0, 0] * 2, name="corner")(pixels)))
    (tmp_path / "their_corner.py").write_text("def corner(x):\n    return x[:, 0, 0] * 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    (scores,) = run(catalog.load(settings(source, custom_objects={"corner": "their_corner:corner"})))
    np.testing.assert_allclose(scores, PIXELS[:, 0, 0] * 3.0)


@pytest.mark.parametrize("name", ["flowers.h5", "flowers.hdf5", "flowers.H5"])
def test_a_whole_model_in_hdf5_runs_as_one_in_a_zip_archive(
    keras_file: SaveKeras, tiny_model: Any, tmp_path: Path, name: str
) -> None:
    model = tiny_model()
    source = Path(keras_file(model, "flowers.h5")).rename(tmp_path / name)
    one, other = (catalog.load(settings(path)) for path in (str(source), keras_file(model)))
    assert one.weights == name
    images = np.zeros((2, *one.buckets[0][1:], 3), np.uint8)
    answers = [each.program.compile(Mode.GRAPH, each.buckets[0]).executable(images)[0] for each in (one, other)]
    np.testing.assert_allclose(answers[0], answers[1], rtol=1e-5)


def test_a_file_is_read_as_what_it_holds_and_not_as_its_name_says(
    keras_file: SaveKeras, tiny_model: Any, tmp_path: Path
) -> None:
    source = Path(keras_file(tiny_model()))
    renamed = source.rename(tmp_path / "renamed.h5")
    assert catalog.load(settings(str(renamed))).weights == "renamed.h5"


@pytest.mark.parametrize("name", ["flowers.weights.h5", "flowers.h5"])
def test_weights_alone_are_loaded_into_the_model_that_a_function_returns(
    keras_file: SaveKeras, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / "their_model.py").write_text(ARCHITECTURE)
    monkeypatch.syspath_prepend(tmp_path)
    import their_model  # type: ignore[import-not-found]

    model = their_model.build()
    source = Path(keras_file(model, "flowers.weights.h5")).rename(tmp_path / name)
    (scores,) = run(catalog.load(settings(str(source), architecture="their_model:build")))
    np.testing.assert_allclose(scores, model(PIXELS.astype(np.float32)).numpy(), rtol=1e-4)
    assert "architecture: my_package.my_module:build" in reason(settings(str(source)))
    for function, expected in (
        ("other", "architecture: expected the model whose weights are in"),
        ("SIDE", "architecture: "),
        ("missing", "architecture: their_model:missing can't be imported: "),
    ):
        assert expected in reason(settings(str(source), architecture=f"their_model:{function}"))
    (tmp_path / "their_model.json").write_text(model.to_json())
    (scores,) = run(catalog.load(settings(str(source), architecture=str(tmp_path / "their_model.json"))))
    np.testing.assert_allclose(scores, model(PIXELS.astype(np.float32)).numpy(), rtol=1e-4)


def test_a_model_made_for_one_batch_size_takes_all_if_its_layers_do(keras_file: SaveKeras) -> None:
    pixels = keras.Input(batch_shape=(4, SIDE, SIDE, 3))
    rows = keras.layers.GlobalAveragePooling2D()(pixels)
    model = catalog.load(settings(keras_file(keras.Model(pixels, rows))))
    assert model.batch is None
    np.testing.assert_allclose(run(model)[0], PIXELS.mean(axis=(1, 2)), rtol=1e-5)
    numbers = keras.Input(batch_shape=(4, 3))
    assert catalog.load(settings(keras_file(keras.Model([pixels, numbers], rows * numbers)))).batch is None
    fixed = keras.ops.reshape(keras.ops.mean(pixels, axis=(1, 2)), (4, 3))
    source = keras_file(keras.Model(pixels, fixed))
    assert catalog.load(ModelSettings(name="it", source=source)).buckets == (Bucket(4, SIDE, SIDE),)
    assert "write buckets: [4], got 2" in reason(settings(source))


def test_outputs_have_the_names_that_a_last_layer_gives_them(keras_file: SaveKeras, tmp_path: Path) -> None:
    module = tf.Module()
    spec = tf.TensorSpec((None, SIDE, SIDE, 3), tf.float32, name="pixels")
    module.call = tf.function(lambda pixels: {"means": tf.reduce_mean(pixels, [1, 2])}, input_signature=[spec])
    tf.saved_model.save(module, str(tmp_path / "exported"), signatures=module.call)
    last = keras.layers.TFSMLayer(str(tmp_path / "exported"), call_endpoint="serving_default")
    source = keras_file(keras.Sequential([keras.Input((SIDE, SIDE, 3)), keras.layers.Rescaling(2.0), last]))
    loaded = catalog.load(settings(source, safe_mode=False))
    assert loaded.task == Classification(3)
    np.testing.assert_allclose(run(loaded)[0], PIXELS.mean(axis=(1, 2)) * 2, rtol=1e-5)


@pytest.mark.parametrize("suffix", ["keras", "h5"])
@pytest.mark.parametrize("left", [100, 0.5, 0.999])
def test_a_file_that_was_cut_off_is_said_to_be_so(
    keras_file: SaveKeras, tiny_model: Any, suffix: str, left: float
) -> None:
    file = Path(keras_file(tiny_model(), f"flowers.{suffix}"))
    whole = file.read_bytes()
    file.write_bytes(whole[: int(left * len(whole)) if isinstance(left, float) else left])
    said = reason(ModelSettings(name="it", source=str(file)))
    assert said == (
        f"source: flowers.{suffix} has been cut off at {file.stat().st_size:,} bytes; copy it once more, and compare"
        f" both: sha256sum flowers.{suffix}"
    )


@pytest.mark.parametrize(
    ("contents", "expected"),
    [
        (b"", "source: flowers.h5 is empty; copy it once more, and compare both: sha256sum flowers.h5"),
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1234567\n",
            "source: flowers.h5 is a pointer of Git LFS and not the file itself, of 1,234,567 bytes; fetch that:"
            " git lfs pull --include '*flowers.h5'",
        ),
        (b"\n<!DOCTYPE html><html>", "source: flowers.h5 is a web page and not a model; download the file itself"),
        (b"\x1f\x8b", "source: flowers.h5 is compressed with gzip; unpack it: tar -xzf flowers.h5"),
        (b"weights", "source: expected a .keras file, which is a zip archive, or a .h5 file, which is HDF5, got"),
    ],
)
def test_a_file_that_stands_for_a_model_is_called_what_it_is(tmp_path: Path, contents: bytes, expected: str) -> None:
    (tmp_path / "flowers.h5").write_bytes(contents)
    assert reason(settings(str(tmp_path / "flowers.h5"))).startswith(expected)


def test_a_zip_archive_of_a_model_is_to_be_unpacked(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "flowers.keras", "w") as archive:
        archive.writestr("keras_model.h5", b"")
    assert reason(settings(str(tmp_path / "flowers.keras"))).endswith("name the model in it: unzip flowers.keras")


def test_score_maps_make_a_class_map_of_the_images_size(keras_file: SaveKeras) -> None:
    pixels = keras.Input((SIDE, SIDE, 3))
    model = keras.Model(pixels, keras.layers.AveragePooling2D(2)(pixels))
    loaded = catalog.load(settings(keras_file(model), task="segmentation"))
    assert loaded.task == Segmentation(3)
    (class_map,) = run(loaded, Mode.XLA)
    assert class_map.shape == PIXELS.shape[:3]
    assert class_map.dtype == np.uint8
    whole = keras.Model(pixels, keras.layers.Activation("linear")(pixels))
    (class_map,) = run(catalog.load(settings(keras_file(whole), task="segmentation")))
    np.testing.assert_array_equal(class_map, PIXELS.argmax(axis=-1))


def test_boxes_and_scores_make_detections(keras_file: SaveKeras) -> None:
    pixels = keras.Input((SIDE, SIDE, 3))
    rows = keras.layers.Reshape((SIDE * SIDE, 3))(pixels)
    fixed = keras.layers.Dense(4, kernel_initializer="zeros", bias_initializer=keras.initializers.Constant(1.0))
    model = keras.Model(pixels, {"where": keras.ops.cumsum(fixed(rows), axis=-1), "what": rows / 255.0})
    named = {"boxes": "where", "scores": "what"}
    source = settings(keras_file(model), output_names=named, bounding_box_format="xywh", max_detections=3)
    loaded = catalog.load(source)
    assert loaded.task == Detection(3, max_detections=3)
    for found in loaded.task.objects(run(loaded, Mode.XLA)):
        assert found.boxes[0].tolist() == [1, 2, 4, 6]
        assert len(set(found.classes.tolist())) == len(found.classes)
    without = catalog.load(source.model_copy(update={"labels": ("background", "cup", "box")}))
    assert isinstance(without.task, Detection)
    for found in without.task.objects(run(without, Mode.XLA)):
        assert set(found.classes.tolist()) == {1, 2}


def test_a_detector_of_kerascv_is_one_from_a_file_too(keras_file: SaveKeras) -> None:
    import keras_cv

    from xlaserve.models.sources.keras_cv_table import BACKBONES

    body = keras_cv.models.YOLOV8Backbone(
        include_rescaling=True, input_shape=(64, 64, 3), **BACKBONES["YOLOV8XS"].arguments
    )
    model = keras_cv.models.YOLOV8Detector(backbone=body, num_classes=2, bounding_box_format="rel_xywh", fpn_depth=1)
    loaded = catalog.load(settings(keras_file(model)))
    assert loaded.task == Detection(2, max_detections=100)
    assert loaded.buckets == (Bucket(2, 64, 64),)


def test_labels_name_the_classes_of_any_task(tmp_path: Path, keras_file: SaveKeras) -> None:
    names = tmp_path / "names.txt"
    names.write_text("red\ngreen\nblue\n")
    pixels = keras.Input((SIDE, SIDE, 3))
    source = keras_file(keras.Model(pixels, keras.layers.GlobalAveragePooling2D()(pixels)))
    assert catalog.load(settings(source, labels=names)).task == Classification(3, ("red", "green", "blue"))
    assert reason(settings(source, labels=names, task="embedding")).startswith("labels: embedding has no classes")
