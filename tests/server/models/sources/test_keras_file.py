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


def test_custom_objects_are_those_that_the_settings_name(keras_file: SaveKeras, custom: Any) -> None:
    pixels = keras.Input((SIDE, SIDE, 3))
    layers = custom.Brighten()(pixels)
    source = keras_file(keras.Model(pixels, keras.layers.GlobalAveragePooling2D()(layers)))
    named = {"Brighten": "their_layers:Brighten"}
    (scores,) = run(catalog.load(settings(source, custom_objects=named)))
    np.testing.assert_allclose(scores, PIXELS.mean(axis=(1, 2)) + 1, rtol=1e-5)
    assert reason(settings(source)) == (
        "custom_objects: expected package.module:Brighten for Brighten, which Keras doesn't know, got nothing"
    )
    for path, expected in (
        ("their_layers", "expected package.module:attribute, got their_layers"),
        ("their_layers:Darken", "their_layers:Darken can't be imported: "),
        ("none.such:Brighten", "none.such:Brighten can't be imported: No module named 'none'"),
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


def test_a_file_that_holds_code_runs_only_where_safe_mode_is_off(keras_file: SaveKeras) -> None:
    pixels = keras.Input((SIDE, SIDE, 3))
    model = keras.Model(pixels, keras.layers.Lambda(lambda x: x[:, 0, 0] * 2)(pixels))
    source = keras_file(model)
    said = reason(settings(source))
    assert said == (
        "safe_mode: flowers.keras holds what can run any code, as a Lambda layer does; expected false, which runs it,"
        " for a file that you trust, got true"
    )
    (scores,) = run(catalog.load(settings(source, safe_mode=False)))
    np.testing.assert_allclose(scores, PIXELS[:, 0, 0] * 2.0)


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


@pytest.mark.parametrize("left", [0, 100, 0.5, 0.999])
def test_a_file_that_was_cut_off_is_said_to_be_so(keras_file: SaveKeras, tiny_model: Any, left: float) -> None:
    file = Path(keras_file(tiny_model()))
    whole = file.read_bytes()
    file.write_bytes(whole[: int(left * len(whole)) if isinstance(left, float) else left])
    said = reason(ModelSettings(name="it", source=str(file)))
    assert said.startswith("source: expected a .keras file, which is a zip archive, got flowers.keras of ")
    assert said.endswith("bytes, which is none or has been cut off")


def test_score_maps_make_a_class_map_of_the_images_size(keras_file: SaveKeras) -> None:
    pixels = keras.Input((SIDE, SIDE, 3))
    model = keras.Model(pixels, keras.layers.AveragePooling2D(2)(pixels))
    loaded = catalog.load(settings(keras_file(model)))
    assert loaded.task == Segmentation(3)
    (class_map,) = run(loaded, Mode.XLA)
    assert class_map.shape == PIXELS.shape[:3]
    assert class_map.dtype == np.uint8
    whole = keras.Model(pixels, keras.layers.Activation("linear")(pixels))
    (class_map,) = run(catalog.load(settings(keras_file(whole))))
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
