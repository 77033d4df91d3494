from __future__ import annotations

import io
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import keras_hub
import numpy as np
import pytest
import tensorflow as tf
from numpy.typing import NDArray
from PIL import Image
from tests.server.images.encoded import LIMITS
from tests.server.models.sources.keras_hub_classes import STATED, TINY

from xlaserve.config import Bucket, BucketSettings, Fit, Mode, ModelSettings
from xlaserve.engine.program import Outputs
from xlaserve.errors import ModelFailed
from xlaserve.images.decoder import decode
from xlaserve.models import catalog, sources
from xlaserve.models.networks import preprocess
from xlaserve.models.networks.keras_runtime import keras
from xlaserve.models.sources import keras_hub_models, keras_hub_table, source_names
from xlaserve.models.task import Classification, Detection, Embedding, Segmentation

pytestmark = [
    pytest.mark.usefixtures("no_network"),
    pytest.mark.filterwarnings("ignore:Layer 'attn' .of type WindowAttention"),
]
SIDE: Final = 64
BATCH: Final = 2
PIXELS = np.random.default_rng(0).integers(0, 256, (BATCH, SIDE, SIDE, 3), np.uint8)
MEAN, DEVIATION = np.array([0.4, 0.5, 0.6]), np.array([0.2, 0.25, 0.3])
FULL: Final = dict(keras_hub_table.CLASSES)
"""The table as it is; tests have TINY in its place."""
FAST: Final = {"ResNetImageClassifier", "EfficientNetImageClassifier", "ViTImageClassifier", "VGGImageClassifier"}
FAST_TOO: Final = {"DFineObjectDetector", "DeepLabV3ImageSegmenter"}
"""RetinaNet and SegFormer are in the tests of presets."""
CLASSIFIERS, DETECTORS, SEGMENTERS = (
    [
        pytest.param(name, marks=[] if name in FAST | FAST_TOO else pytest.mark.slow)
        for name, row in keras_hub_table.CLASSES.items()
        if row.task == task
    ]
    for task in ("classification", "detection", "segmentation")
)


@pytest.fixture(scope="module", autouse=True)
def built() -> Iterator[list[Any]]:
    """Makes every class small; returns the Keras models that are built from then on."""
    models: list[Any] = []
    build = keras_hub_models._built

    def remember(*arguments: Any) -> Any:
        models.append(build(*arguments))
        return models[-1]

    with pytest.MonkeyPatch.context() as patch:
        for name, arguments in TINY.items():
            patch.setitem(keras_hub_table.CLASSES, name, replace(keras_hub_table.CLASSES[name], arguments=arguments))
        patch.setattr(keras_hub_models, "_built", remember)
        yield models


@pytest.fixture
def made(built: list[Any]) -> list[Any]:
    """The Keras models that this test builds."""
    built.clear()
    return built


def settings(name: str, **fields: Any) -> ModelSettings:
    fields = {"weights": "random", "input_size": (SIDE, SIDE), "buckets": (BucketSettings(BATCH),)} | fields
    return ModelSettings(name="it", source=f"keras_hub:{name}", **fields)


def run(model: catalog.Model, mode: Mode = Mode.XLA) -> Outputs:
    return model.program.compile(mode, Bucket(BATCH, SIDE, SIDE)).executable(PIXELS)


def pixels_for(name: str) -> tf.Tensor:
    return preprocess.apply(tf.constant(PIXELS), keras_hub_table.CLASSES[name].preprocess)


def reason(model: ModelSettings) -> str:
    with pytest.raises(ModelFailed) as failure:
        catalog.load(model)
    assert "\n" not in str(failure.value)
    return str(failure.value)


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_a_classifier_in_xla_gives_the_probabilities_of_kerashubs_logits(name: str, made: list[Any]) -> None:
    model = catalog.load(settings(name, classes=5))
    assert model.task == Classification(5)
    (scores,) = run(model)
    expected = tf.nn.softmax(made[0](pixels_for(name), training=False))
    np.testing.assert_allclose(scores, expected, atol=1e-5)
    assert np.abs(scores[0] - scores[1]).max() > 1e-6


def decoded(detector: Any, images: tf.Tensor) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Returns all boxes that KerasHub decodes, left, top, right, bottom within the image, and their probabilities."""

    class Kept(keras.layers.Layer):
        bounding_box_format = "yxyx"

        def call(self, boxes: Any, scores: Any, images: Any = None) -> dict[str, Any]:
            return {"boxes": boxes, "scores": tf.sigmoid(scores)}

    detector.prediction_decoder = Kept()
    found = detector.decode_predictions(detector(images, training=False), images)
    top, left, bottom, right = np.moveaxis(np.clip(found["boxes"].numpy(), 0, SIDE), -1, 0)
    return np.stack([left, top, right, bottom], -1), found["scores"].numpy()


@pytest.mark.parametrize(
    "name", ["RetinaNetObjectDetector", pytest.param("DFineObjectDetector", marks=pytest.mark.slow)]
)
def test_a_detector_in_xla_finds_what_kerashub_finds(name: str, made: list[Any]) -> None:
    model = catalog.load(settings(name, classes=3, score_threshold=0.001, iou_threshold=0.5))
    assert model.task == Detection(3, max_detections=100)
    boxes, scores, classes, count = run(model)
    assert (count > 0).all()
    wanted, probabilities = decoded(made[0], pixels_for(name))
    for image in range(BATCH):
        has_area = (wanted[image, :, 2:] > wanted[image, :, :2]).all(axis=-1)
        assert scores[image, 0] == pytest.approx(probabilities[image][has_area].max(), abs=1e-5)
        for k in range(count[image]):
            apart = np.abs(wanted[image] - boxes[image, k]).max(axis=-1)
            apart = np.where(np.abs(probabilities[image].max(-1) - scores[image, k]) < 1e-4, apart, np.inf)
            # Several cells may have the same box, the whole image for one, and be as sure of different classes.
            assert classes[image, k] in probabilities[image][apart < 0.1].argmax(axis=-1)


@pytest.mark.parametrize("name", SEGMENTERS)
def test_a_segmenter_in_xla_gives_kerashubs_likeliest_classes(name: str, made: list[Any]) -> None:
    is_binary = name == "BASNetImageSegmenter"
    model = catalog.load(settings(name, **({} if is_binary else {"classes": 4})))
    assert model.task == Segmentation(2 if is_binary else 4)
    (class_map,) = run(model)
    scores = made[0](pixels_for(name), training=False).numpy()
    expected = scores[..., 0] > 0.5 if is_binary else scores.argmax(axis=-1)
    assert class_map.shape == (BATCH, SIDE, SIDE)
    assert (class_map == expected).mean() > 0.999
    assert len(np.unique(class_map)) > 1


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_a_classifier_gives_a_vector_for_each_image_as_an_embedding(name: str) -> None:
    model = catalog.load(settings(name, task="embedding", classes=5))
    assert isinstance(model.task, Embedding) and 8 <= model.task.dimensions <= 64
    assert run(model, Mode.GRAPH)[0].shape == (BATCH, model.task.dimensions)


@pytest.mark.parametrize("name", ["ViTImageClassifier", pytest.param("DFineObjectDetector", marks=pytest.mark.slow)])
def test_random_weights_are_the_same_each_time(name: str, made: list[Any]) -> None:
    for _ in range(2):
        catalog.load(settings(name, classes=3))
    for first, second in zip(*(model.get_weights() for model in made), strict=True):
        np.testing.assert_array_equal(first, second)


@pytest.mark.slow
@pytest.mark.parametrize("name", STATED)
def test_architectures_have_as_many_parameters_as_kerashub_states(name: str) -> None:
    row = FULL[name]
    model = keras_hub_models._built(name, row, row.classes, (row.side, row.side))
    stated = type(model).presets[STATED[name]]["metadata"]["params"]
    assert model.backbone.count_params() == stated


def converter(name: str) -> Any:
    return getattr(keras_hub.layers, name)(
        image_size=(SIDE, SIDE), scale=(1 / 255 / DEVIATION).tolist(), offset=(-MEAN / DEVIATION).tolist()
    )


def save(made: list[Any], name: str, folder: Path, **fields: Any) -> Any:
    """Saves a class with random weights as a preset, with its own preprocessor; returns what was saved."""
    catalog.load(settings(name, **fields))
    (task,) = made
    if hasattr(task, "prediction_decoder"):
        task.prediction_decoder = keras_hub.layers.NonMaxSuppression("yxyx", True, 0.5, 0.001, max_detections=100)
    preprocessor = type(task).preprocessor_cls
    task.preprocessor = preprocessor(image_converter=converter(preprocessor.image_converter_cls.__name__))
    with warnings.catch_warnings():  # as in `keras_file`
        warnings.filterwarnings("ignore", "__array__ implementation doesn't accept a copy", DeprecationWarning)
        task.save_to_preset(str(folder))
    return task


class Preset(NamedTuple):
    task: Any
    folder: Path
    predicted: NDArray[np.float32]
    """KerasHub's logits of `PIXELS`."""


@pytest.fixture(scope="module")
def resnet(built: list[Any], tmp_path_factory: pytest.TempPathFactory) -> Preset:
    """A small classifier of five classes, saved as a preset."""
    built.clear()
    folder = tmp_path_factory.mktemp("resnet")
    task = save(built, "ResNetImageClassifier", folder, classes=5)
    return Preset(task, folder, task.predict(PIXELS, verbose=0))


def test_a_classifiers_preset_answers_as_kerashubs_predict(resnet: Preset) -> None:
    model = catalog.load(settings("ResNetImageClassifier", weights=str(resnet.folder), input_size=None))
    assert model.weights == resnet.folder.name and model.buckets == (Bucket(BATCH, SIDE, SIDE),)
    np.testing.assert_allclose(run(model, Mode.GRAPH)[0], tf.nn.softmax(resnet.predicted), atol=1e-5)


def test_a_classifiers_preset_gets_the_pixels_of_its_own_converter(resnet: Preset) -> None:
    model = catalog.load(settings("ResNetImageClassifier", weights=str(resnet.folder), input_size=None))
    photograph = np.random.default_rng(0).integers(0, 256, (91, 130, 3), dtype=np.uint8)
    converter = resnet.task.preprocessor.image_converter
    file = io.BytesIO()
    Image.fromarray(photograph).save(file, "PNG")
    pixels = decode(file.getvalue(), partial(model.place, (SIDE, SIDE)), LIMITS, resize=model.resize).pixels
    np.testing.assert_array_equal(pixels, np.asarray(converter.resizing(photograph)))
    assert model.preparation.reason and model.fit is Fit.CROP


@pytest.mark.slow
def test_a_detectors_preset_finds_what_kerashubs_predict_finds(made: list[Any], tmp_path: Path) -> None:
    task = save(made, "RetinaNetObjectDetector", tmp_path, classes=3)
    found = task.predict(PIXELS, batch_size=BATCH, verbose=0)
    fields = {"score_threshold": 0.001, "iou_threshold": 0.5}
    _, scores, _, count = run(catalog.load(settings("RetinaNetObjectDetector", weights=str(tmp_path), **fields)))
    assert (count > 0).all()
    np.testing.assert_allclose(scores[:, 0], found["confidence"].max(axis=1), atol=1e-5)


@pytest.mark.slow
def test_a_segmenters_preset_answers_as_kerashubs_predict(made: list[Any], tmp_path: Path) -> None:
    task = save(made, "SegFormerImageSegmenter", tmp_path, classes=4)
    (class_map,) = run(catalog.load(settings("SegFormerImageSegmenter", weights=str(tmp_path), input_size=None)))
    assert (class_map == task.predict(PIXELS, verbose=0).argmax(axis=-1)).mean() > 0.999


def test_a_preset_of_one_size_may_have_a_size_that_random_weights_may_not(
    made: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "ViTImageClassifier"
    save(made, name, tmp_path, classes=5)
    monkeypatch.setitem(keras_hub_table.CLASSES, name, replace(keras_hub_table.CLASSES[name], multiple=SIDE - 1))
    assert (
        reason(settings(name)) == f"input_size: expected multiples of {SIDE - 1}, got {SIDE}x{SIDE}; write input_size:"
        f" [{2 * SIDE - 2}, {2 * SIDE - 2}]"
    )
    model = catalog.load(settings(name, weights=str(tmp_path), input_size=None))
    assert model.buckets == (Bucket(BATCH, SIDE, SIDE),)


def test_weights_come_from_a_file_and_are_what_runs(resnet: Preset, keras_file: Callable[..., str]) -> None:
    file = keras_file(resnet.task, "it.weights.h5")
    model = catalog.load(settings("ResNetImageClassifier", classes=5, weights=file))
    assert model.weights == "it.weights.h5"
    expected = tf.nn.softmax(resnet.task(pixels_for("ResNetImageClassifier"), training=False))
    np.testing.assert_allclose(run(model, Mode.GRAPH)[0], expected, atol=1e-5)


def test_a_file_of_kerashub_keeps_its_own_preprocessing(resnet: Preset, keras_file: Callable[..., str]) -> None:
    source = keras_file(resnet.task, "it.keras")
    model = catalog.load(
        ModelSettings(name="it", source=source, input_size=(SIDE, SIDE), buckets=(BucketSettings(BATCH),))
    )
    np.testing.assert_allclose(run(model, Mode.GRAPH)[0], resnet.predicted, atol=1e-4)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (settings("ResNetImageClasifier"), "source: KerasHub has no ResNetImageClasifier for images; did you mean"),
        (settings("GemmaCausalLM"), "source: KerasHub has no GemmaCausalLM for images; "),
        (
            settings("SAMImageSegmenter"),
            "source: SAMImageSegmenter of KerasHub can't be served: it takes points and boxes beside the image",
        ),
        (
            settings("DepthAnythingDepthEstimator"),
            "source: DepthAnythingDepthEstimator of KerasHub can't be served: it gives the depth of each pixel",
        ),
        (
            settings("ResNetImageClassifier", weights=None),
            "weights: expected random, a preset such as resnet_50_imagenet, or the path",
        ),
        (
            settings("ResNetImageClassifier", weights="/secret/none.h5"),
            f"weights: expected {keras_hub_models.WEIGHTS}, found no file none.h5",
        ),
        (
            settings("ResNetImageClassifier", task="detection"),
            "task: expected classification or embedding for keras_hub:ResNetImageClassifier, got detection",
        ),
        (
            settings("SegFormerImageSegmenter", input_size=(72, 64)),
            "input_size: expected multiples of 32, got 72x64",
        ),
        (
            settings("ResNetImageClassifier", weights="no_such_preset"),
            "weights: ResNetImageClassifier has no preset no_such_preset; expected one of resnet_101_imagenet, ",
        ),
        (
            settings("ResNetImageClassifier", weights="resnet_50_imagnet"),
            "weights: ResNetImageClassifier has no preset resnet_50_imagnet; did you mean resnet_50_imagenet",
        ),
        (
            settings("ResNetImageClassifier", weights="hf://xlaserve/none"),
            "weights: the preset hf://xlaserve/none can't be loaded as ResNetImageClassifier: ",
        ),
    ],
)
def test_what_kerashub_cannot_do_fails_with_a_reason(model: ModelSettings, expected: str) -> None:
    assert reason(model).startswith(expected)


def test_a_preset_of_another_class_or_class_count_fails_with_a_reason(resnet: Preset) -> None:
    other = reason(settings("VGGImageClassifier", weights=str(resnet.folder)))
    assert other.startswith(f"weights: the preset in {resnet.folder.name} can't be loaded as VGGImageClassifier: ")
    assert str(resnet.folder) not in other
    assert reason(settings("ResNetImageClassifier", weights=str(resnet.folder), classes=7)) == (
        "classes: expected 5, as the preset has, got 7; leave classes out"
    )


def test_without_kerashub_its_sources_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, keras_hub_models.__name__)
    monkeypatch.delattr(sources, "keras_hub_models")
    monkeypatch.setitem(sys.modules, "keras_hub", None)
    assert reason(settings("ResNetImageClassifier")) == (
        "source: keras_hub:ResNetImageClassifier needs keras_hub; install xlaserve[gpu,hub] or, with tensorflow-cpu,"
        " xlaserve[cpu,hub-cpu] and then keras-hub with --no-deps"
    )
    monkeypatch.setattr(keras_hub_table, "find_spec", lambda _: None)
    assert keras_hub_table.names() == ()


@pytest.mark.parametrize(
    "source", [pytest.param("keras_cv:ResNet18", marks=pytest.mark.slow), "keras_hub:ResNetImageClassifier"]
)
def test_only_its_sources_load_kerashub_whatever_backend_is_configured(source: str, tmp_path: Path) -> None:
    (tmp_path / "keras.json").write_text('{"backend": "torch", "floatx": "float16"}')
    program = f"""
import sys
from xlaserve.config import ModelSettings
from xlaserve.models import catalog
from xlaserve.models.sources import source_names
source_names.names()
catalog.load(ModelSettings(name="it", source="builtin:digits"))
print("loaded:", [name for name in ("keras", "keras_hub", "keras_cv") if name in sys.modules])
print("task:", catalog.load(ModelSettings(name="it", source={source!r}, weights="random", input_size=(64, 64))).task)
"""
    environment = {**os.environ, "KERAS_HOME": str(tmp_path)}
    environment.pop("KERAS_BACKEND", None)
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment)
    loaded, task = (line for line in ran.stdout.splitlines() if line.startswith(("loaded:", "task:")))
    assert loaded == "loaded: ['keras']"
    assert task.startswith("task: Classification(classes=1000")


def test_a_preset_that_may_change_is_not_kept_in_a_compile_cache(tmp_path: Path) -> None:
    assert catalog.can_be_kept(settings("ResNetImageClassifier"))
    assert catalog.can_be_kept(settings("ResNetImageClassifier", weights=str(tmp_path)))
    kaggle = "kaggle://keras/resnetv1/keras/resnet_50_imagenet"
    assert catalog.can_be_kept(settings("ResNetImageClassifier", weights=f"{kaggle}/3"))
    for weights in ("resnet_50_imagenet", kaggle, "hf://keras/resnet_50_imagenet"):
        assert not catalog.can_be_kept(settings("ResNetImageClassifier", weights=weights))


def test_every_task_of_kerashub_for_images_is_served_or_refused() -> None:
    kinds = keras_hub.models
    bases = (kinds.ImageClassifier, kinds.ObjectDetector, kinds.ImageSegmenter, kinds.DepthEstimator)
    theirs = {
        name
        for name, kind in vars(kinds).items()
        if isinstance(kind, type) and issubclass(kind, bases) and kind not in bases
    }
    assert theirs == {*keras_hub_table.CLASSES, *keras_hub_table.REFUSED}
    assert set(TINY) == set(keras_hub_table.CLASSES)
    assert {f"keras_hub:{name}" for name in TINY} < set(source_names.names())
