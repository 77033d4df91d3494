from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from xlaserve.config import Bucket, BucketSettings, Mode, ModelSettings
from xlaserve.engine.program import Outputs
from xlaserve.errors import ModelFailed
from xlaserve.models import catalog
from xlaserve.models.sources import keras_cv_table, source_names
from xlaserve.models.task import Classification, Detection, Embedding, Segmentation, Task

pytestmark = pytest.mark.usefixtures("no_network")
SIDE = 64
BATCH = 2
PIXELS = np.random.default_rng(0).integers(0, 256, (BATCH, SIDE, SIDE, 3), np.uint8)


def settings(name: str, **fields: Any) -> ModelSettings:
    fields = {"weights": "random", "input_size": (SIDE, SIDE), "buckets": (BucketSettings(BATCH),)} | fields
    return ModelSettings(name="it", source=f"keras_cv:{name}", **fields)


def run(model: catalog.Model, mode: Mode = Mode.GRAPH) -> Outputs:
    return model.program.compile(mode, Bucket(BATCH, SIDE, SIDE)).executable(PIXELS)


def built(monkeypatch: pytest.MonkeyPatch, module: Any, builder: str) -> list[Any]:
    """Returns a list that the Keras models come into, which `builder` makes from then on."""
    models = []
    build = getattr(module, builder)

    def remember(*arguments: Any, **named: Any) -> Any:
        models.append(build(*arguments, **named))
        return models[-1]

    monkeypatch.setattr(module, builder, remember)
    return models


def reason(model: ModelSettings) -> str:
    with pytest.raises(ModelFailed) as failure:
        catalog.load(model)
    assert "\n" not in str(failure.value)
    return str(failure.value)


@pytest.mark.parametrize(
    ("name", "task"),
    [
        ("ResNet18", Classification(5)),
        ("YOLOV8Detector-YOLOV8XS", Detection(5, max_detections=100)),
        pytest.param("DeepLabV3Plus-MobileNetV3Large", Segmentation(5), marks=pytest.mark.slow),
        pytest.param("SegFormer-MiTB0", Segmentation(5), marks=pytest.mark.slow),
    ],
)
def test_each_kind_of_model_runs_in_xla_without_a_network(name: str, task: Task) -> None:
    model = catalog.load(settings(name, classes=5))
    assert model.task == task
    outputs = run(model, Mode.XLA)
    shapes = [tuple(SIDE if side == -1 else side for side in spec.shape[1:]) for spec in task.outputs]
    assert [output.shape for output in outputs] == [(BATCH, *shape) for shape in shapes]
    dtypes = {"FP32": "float32", "INT32": "int32", "UINT8": "uint8"}
    assert [output.dtype.name for output in outputs] == [dtypes[spec.datatype] for spec in task.outputs]


def test_a_detector_finds_what_kerascv_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    import keras_cv

    from xlaserve.models.sources import keras_cv_models

    made = built(monkeypatch, keras_cv_models, "_with_head")
    model = catalog.load(settings("RetinaNet-ResNet18", classes=3, score_threshold=0.3, iou_threshold=0.4))
    boxes, scores, _, count = run(model)
    (detector,) = made
    detector.prediction_decoder = keras_cv.layers.NonMaxSuppression("xyxy", True, 0.4, 0.3, max_detections=100)
    images = tf.constant(PIXELS, tf.float32)
    expected = detector.decode_predictions(detector({"images": images}, training=False), images)
    assert (count > 0).all()
    # KerasCV's boxes may lie outside the image, where ours are cut off and dropped.
    for image in range(BATCH):
        best = float(expected["confidence"][image].numpy().max())
        assert scores[image, 0] == pytest.approx(best, abs=1e-4)
        assert (boxes[image] >= 0).all() and (boxes[image] <= SIDE).all()


def test_a_backbone_gives_its_averaged_features_as_an_embedding() -> None:
    model = catalog.load(settings("ResNet18", task="embedding"))
    assert model.task == Embedding(512)
    assert run(model)[0].shape == (BATCH, 512)


@pytest.mark.filterwarnings("ignore:Skipping nested container")  # of the file that does not fit
def test_weights_come_from_a_file_and_are_what_runs(
    keras_file: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import keras_cv

    saved = built(monkeypatch, keras_cv.models, "ImageClassifier")
    first = catalog.load(settings("MobileNetV3Small"))
    file = keras_file(saved[0], "it.weights.h5")
    second = catalog.load(settings("MobileNetV3Small", weights=file))
    assert second.weights == "it.weights.h5"
    np.testing.assert_allclose(run(first)[0], run(second)[0], atol=1e-6)
    other = reason(settings("ResNet18", weights=file))
    assert re.fullmatch(
        r"weights: expected those of keras_cv:ResNet18, got a file that does not fit \d+ of its layers, such as \w+:"
        r" it\.weights\.h5; .+",
        other,
    )


@pytest.mark.slow
def test_pixels_are_scaled_once() -> None:
    own = run(catalog.load(settings("ResNet18")))
    stated = run(catalog.load(settings("ResNet18", preprocess="unit")))
    np.testing.assert_allclose(own[0], stated[0], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (settings("ResNet50V3"), "source: KerasCV has no ResNet50V3; did you mean"),
        (settings("YOLO-ResNet18"), "source: KerasCV has no YOLO-ResNet18; "),
        (
            settings("SegFormer-ResNet18"),
            "source: SegFormer can't be built on ResNet18; expected one of SegFormer-MiTB0, ",
        ),
        (settings("ResNet18", weights=None), "weights: expected random or the path of a file that save_weights wrote"),
        (
            settings("ResNet18", weights="/secret/none.h5"),
            "weights: expected random or a file's path, found no file none.h5",
        ),
        (
            settings("ResNet18", task="detection"),
            "task: expected classification or embedding for keras_cv:ResNet18, got detection",
        ),
        (
            settings("SegFormer-MiTB0", input_size=(72, 64)),
            "input_size: expected multiples of 32, got 72x64",
        ),
        (settings("ResNet18", safe_mode=False), "safe_mode: keras_cv:ResNet18 takes none, expected no safe_mode"),
    ],
)
def test_what_kerascv_cannot_do_fails_with_a_reason(model: ModelSettings, expected: str) -> None:
    assert reason(model).startswith(expected)


def test_the_table_has_every_architecture_that_kerascv_names() -> None:
    import keras_cv

    theirs = {
        name.removesuffix("Backbone")
        for name, kind in vars(keras_cv.models).items()
        if name.endswith("Backbone")
        and kind.__base__.__name__ in {backbone.constructor for backbone in keras_cv_table.BACKBONES.values()}
    }
    assert theirs == set(keras_cv_table.CLASSIFIERS)


@pytest.mark.slow
def test_architectures_have_as_many_parameters_as_kerascv_states() -> None:
    import keras_cv

    for name, preset in (
        ("ResNet18", "resnet18"),
        ("ResNet18V2", "resnet18_v2"),
        ("CSPDarkNetTiny", "csp_darknet_tiny"),
        ("EfficientNetV2B0", "efficientnetv2_b0"),
        ("YOLOV8XS", "yolo_v8_xs_backbone"),
    ):
        backbone = keras_cv_table.BACKBONES[name]
        constructor = getattr(keras_cv.models, backbone.constructor)
        built = constructor(include_rescaling=True, input_shape=(64, 64, 3), **backbone.arguments)
        assert built.count_params() == constructor.presets[preset]["metadata"]["params"], name


def test_the_catalog_lists_every_source_with_a_name() -> None:
    names = source_names.names()
    assert len(names) == len(set(names))
    assert {"keras.applications:ResNet50", "keras_cv:MiTB5", "keras_cv:RetinaNet-ResNet50"} < set(names)
    assert {"builtin:digits", "builtin:noop"} < set(names)
    assert sum(name.startswith("keras.applications:") for name in names) == 40
