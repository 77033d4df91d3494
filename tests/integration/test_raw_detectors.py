"""Detectors that give boxes before suppression, over gRPC and HTTP: bright cells of an image are objects."""

from __future__ import annotations

import io
import json
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tests.integration.conftest import Server, StartServer

from xlaserve_client import VisionClient

SIDE, CELL = 32, 8
CELLS = (SIDE // CELL) ** 2
SQUARES = [(0, 0), (32, 32)]
"""Left and top of the bright squares, each of a cell, in an image of 64 x 64 pixels."""


def save(folder: Path) -> dict[str, str]:
    """Saves models that give a score of each cell's brightness: with offsets of 0 from its anchor, or with its box."""
    import tensorflow as tf

    x, y = np.meshgrid(np.arange(CELL / 2, SIDE, CELL), np.arange(CELL / 2, SIDE, CELL))
    boxes = np.stack((x.ravel(), y.ravel(), np.full(CELLS, CELL), np.full(CELLS, CELL)), axis=-1).astype(np.float32)

    class Ssd(tf.Module):
        @tf.function(autograph=False)
        def give(self, photo: tf.Tensor) -> dict[str, tf.Tensor]:
            scores = tf.reshape(tf.nn.avg_pool2d(photo, CELL, CELL, "VALID")[..., :1] / 255.0, (-1, CELLS, 1))
            offsets = tf.zeros_like(scores) * tf.zeros((1, CELLS, 4))
            return {"offsets": offsets, "chances": tf.concat((1.0 - scores, scores), axis=-1)}

    class Yolo(tf.Module):
        @tf.function(autograph=False)
        def give(self, photo: tf.Tensor) -> dict[str, tf.Tensor]:
            scores = tf.reshape(tf.nn.avg_pool2d(photo, CELL, CELL, "VALID")[..., :1] / 255.0, (-1, CELLS, 1))
            rows = tf.concat((tf.zeros_like(scores) + boxes[None], scores), axis=-1)
            return {"output0": tf.transpose(rows, (0, 2, 1))}

    spec = tf.TensorSpec((None, SIDE, SIDE, 3), tf.float32, name="photo")
    for name, module in (("ssd", Ssd()), ("yolo", Yolo())):
        tf.saved_model.save(module, str(folder / name), signatures=module.give.get_concrete_function(spec))
    return {file.stem: str(file) for file in folder.iterdir()}


def photo() -> bytes:
    pixels = np.zeros((64, 64, 3), np.uint8)
    for left, top in SQUARES:
        pixels[top : top + 16, left : left + 16] = 255
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


WANTED = [[0, 0, 16, 16], [32, 32, 48, 48]]
"""Boxes in the image, in which the cells are twice as large."""


@pytest.fixture(scope="module")
def serving(start_module_server: StartServer, tmp_path_factory: pytest.TempPathFactory) -> Server:
    folder = tmp_path_factory.mktemp("models")
    sources = save(folder)
    centres = np.arange(CELL / 2, SIDE, CELL)
    x, y = np.meshgrid(centres, centres)
    np.save(folder / "anchors.npy", np.stack((x, y, x * 0 + CELL, x * 0 + CELL), axis=-1).reshape(-1, 4))
    grid = {"kind": "ssd", "strides": [CELL], "scales": [CELL / SIDE, 1], "reduce_first_layer": False}
    file = {"kind": "ssd", "anchors": str(folder / "anchors.npy"), "anchor_format": "center_xywh"}
    common = {"labels": ["lamp"], "score_threshold": 0.5, "buckets": [1, 4]}
    return start_module_server(
        {
            "models": [
                {"name": "ssd", "source": sources["ssd"], **common, "box_decoding": file},
                {"name": "yolo", "source": sources["yolo"], **common, "box_decoding": "yolo"},
                {"name": "unfit", "source": sources["ssd"], **common, "box_decoding": grid},
            ],
            "exit_on_model_failure": False,
        }
    )


@pytest.mark.parametrize("model", ["ssd", "yolo"])
def test_objects_come_over_grpc(serving: Server, model: str) -> None:
    with VisionClient(serving.grpc) as client:
        for found in client.detect([photo()] * 3, model=model).results:
            places = sorted([one.box.x_min, one.box.y_min, one.box.x_max, one.box.y_max] for one in found.detections)
            np.testing.assert_allclose(places, WANTED, atol=1e-3)
            assert {one.label for one in found.detections} == {"lamp"}
            assert all(0.9 < one.score <= 1 for one in found.detections), "the image was shrunk"
        outputs = client.infer(photo(), model=model).outputs
        assert (outputs["count"].tolist(), outputs["boxes"].shape) == ([2], (1, 100, 4))


@pytest.mark.parametrize("model", ["ssd", "yolo"])
def test_objects_come_over_http(serving: Server, model: str) -> None:
    path = f"http://{serving.http}/v1/models/{model}:detect"
    with urllib.request.urlopen(urllib.request.Request(path, photo()), timeout=30) as answer:
        found: dict[str, Any] = json.load(answer)
    places = sorted([*one["box"].values()] for one in found["results"][0]["detections"])
    np.testing.assert_allclose(places, WANTED, atol=1e-3)


def test_anchors_that_do_not_fit_fail_the_model_with_what_to_set(serving: Server) -> None:
    with VisionClient(serving.grpc) as client:
        (unfit,) = [one for one in client.models() if one.name == "unfit"]
    assert unfit.state == "failed"
    assert "as many anchors as the model gives boxes for 32x32 pixels, 16, got 96" in unfit.reason
    assert "set strides" in unfit.reason
