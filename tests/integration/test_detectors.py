"""KerasCV's YOLOV8 and KerasHub's D-FINE, served: in each mode they find what the library's own `predict` finds.

Both are built, saved and asked by their library alone, run operation by operation. Weights are random but fixed.
"""

from __future__ import annotations

import io
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import grpc
import keras_cv
import keras_hub
import numpy as np
import pytest
import tensorflow as tf
from PIL import Image
from tests.integration.conftest import Server, StartServer
from tests.same_objects import Objects, unlike
from tests.server.models.sources.keras_hub_classes import TINY

from xlaserve.models.fast_decoding import photograph
from xlaserve.models.sources import keras_hub_models, keras_hub_table, random_weights
from xlaserve.models.sources.keras_cv_table import BACKBONES
from xlaserve_proto import vision_pb2 as pb
from xlaserve_proto import vision_pb2_grpc as pb_grpc

pytestmark = pytest.mark.slow
SIDE: Final = 128
CLASSES: Final = 5
AT_ONCE: Final = 4
IMAGES: Final = [photograph(SIDE, SIDE, seed).convert("RGB") for seed in range(20)]
PIXELS: Final = np.stack([np.asarray(image) for image in IMAGES])
IOU: Final = 0.5
MOST: Final = 100
YOLO: Final = "keras_cv:YOLOV8Detector-YOLOV8XS"
D_FINE: Final = "keras_hub:DFineObjectDetector"
LEAST_SCORE: Final = {YOLO: 0.5, D_FINE: 0.3}
MODES: Final = ("graph", "xla", "openvino")


def yolo(file: Path) -> Any:
    """Builds a YOLOV8 and saves its weights."""
    with random_weights.seeded():
        backbone = keras_cv.models.YOLOV8Backbone(
            include_rescaling=True, input_shape=(None, None, 3), **BACKBONES["YOLOV8XS"].arguments
        )
        detector = keras_cv.models.YOLOV8Detector(
            backbone=backbone, num_classes=CLASSES, bounding_box_format="xyxy", fpn_depth=1
        )
    random_weights.settle(detector, (SIDE, SIDE), lambda pixels: detector(pixels, training=True))
    for level in (1, 2, 3):
        # Else nearly all scores would be 1, and boxes larger than the image.
        boxes, classes = (detector.get_layer(f"yolo_v8_head_{level}_{of}_3_conv") for of in ("box", "class"))
        for layer in (boxes, classes):
            layer.kernel.assign(layer.kernel * 0.1)
        boxes.bias.assign(np.tile(-0.2 * np.arange(16), 4))
    detector.save_weights(file)
    return detector


def d_fine(folder: Path) -> Any:
    """Builds a D-FINE and saves it as a preset."""
    name = D_FINE.partition(":")[2]
    arguments = {"backbone": {**TINY[name]["backbone"], "num_queries": 60}}
    row = replace(keras_hub_table.CLASSES[name], arguments=arguments)
    with random_weights.seeded():
        detector = keras_hub_models._built(name, row, CLASSES, (SIDE, SIDE))
    random_weights.settle(detector, (SIDE, SIDE), lambda pixels: detector(pixels / 255, training=True))
    random = np.random.default_rng(0)
    for weight in detector.trainable_weights:
        if not np.any(weight):  # as layers begin that decide nothing yet
            weight.assign(random.normal(0, 0.1, weight.shape))
    # Else no box would be large enough to overlap another.
    detector.backbone.enc_bbox_head.dense_layers[-1].bias.assign([0.0, 0.0, 3.0, 3.0])
    detector.preprocessor = keras_hub.models.DFineObjectDetectorPreprocessor(
        image_converter=keras_hub.layers.DFineImageConverter(image_size=(SIDE, SIDE), scale=1 / 255)
    )
    detector.save_to_preset(str(folder))
    return detector


@pytest.fixture(scope="module")
def detectors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, str]]:
    """The libraries' own detectors, and where their weights lie."""
    folder = tmp_path_factory.mktemp("detectors")
    file, preset = folder / "yolo.weights.h5", folder / "d_fine"
    with warnings.catch_warnings():
        # Where it saves them, Keras hands its variables to NumPy 2 in the way of NumPy 1.
        warnings.filterwarnings("ignore", "__array__ implementation doesn't accept a copy", DeprecationWarning)
        return {YOLO: (yolo(file), str(file)), D_FINE: (d_fine(preset), str(preset))}


@pytest.fixture(scope="module")
def server(start_module_server: StartServer, detectors: dict[str, tuple[Any, str]]) -> Server:
    models = [
        {
            "name": source.partition(":")[0],
            "source": source,
            "weights": weights,
            "classes": CLASSES,
            "input_size": [SIDE, SIDE],
            "modes": list(MODES),
            "buckets": [AT_ONCE],
            "score_threshold": LEAST_SCORE[source],
            "iou_threshold": IOU,
            "max_detections": MOST,
        }
        for source, (_, weights) in detectors.items()
    ]
    return start_module_server({"models": models})


def predicted(source: str, detector: Any, iou: float = IOU) -> list[Objects]:
    """Returns what the library itself finds."""
    limits = {"iou_threshold": iou, "confidence_threshold": LEAST_SCORE[source], "max_detections": 4 * MOST}
    if source == YOLO:
        detector.prediction_decoder = keras_cv.layers.NonMaxSuppression("xyxy", from_logits=False, **limits)
    else:
        detector.prediction_decoder = keras_hub.layers.NonMaxSuppression("yxyx", from_logits=True, **limits)
    detector.run_eagerly = True
    images = tf.data.Dataset.from_tensor_slices(PIXELS.astype(np.float32)).batch(AT_ONCE)
    found = detector.predict(images, verbose=0)
    boxes = found["boxes"] if source == YOLO else found["boxes"][..., [1, 0, 3, 2]]
    classes = found["classes" if source == YOLO else "labels"]
    each = zip(boxes, found["confidence"], classes, found["num_detections"], strict=True)
    return [Objects(box[:count], score[:count], label[:count]) for box, score, label, count in each]


def served(server: Server, source: str, mode: str) -> list[Objects]:
    """Returns what the server finds in the same images, sent as PNG."""
    with grpc.insecure_channel(server.grpc) as channel:
        vision = pb_grpc.VisionStub(channel)
        results: list[pb.Detections] = []
        for first in range(0, len(IMAGES), AT_ONCE):
            images = [png(image) for image in IMAGES[first : first + AT_ONCE]]
            results += vision.Detect(pb.DetectRequest(model=source.partition(":")[0], images=images, mode=mode)).results
    return [
        Objects(
            np.array([[one.box.x_min, one.box.y_min, one.box.x_max, one.box.y_max] for one in result.detections]),
            np.array([one.score for one in result.detections]),
            np.array([one.index for one in result.detections]),
        )
        for result in results
    ]


def png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize("source", [YOLO, D_FINE])
def test_a_served_detector_finds_what_its_library_predicts(
    source: str, detectors: dict[str, tuple[Any, str]], server: Server
) -> None:
    detector, _ = detectors[source]
    whole = predicted(source, detector)
    for found, all_found in zip(whole, predicted(source, detector, iou=1.0), strict=True):
        assert 2 <= len(found.scores) <= MOST and len(all_found.scores) > 1.5 * len(found.scores), "suppression matters"
    expected = [found.within(SIDE) for found in whole]
    assert sum(np.any((found.boxes < 0) | (found.boxes > SIDE)) for found in whole) > len(whole) / 2, "the edge matters"
    for mode in MODES:
        for ours, theirs in zip(served(server, source, mode), expected, strict=True):
            assert unlike(ours, theirs, pixels=0.02, score=1e-4) == [], mode
