from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from xlaserve.config import Bucket, BucketSettings, Mode, ModelSettings
from xlaserve.errors import ModelFailed
from xlaserve.inspection.model_file import formats, serving
from xlaserve.models import catalog
from xlaserve.models.task import Detection, Tensors

pytest.importorskip("openvino")
pytestmark = pytest.mark.filterwarnings("ignore:.*tf.lite.Interpreter", "ignore:Statistics for quantized inputs")

SIDE, ANCHORS, CLASSES, MOST = 8, 40, 3, 20
RANDOM = np.random.default_rng(3)
PIXELS = RANDOM.integers(0, 256, (4, SIDE, SIDE, 3), np.uint8)
PLACES = np.concatenate((RANDOM.uniform(0.3, 0.7, (ANCHORS, 2)), RANDOM.uniform(0.2, 0.4, (ANCHORS, 2))), 1)
WEIGHTS = RANDOM.normal(0, 0.4, (SIDE * SIDE * 3, ANCHORS * (5 + CLASSES))).astype(np.float32)
"""Of four offsets and scores with a background for each anchor."""

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a detector with TensorFlow Lite's own suppression."""

    def write(*, is_of_class: bool = False, is_quantized: bool = False, anchors: int = ANCHORS) -> Path:
        options = {
            **{"max_detections": f"i: {MOST}", "max_classes_per_detection": "i: 1", "detections_per_class": "i: 100"},
            **{"nms_score_threshold": "f: 0.5", "nms_iou_threshold": "f: 0.4", "num_classes": f"i: {CLASSES}"},
            **{"y_scale": "f: 10", "x_scale": "f: 8", "h_scale": "f: 5", "w_scale": "f: 4"},
            "use_regular_nms": f"b: {is_of_class}".lower(),
        }
        given = " ".join(f'attr {{ key: "{name}" value {{ {one} }} }}' for name, one in options.items())

        @tf.function(experimental_implements=f'name: "TFLite_Detection_PostProcess" {given}', autograph=False)
        def suppressed(box_encodings: Any, class_predictions: Any, anchors: Any) -> Any:
            return tf.zeros((1, MOST, 4)), tf.zeros((1, MOST)), tf.zeros((1, MOST)), tf.zeros((1,))

        @tf.function(input_signature=[tf.TensorSpec((1, SIDE, SIDE, 3), tf.float32)], autograph=False)
        def detect(pixels: tf.Tensor) -> Any:
            values = tf.matmul(tf.reshape(pixels / 255.0 - 0.5, (1, -1)), tf.constant(WEIGHTS))
            values = tf.reshape(values, (1, ANCHORS, 5 + CLASSES))
            return suppressed(
                values[..., :4], tf.nn.softmax(values[..., 4:]), tf.constant(PLACES[:anchors], tf.float32)
            )

        converter = tf.lite.TFLiteConverter.from_concrete_functions([detect.get_concrete_function()], tf.Module())
        converter.allow_custom_ops = True
        if is_quantized:
            converter.optimizations = [tf.lite.Optimize.DEFAULT]
            noise = RANDOM.uniform(0, 255, (20, 1, SIDE, SIDE, 3)).astype(np.float32)
            noise[0, ..., 0], noise[1, ..., 0] = 0, 255
            converter.representative_dataset = lambda: ([one] for one in noise)
            converter.inference_input_type = tf.uint8
        file = tmp_path / "detect.tflite"
        file.write_bytes(converter.convert())
        return file

    return write


def settings(file: Path, **fields: Any) -> ModelSettings:
    return ModelSettings(name="it", source=str(file), buckets=(BucketSettings(len(PIXELS)),), **fields)


def of_lite(file: Path) -> list[list[Any]]:
    """The boxes in pixels, scores and classes that TensorFlow Lite finds in each image."""
    interpreter = tf.lite.Interpreter(str(file))
    interpreter.allocate_tensors()
    (taken,) = interpreter.get_input_details()
    given = sorted(interpreter.get_output_details(), key=lambda one: str(one["name"]))
    found = []
    for image in PIXELS:
        interpreter.set_tensor(taken["index"], image[None].astype(taken["dtype"]))
        interpreter.invoke()
        boxes, classes, scores, count = (interpreter.get_tensor(one["index"])[0] for one in given)
        last = int(count)
        found.append([np.clip(boxes[:last][:, [1, 0, 3, 2]], 0, 1) * SIDE, scores[:last], classes[:last]])
    return found


def found_in(file: Path, mode: Mode = Mode.XLA, **fields: Any) -> list[list[Any]]:
    model = catalog.load(settings(file, **fields))
    boxes, scores, classes, counts = model.program.compile(mode, Bucket(len(PIXELS), SIDE, SIDE)).executable(PIXELS)
    return [[boxes[place][:count], scores[place][:count], classes[place][:count]] for place, count in enumerate(counts)]


@pytest.mark.parametrize("is_of_class", [False, True])
@pytest.mark.parametrize("mode", [Mode.XLA, Mode.GRAPH, Mode.OPENVINO])
def test_a_detector_of_tensorflow_lite_finds_what_its_runtime_finds(
    write: Write, mode: Mode, is_of_class: bool
) -> None:
    file = write(is_of_class=is_of_class)
    assert catalog.load(settings(file)).task == Detection(CLASSES, max_detections=MOST)
    expected = of_lite(file)
    assert {len(classes) for _, _, classes in expected} - {0, MOST}
    for (boxes, scores, classes), wanted in zip(found_in(file, mode), expected, strict=True):
        np.testing.assert_array_equal(classes, wanted[2])
        np.testing.assert_allclose(scores, wanted[1], atol=1e-3)
        np.testing.assert_allclose(boxes, wanted[0], atol=1e-3)


def test_a_quantized_detector_of_tensorflow_lite_finds_the_same(write: Write) -> None:
    file = write(is_quantized=True)
    assert catalog.load(settings(file)).is_narrow
    for (boxes, scores, classes), wanted in zip(found_in(file), of_lite(file), strict=True):
        np.testing.assert_array_equal(classes, wanted[2])
        np.testing.assert_allclose(scores, wanted[1], atol=0.02)
        np.testing.assert_allclose(boxes, wanted[0], atol=0.02 * SIDE)


@pytest.mark.parametrize("first", ["???", "background"])
def test_labels_of_a_background_first_name_its_classes(write: Write, first: str) -> None:
    file = write()
    labels = (first, "cat", "dog", "cow")
    model = catalog.load(settings(file, labels=labels))
    assert isinstance(model.task, Detection)
    assert model.task.labels == labels
    for one, wanted in zip(found_in(file, labels=labels), found_in(file, labels=labels[1:]), strict=True):
        np.testing.assert_array_equal(one[2], wanted[2] + 1)
        np.testing.assert_allclose(one[1], wanted[1])


def test_settings_take_precedence_over_what_the_file_says(write: Write) -> None:
    file = write()
    found = found_in(file, score_threshold=0.8, max_detections=2)
    assert all(len(scores) <= 2 and (scores > 0.8).all() for _, scores, _ in found)
    everything = [len(scores) for _, scores, _ in found_in(file, score_threshold=0.1, iou_threshold=1.0)]
    assert everything == [MOST] * len(PIXELS)


def test_another_task_gets_decoded_boxes_and_scores(write: Write) -> None:
    task = catalog.load(settings(write(), task="tensors")).task
    assert isinstance(task, Tensors)
    assert {(one.name, *one.shape[-2:]) for one in task.outputs} == {
        ("boxes", ANCHORS, 4),
        ("scores", ANCHORS, CLASSES),
    }


def test_anchors_that_do_not_fit_the_boxes_are_refused(write: Write) -> None:
    file = write(anchors=ANCHORS - 1)
    with pytest.raises(ModelFailed, match=r"expected offsets \[n, 39, 4\] and scores \[n, 39, 3 or more\]"):
        catalog.load(settings(file))


def test_inspect_reads_a_detector_of_tensorflow_lite_as_detection(write: Write) -> None:
    plan = serving.plan(formats.describe(write()))
    assert dict(plan.facts)["task"].startswith("detection")
    assert [(line.field, line.value) for line in plan.lines if line.field == "preprocess"] == [("preprocess", "tf")]
